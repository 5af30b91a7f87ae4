"""Output of `autoplan profile --health`: usual rates, and slow parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from autoplan.base.units import format_flops, format_percent, format_rate
from autoplan.profiler.health import MIN_PEERS
from autoplan.report.terminal import print_table

if TYPE_CHECKING:
    from autoplan.api.outputs import CheckedHealth, CheckedRate, SlowPart

MAX_SLOW = 20  # parts named individually
OFF_SHARE = 1.5  # ratio to the cluster file's rate that is reported, as links are known to some 15 %


def print_health(console: Console, health: CheckedHealth) -> None:
    """Print the rates, then the slow parts."""
    columns = [("", False), ("number", True), ("usual", True), ("slowest", True)]
    has_described = any(rate.described for rate in health.rates)
    columns += [("cluster file", True), ("reached", True)] if has_described else []
    print_table(console, columns, [_cells(rate)[: len(columns)] for rate in health.rates], keep=4)
    for slow in health.slow[:MAX_SLOW]:
        console.print(f"slow: {_slow_words(slow)}", soft_wrap=True)
    if len(health.slow) > MAX_SLOW:
        console.print(f"slow: {len(health.slow) - MAX_SLOW:,} more, see --json")
    if not health.slow:
        compared = "device and no link" if health.ranks >= MIN_PEERS else "device"
        console.print(
            f"no {compared} is slower than its peers"
            if health.ranks > 1
            else "a single device has no peers to compare with"
        )


def warnings_of(health: CheckedHealth) -> list[str]:
    """Return warnings on rates that are off in general, and on checks that were not possible."""
    texts = [
        f"{rate.what}: usually {100 * rate.usual / rate.described:.0f} % of the rate in the cluster file"
        for rate in health.rates
        if rate.described and rate.usual * OFF_SHARE < rate.described
    ]
    if health.disturbance:
        texts.append(f"GEMM timings were disturbed: {health.disturbance}")
    if 1 < health.ranks < MIN_PEERS:
        texts.append(f"links were not compared: this needs {MIN_PEERS} devices, got {health.ranks}")
    if health.rounds_left:
        texts.append(
            f"the budget ran out {health.rounds_left} of {health.rounds} rounds early: some pairs were not measured"
        )
    return texts


def _slow_words(slow: SlowPart) -> str:
    """Describe a slow part, and how slow it is."""
    places = [f"device {device} of {host}" for host, device in zip(slow.hosts, slow.devices, strict=True)]
    share = f"{100 * slow.rate_share:.0f} % of the usual rate"
    if slow.part == "pair":
        return f"between {places[0]} and {places[1]}: messages at {share}"
    titles = {"device": "matrix products", "link": "messages inside its node", "nic": "messages to other nodes"}
    return f"{places[0]}: {titles[slow.part]} at {share}"


def _cells(rate: CheckedRate) -> tuple[str, ...]:
    write = format_flops if rate.what == "matrix products" else format_rate
    described = write(rate.described) if rate.described else ""
    reached = format_percent(rate.usual / rate.described) if rate.described else ""
    return rate.what, f"{rate.number:,}", write(rate.usual), write(rate.least), described, reached

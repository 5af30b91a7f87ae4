"""Speed of the search, of bounds and of estimates, on one core and beside other planners.

usage: python benchmarks/speed.py [--runs N] [--calculon DIR] [--simumax DIR] [--peer-python PYTHON] [--report FILE]

Every space of `benchmarks/spaces/` is searched by the command line in a process of its own; wall and CPU time are those
of the whole process, with byte code cached as after a first run.  Calculon and SimuMax run where a checkout of them is
named, by an interpreter that has what they import: plans priced in full per second of CPU time, in turns with ours, so
that the ratio is of one machine at one time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.api.problem import make_problem, make_space
from autoplan.base.files import read_table, write_text
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import legal
from autoplan.search.bounds import first_layers, kind_bounds, kind_costs, plan_bounds
from autoplan.search.space import Space
from autoplan.spec.problem import Problem

SPACES = Path(__file__).parent / "spaces"
GROWING = (1, 8, 64, 512, 4096, 16384)  # nodes of 8
WIDENING = (
    *("sharding=zero2", "sharding=zero3", "offload", "partial-recompute"),
    *("uneven-stages", "partial-sharding", "tp-overlap"),
)
MAX_PLANS, MAX_KINDS = 100_000, 20_000
TURNS = 3
FRAMEWORK = "megatron-core"  # of spaces that name none

CALCULON = """
import itertools, json, logging, sys, time
import calculon
from calculon.llm import Llm
from calculon.system import System
folder = sys.argv[1]
read = calculon.io.read_json_file
app = Llm.Application(read(f"{folder}/models/gpt3-175B.json"))
system = System(read(f"{folder}/systems/a100_80e.json"))
base = read(f"{folder}/examples/3072_t4_p64_d12_mbs4_full.json")
count, start = 0, time.process_time()
for tp, pp, mbs, kind in itertools.product((4, 8), (8, 16), (1, 2, 4), ("full", "attn_only", "none")):
    dp = 512 // tp // pp
    plan = dict(base, num_procs=512, tensor_par=tp, pipeline_par=pp, data_par=dp, batch_size=512, microbatch_size=mbs,
                activation_recompute=kind)
    try:
        model = Llm(app, logging.getLogger())
        model.compile(system, Llm.Execution.from_json(plan))
        model.run(system)
        count += 1
    except Llm.Error:
        pass
print(json.dumps([count, time.process_time() - start]))
"""

SIMUMAX = """
import contextlib, io, json, sys, time
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
from simumax.core.perf_llm import PerfLLM
configs = f"{sys.argv[1]}/configs"
count, start = 0, time.process_time()
with contextlib.redirect_stdout(io.StringIO()):
    for name in ("tp1_pp1_dp8_mbs1", "tp2_pp1_dp4_mbs1", "tp4_pp1_dp2_mbs1", "tp8_pp1_dp1_mbs1", "tp1_pp2_dp4_mbs1"):
        one = PerfLLM()
        one.configure(
            strategy_config=StrategyConfig.init_from_config_file(f"{configs}/strategy/{name}.json"),
            model_config=ModelConfig.init_from_config_file(f"{configs}/models/llama3-8b.json"),
            system_config=SystemConfig.init_from_config_file(f"{configs}/system/a100_pcie.json"),
        )
        one.run_estimate()
        one.analysis_cost()
        one.analysis_mem()
        count += 1
print(json.dumps([count, time.process_time() - start]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Process that searched."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    certificate: dict[str, Any]


AUTOPLAN = str(Path(sys.executable).parent / "autoplan")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

MODULES = """
import contextlib, io, sys
from autoplan.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
print(len(sys.modules))
"""


def modules_loaded(arguments: Sequence[str]) -> int:
    """Number of modules that a command has imported when it ends."""
    command = [sys.executable, "-c", MODULES, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return int(done.stdout)


def start_up(num_runs: int) -> list[str]:
    """Cost of starting up: the wall time of `--help`, and the modules that it and the smallest search load."""
    walls = []
    for _ in range(num_runs + 1):
        start = time.perf_counter()
        subprocess.run([AUTOPLAN, "--help"], env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
        walls.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        search = modules_loaded(_arguments(read_table(SPACES / "llama3-8b.toml"), Path(folder) / "plan.json"))
    return [
        f"`autoplan --help`: best {min(walls[1:]):.2f} s, median {statistics.median(walls[1:]):.2f} s, "
        f"{modules_loaded(['--help'])} modules; the search of llama3-8b loads {search}."
    ]


def _arguments(space: dict[str, Any], out: Path) -> list[str]:
    flags = [word for choice in space.get("forbid", ()) for word in ("--forbid", choice)]
    flags += [word for bound in space.get("at_most", ()) for word in ("--max", bound)]
    command = ["search", space["model"], "--cluster", space["cluster"], "--global-batch", space["global_batch"]]
    command += ["--seq-len", str(space["seq_len"]), "--framework", space.get("framework", FRAMEWORK)]
    return [*command, *flags, "--quiet", "--out", str(out)]


def search_once(space: dict[str, Any]) -> Run:
    """`autoplan search` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [AUTOPLAN, *_arguments(space, out)]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        certificate = json.loads(out.read_text())["certificate"]
    return Run(wall_s=wall_s, cpu_s=cpu_s, peak_bytes=usage.ru_maxrss * 1024, certificate=certificate)


def _row(name: str, runs: Sequence[Run]) -> str:
    found = runs[0].certificate
    cells = (
        name,
        f"{found['plans']:,}",
        f"{found['cells']:,}",
        f"{found['bounded']:,}",
        f"{found['priced']:,}",
        f"{min(run.wall_s for run in runs):.2f}",
        f"{statistics.median(run.wall_s for run in runs):.2f}",
        f"{min(run.cpu_s for run in runs):.2f}",
        f"{max(run.peak_bytes for run in runs) / 1e6:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


_HEAD = (
    "| space | plans | cells | bounds | priced | best wall s | median wall s | best CPU s | peak MB |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def whole_processes(num_runs: int) -> list[str]:
    """Spaces of `benchmarks/spaces/`."""
    spaces = {path.stem: read_table(path) for path in sorted(SPACES.glob("*.toml"))}
    return [*_HEAD, *(_row(name, [search_once(space) for _ in range(num_runs)]) for name, space in spaces.items())]


def _exponent(what: str, sizes: Sequence[float], runs: Sequence[Run]) -> str:
    """The slope of the logarithm of CPU time over that of a size."""
    slope = np.polyfit(np.log(sizes), np.log([run.cpu_s for run in runs]), 1)[0]
    memory = np.polyfit(np.log(sizes), np.log([run.peak_bytes for run in runs]), 1)[0]
    return f"CPU time grows as {what} to the power of {slope:.2f}, peak memory to that of {memory:.2f}."


def growth() -> list[str]:
    """Time a space with more and more devices and a batch like them, another with more and more choices on its axes."""
    small, large = read_table(SPACES / "llama3-8b.toml"), read_table(SPACES / "llama3-405b.toml")
    devices = [8 * nodes for nodes in GROWING]
    spaces = [
        {**large, "model": small["model"], "cluster": f"h100-sxm:{nodes}x8", "global_batch": str(max(8 * nodes, 128))}
        for nodes in GROWING
    ]
    grown = [search_once(space) for space in spaces]
    wider = [{**large, "forbid": list(WIDENING[count:])} for count in range(len(WIDENING) + 1)]
    widened = [search_once(space) for space in wider]
    plans = [run.certificate["plans"] for run in grown], [run.certificate["plans"] for run in widened]
    return [
        *("## Growth: Llama 3 8B on more devices", "", *_HEAD),
        *(_row(f"{count:,} devices", [run]) for count, run in zip(devices, grown, strict=True)),
        *("", _exponent("devices", devices, grown), _exponent("plans", plans[0], grown), ""),
        *("## Growth: Llama 3.1 405B on 16,384 devices with more choices", "", *_HEAD),
        *(_row(f"+ {name}", [run]) for name, run in zip(("none", *WIDENING), widened, strict=True)),
        *("", _exponent("plans", plans[1], widened)),
    ]


def _problem(name: str) -> tuple[Problem, Space]:
    table = read_table(SPACES / f"{name}.toml")
    problem = make_problem(
        table["model"],
        cluster=table["cluster"],
        seq_len=table["seq_len"],
        framework=table.get("framework", FRAMEWORK),
    )
    return problem, make_space(problem, table["global_batch"], at_most=table.get("at_most", []))


def _per_s(count: int, run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return count / (time.process_time() - start)


def rates(name: str) -> tuple[float, float, float]:
    """(bounds of kinds, bounds of plans, full estimates) per second of CPU time, on one core.

    Kinds are those of random groups; their price is in the bounds of the plans that they hold.
    """
    problem, space = _problem(name)
    cells = space.cells()
    groups, owner = space.groups(cells)
    sample = np.random.default_rng(0).permutation(len(groups))[: MAX_KINDS // 64]
    kinds, _ = space.kinds(cells, groups.take(sample), owner[sample])
    first = first_layers(problem, space, kinds)
    plans, _ = space.plans_in(kinds.take(np.random.default_rng(1).permutation(len(kinds))[: MAX_PLANS // 64]))
    plans = plans.take(legal(space.rules, space.workload, plans))
    plans = plans.take(np.random.default_rng(2).permutation(len(plans))[:MAX_PLANS])

    def bound_plans() -> int:
        return sum(found.step_s.size for found in plan_bounds(problem, space, kind_costs(problem, kinds, first)))

    estimate(problem, plans.take(np.arange(min(len(plans), 64))))
    return (
        _per_s(len(kinds), lambda: kind_bounds(problem, space, kind_costs(problem, kinds, first))),
        _per_s(bound_plans(), bound_plans),
        _per_s(len(plans), lambda: estimate(problem, plans)),
    )


def _peer_per_s(code: str, folder: Path, interpreter: str) -> float:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([interpreter, "-c", code, str(folder)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr.strip().splitlines()[-1]}")
    count, cpu_s = json.loads(done.stdout.strip().splitlines()[-1])
    return float(count / cpu_s)


def beside(name: str, code: str, folder: Path, space: str, interpreter: str) -> str:
    """Full estimates per CPU second, theirs and ours in turns."""
    turns = [(_peer_per_s(code, folder, interpreter), rates(space)[2]) for _ in range(TURNS)]
    theirs, ours = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = statistics.median(own_s / other for other, own_s in turns)
    return f"| {name} | {theirs:,.0f} | {ours:,.0f} | {ratio:,.0f} |"


def main() -> None:
    """Print the tables, and write them where `--report` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--calculon", type=Path)
    parser.add_argument("--simumax", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--report", type=Path)
    flags = parser.parse_args()
    lines = [
        f"# Speed of the search, {datetime.date.today()}",
        "",
        f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}.",
        "",
        "## Whole processes",
        "",
        *start_up(flags.runs),
        "",
        *whole_processes(flags.runs),
        "",
        # Before this process has grown: a child's peak begins with the size of the one that starts it.
        *growth(),
        "",
        "## One core, per second of CPU time",
        "",
        "| space | bounds of kinds | bounds of plans | full estimates |",
        "|---|--:|--:|--:|",
    ]
    for name in sorted(path.stem for path in SPACES.glob("*.toml")):
        lines.append(f"| {name} | " + " | ".join(f"{rate:,.0f}" for rate in rates(name)) + " |")
    peers = [("Calculon", CALCULON, flags.calculon, "gpt3-175b"), ("SimuMax", SIMUMAX, flags.simumax, "llama3-8b")]
    if any(folder for *_, folder, _ in peers):
        lines += ["", "## Beside others: full estimates per second of CPU time", ""]
        lines += ["| planner | theirs | ours | ratio |", "|---|--:|--:|--:|"]
        lines += [
            beside(name, code, folder.resolve(), space, flags.peer_python)
            for name, code, folder, space in peers
            if folder
        ]
    text = "\n".join([*lines, ""])
    print(text)
    if flags.report:
        write_text(flags.report, text, force=True)


if __name__ == "__main__":
    main()

"""Steps of plans for unlike ranks on this machine, beside those of an equal split: both run by `autoplan run`.

usage: python benchmarks/unlike_ranks.py FOLDER [--case NAME] [--steps N] [--rounds N] [--out FILE]

Every case has ranks of which some are halved: after each pass through their layers, forward and backward, they spin for
as much processor time as it took, so that other load slows all ranks alike (`PACE`).  Where ranks share a core they
sleep instead, all for as long as others of the core need, and the halved ones twice as long: a spin would take the time
of another rank.  Every core has as many ranks.  The search on a cluster of such parts finds a plan; the plan with the
same stages and equal micro-batches and layers is its rival.  They run alternately, in rounds, and both are compared
with one process before (`--check`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import autoplan
from autoplan.api.plan_files import make_mixed_file
from autoplan.api.results import MixedPlanResult
from autoplan.base.files import write_text
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.readers.cluster import load_cluster
from autoplan.spec.mixed_problem import MixedPlan
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import even_chunks
from autoplan.spec.started_plan import started_plan
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster

# sitecustomize.py of the ranks: makes passes take PACE times as long, and notes the time that each step computes.
PACING = """
import importlib.abc, importlib.util, os, sys, time

PACE, SLEEPS = int(os.environ["PACE"]), bool(os.environ["SLEEPS"])

def paced(function):
    def waiting(*arguments, **named):
        began = time.thread_time()
        result = function(*arguments, **named)
        more = (PACE - 1) * (time.thread_time() - began)
        if SLEEPS:
            time.sleep(more)
        else:
            end = time.thread_time() + more
            while time.thread_time() < end:
                pass
        return result
    return waiting

def noted(function):
    def timed(*arguments, **named):
        began = time.thread_time()
        result = function(*arguments, **named)
        with open(os.environ["NOTES"], "a") as notes:
            print((PACE if SLEEPS else 1) * (time.thread_time() - began), file=notes)
        return result
    return timed

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "autoplan.trainer.step":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def patched(module):
            execute(module)
            import torch
            torch.autograd.backward = paced(torch.autograd.backward)
            module.Transformer.forward = paced(module.Transformer.forward)
            module.Training.backpropagate = noted(module.Training.backpropagate)
        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""
MODEL = ModelSpec(name="tiny", num_layers=6, hidden_size=192, vocab_size=512, num_heads=6, num_kv_heads=3, ffn_size=768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Ranks at full speed and at half of it, and limits of the search."""

    name: str
    fast: int
    slow: int
    fix: tuple[str, ...]
    global_batch: int


CASES = (
    Case(name="two replicas", fast=1, slow=1, fix=("pp=1",), global_batch=12),
    Case(name="two stages", fast=1, slow=1, fix=("pp=2",), global_batch=12),
    Case(name="four ranks, two stages", fast=2, slow=2, fix=("pp=2",), global_batch=24),
    Case(name="four replicas", fast=2, slow=2, fix=("pp=1",), global_batch=24),
)


def part(count: int, name: str, speed: float) -> ClusterSpec:
    """A processor of this many ranks and a part of its speed."""
    cluster = load_cluster(f"cpu:1x{count}")
    rates = {precision: speed * rate for precision, rate in cluster.device.peak_flops_per_s.items()}
    bandwidth = speed * cluster.device.memory_bandwidth_bytes_per_s
    device = replace(cluster.device, name=name, peak_flops_per_s=rates, memory_bandwidth_bytes_per_s=bandwidth)
    return replace(cluster, name=name, device=device)


def found(case: Case) -> MixedPlanResult:
    """The plan that a search finds for the ranks of a case."""
    cluster = MixedCluster(name=case.name, parts=(part(case.fast, "fast", 1.0), part(case.slow, "half", 0.5)))
    return autoplan.search_mixed(
        MODEL,
        cluster=cluster,
        global_batch=case.global_batch,
        seq_len=128,
        to="autoplan",
        precision="fp32",
        fix=[*case.fix, "tp=1", "micro_batch=1", "recompute=none", "sharding=none"],
    )


def equal_split(result: MixedPlanResult) -> MixedPlanResult:
    """The plan with the same stages and equal micro-batches and layers."""
    plan = result.best.plan
    each = plan.global_batch // plan.num_replicas
    kinds = []
    for kind in plan.kinds:
        layers = even_chunks(MODEL.num_layers, len(kind.stages))
        stages = tuple(stage.with_layers(count) for stage, count in zip(kind.stages, layers, strict=True))
        kinds.append(replace(kind, stages=stages, num_microbatches=each))
    costs = estimate_mixed(result.problem, [MixedPlan(kinds=tuple(kinds), common=plan.common)])
    return replace(result, file=make_mixed_file(result.problem, costs, None, command="a benchmark"))


def run(path: Path, result: MixedPlanResult, steps: int) -> tuple[float, float, dict[str, float]]:
    """Median step of a plan, processor time of its slowest rank, and its comparison with one process."""
    result.save(path, force=True)
    started = started_plan(result.problem, result.best.plan, unequal_batches=True)
    nodes = [result.problem.cluster.parts[at] for at in started.node_parts]
    parts = [node.name for node in nodes for _ in range(node.devices_per_node)]
    command = [
        "run",
        str(path),
        "--steps",
        str(steps),
        "--json",
        "--check",
        "--quiet",
        "--out",
        f"{path}.run",
        "--force",
    ]
    port = str(20000 + os.getpid() % 20000)
    cores, ranks = sorted(os.sched_getaffinity(0)), []
    share = -(-len(parts) // len(cores))
    in_turn = sorted(range(len(parts)), key=lambda rank: parts[rank])  # every core has ranks of both parts
    for rank, name in enumerate(parts):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(len(parts)), "LOCAL_RANK": str(rank)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        notes = path.with_suffix(f".{rank}")
        notes.unlink(missing_ok=True)
        variables |= {"PYTHONPATH": str(path.parent.absolute()), "NOTES": str(notes)}
        variables |= {"PACE": str((2 if name == "half" else 1) * share), "SLEEPS": "1" if share > 1 else ""}
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        words = [sys.executable, "-m", "autoplan", *command]
        ranks.append(subprocess.Popen(words, env=os.environ | variables, stdout=pipe))
        os.sched_setaffinity(ranks[-1].pid, {cores[in_turn.index(rank) % len(cores)]})
    printed, _ = ranks[0].communicate(timeout=900)
    for process in ranks[1:]:
        process.wait(60)
    measured = json.loads(printed)["measured"]
    of_ranks = [path.with_suffix(f".{rank}").read_text().split()[-steps:] for rank in range(len(parts))]
    busy_s = max(statistics.median(map(float, seconds)) for seconds in of_ranks)
    return statistics.median(measured["step_s"]), busy_s, dict(measured["check"])


def lines(folder: Path, cases: Sequence[Case], steps: int, rounds: int) -> list[str]:
    """The table of the cases."""
    rows = [
        "| ranks | plan | predicted | by processor time of the slowest rank | by steps | deviation from one process |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        plan = found(case)
        rivals = {"plan": plan, "equal": equal_split(plan)}
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
        worst = 0.0
        for _ in range(rounds):
            for name, result in rivals.items():
                step_s, busy_s, check = run(folder / f"{name}.json", result, steps)
                measured[name].append((step_s, busy_s))
                worst = max(worst, *(check[key] for key in ("loss", "gradients", "weights")))
        words = []
        for at in (1, 0):
            own_s, equal_s = (1000 * statistics.median(seconds[at] for seconds in measured[name]) for name in rivals)
            words.append(f"{own_s:.0f} and {equal_s:.0f} ms: {equal_s / own_s:.2f} times as fast")
        predicted = rivals["equal"].best.step_s / plan.best.step_s
        cells = (
            case.name,
            plan.described(plan.best).replace("|", "/"),
            f"{predicted:.2f} times",
            *words,
            f"{worst:.1e}",
        )
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Print the table, or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "sitecustomize.py").write_text(PACING)
    load, cases = os.getloadavg()[0], [case for case in CASES if case.name in (arguments.case or [case.name])]
    text = "\n".join(
        [
            "# Plans for unlike ranks, run",
            "",
            "The plan found beside the same stages with equal micro-batches and layers.  "
            f"By `autoplan run` over gloo on {os.cpu_count()} cores beside a load of {load:.1f}; "
            "halved ranks spin for as long as they compute, ranks that share a core sleep.  Medians of "
            f"{arguments.steps} steps, in rounds: {arguments.rounds}.",
            "",
            *lines(arguments.folder, cases, arguments.steps, arguments.rounds),
            "",
        ]
    )
    print(text) if arguments.out is None else write_text(arguments.out, text, force=True)


if __name__ == "__main__":
    main()

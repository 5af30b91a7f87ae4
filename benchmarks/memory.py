"""Accuracy of the memory model on measured runs.

Prints, by source: errors of the peak and verdicts, as the presets ship and with every model left out in turn while the
fitted traits of the framework are fitted again to the other models' runs; the probability of running out of memory
against how often it happened; what each term contributes; and the worst runs with their terms.

usage: python benchmarks/memory.py [--runs RUNS.csv ...] [--worst N] [--as-shipped]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from measured_runs import RUNS, source_of, with_answers
from reports import existing
from scipy.stats import beta

from autoplan.base.arrays import Bools, Floats
from autoplan.base.units import GIB
from autoplan.cost.estimate import estimate
from autoplan.cost.memory.stage_memory import ALLOCATED_TERMS, MEMORY_TERMS, peaks
from autoplan.runs.predictions import recompute_is_stated
from autoplan.runs.runs import Run, read_runs
from autoplan.spec.estimate import oom_probability
from autoplan.spec.framework import Framework
from autoplan.spec.problem import Problem

# Traits that only the time of a step depends on are left alone.
MEMORY_TRAITS = (
    "bytes_per_weight",
    "bytes_per_grad",
    "bytes_per_optimizer_state",
    "bytes_per_logit",
    "host_lead_layers",
    "host_lead_tokens_per_layer",
    "pipeline_lead_tokens_per_layer",
    "bytes_per_boundary_hidden",
    "bytes_per_update_copy",
    "bytes_per_bf16_gathered_weight",
    "bytes_per_parallel_logit",
    "bytes_per_fused_score",
    "bucket_bytes",
    "fixed_bytes",
    "communicator_bytes",
    "reserved_factor",
    "broken_pass_share",
    "selective_recompute_share",
)
TABLES = [RUNS, *(Path(__file__).with_name(name) for name in ("blind_runs.csv", "finetuning_runs.csv"))]
MIN_OOM = 10  # runs, for a spread of verdicts
ROWS_PER_TRAIT = 15  # at least, of a framework on one generation of devices
BANDS = (0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0)  # of probabilities
WHOLE_SOURCE = 10  # runs from which on a source counts as all others do; fewer count for less
# Sources that the presets were made with; all others came later.
FIRST_SOURCES = frozenset(
    """bekman bloom dgxc hagemann korth2022 korth2240 korth_fig1 megascale misc1 misc2 mlm2021 mlm2024 mosaic mtnlg
    nanotron nanotron_mn nemo2407 nvbridge simumax torchtitan vtrain""".split()  # noqa: SIM905
)
STEPS = (2.0, 1.4, 1.15, 1.05, 1.02)  # factors by which a trait is moved while it is fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that ended, well or out of memory, with what was measured."""

    run: Run
    source: str
    is_oom: bool
    peak_gib: float | None

    @property
    def problem(self) -> Problem:
        """The problem of the run, which was priced."""
        assert self.run.problem is not None
        return self.run.problem

    @property
    def key(self) -> tuple[str, str]:
        """Framework and generation of devices, which share fitted traits."""
        return self.problem.framework.name, self.problem.cluster.device.generation


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--runs", type=existing, nargs="+", default=TABLES)
    parser.add_argument("--worst", type=int, default=10, help="runs with the largest errors to show of every source")
    parser.add_argument(
        "--as-shipped", action="store_true", help="leave the fits with a model left out, which take long"
    )
    options = parser.parse_args()
    every = [case for path in options.runs for case in read_cases(path)]
    fails = {case.source for case in every if case.is_oom}
    cases = [case for case in every if case.peak_gib is not None or case.source in fails]
    shipped = predicted(cases, {})
    held_out = None if options.as_shipped else leave_models_out(cases)
    show_table(cases, shipped, held_out)
    show_probabilities(every, predicted(every, {}))
    show_spreads(cases, shipped if held_out is None else held_out)
    for source in sorted({case.source for case in cases}):
        show_source(source, [case for case in cases if case.source == source], options.worst)


def read_cases(path: Path) -> list[Case]:
    """The runs of a table whose memory can be judged."""
    cases = []
    for run, row in with_answers(path, read_runs(path)):
        if run.problem and run.plan and row["status"] in ("ok", "oom"):
            measured = float(row["peak_memory_gib"]) if row["status"] == "ok" and row["peak_memory_gib"] else None
            cases.append(Case(run=run, source=source_of(run), is_oom=row["status"] == "oom", peak_gib=measured))
    return cases


# -- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predictions for cases: one element a case."""

    logged_gib: Floats
    oom_z: Floats  # distance to the capacity in standard deviations

    def take(self, which: Sequence[int]) -> Predicted:
        """Return the predictions of some of the cases."""
        return Predicted(logged_gib=self.logged_gib[list(which)], oom_z=self.oom_z[list(which)])


class Pricer:
    """Prices the memory of cases again and again, with other traits: those of one problem together."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.size = len(cases)
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for at, case in enumerate(cases):
            problem = case.problem
            # Memory does not depend on the number of nodes.
            machine = problem.cluster.device.name, problem.capacity_bytes, problem.cluster.devices_per_node
            spread = problem.calibration.memory_spread
            groups[(problem.model, problem.training, problem.framework, machine, spread)].append(at)
        self.groups = []
        for indices in groups.values():
            problem = cases[indices[0]].problem
            plans = [plan for at in indices if (plan := cases[at].run.plan) is not None]
            self.groups.append((np.array(indices), problem, problem.batch(plans)))

    def __call__(self, traits: dict[str, float]) -> Predicted:
        """Predictions with these traits instead of the framework's own."""
        logged, z = np.empty(self.size), np.empty(self.size)
        for indices, problem, batch in self.groups:
            framework = problem.framework.changed(**traits)
            peak, reserved = peaks(replace(problem, framework=framework), batch)
            logged[indices] = peak / GIB
            z[indices] = np.log(reserved / problem.capacity_bytes) / problem.calibration.memory_spread
        return Predicted(logged_gib=logged, oom_z=z)


def predicted(cases: Sequence[Case], traits: dict[str, float]) -> Predicted:
    """Predict `cases`."""
    return Pricer(cases)(traits)


# -- fits with a model left out ---------------------------------------------------------------------------------------


def leave_models_out(cases: Sequence[Case]) -> Predicted:
    """Cases by traits that were fitted without the runs of their models."""
    logged, z = np.empty(len(cases)), np.empty(len(cases))
    by_key: dict[tuple[str, str], list[int]] = defaultdict(list)
    for at, case in enumerate(cases):
        by_key[case.key].append(at)
    for key, indices in by_key.items():
        framework = cases[indices[0]].problem.framework
        traits = [name for name in framework.fitted if name in MEMORY_TRAITS]
        if len(indices) < ROWS_PER_TRAIT * len(traits):
            print(f"{' on '.join(key)}: {len(traits)} fitted traits on {len(indices)} runs, too many", file=sys.stderr)
        for model in sorted({cases[at].problem.model.name for at in indices}):
            test = [at for at in indices if cases[at].problem.model.name == model]
            train = [at for at in indices if cases[at].problem.model.name != model]
            if not train:  # a single model: its cells of size and sequence instead
                for fold in _folds(cases, test):
                    rest = [at for at in test if at not in set(fold)]
                    _fill(cases, fold, rest, framework, traits, (logged, z))
            else:
                _fill(cases, test, train, framework, traits, (logged, z))
    return Predicted(logged_gib=logged, oom_z=z)


def _folds(cases: Sequence[Case], indices: Sequence[int]) -> list[list[int]]:
    cells: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at in indices:
        problem = cases[at].problem
        cells[(problem.cluster.num_devices, problem.training.seq_len)].append(at)
    return list(cells.values())


def _fill(
    cases: Sequence[Case],
    test: Sequence[int],
    train: Sequence[int],
    framework: Framework,
    names: Sequence[str],
    into: tuple[Floats, Floats],
) -> None:
    traits = fitted([cases[at] for at in train], framework, names) if names and train else {}
    prediction = predicted([cases[at] for at in test], traits)
    into[0][list(test)], into[1][list(test)] = prediction.logged_gib, prediction.oom_z


def fitted(cases: Sequence[Case], framework: Framework, names: Sequence[str]) -> dict[str, float]:
    """The traits under which `cases` are likeliest: one after another is moved by ever smaller factors."""
    pricer = Pricer(cases)
    traits = {name: framework.trait(name) for name in names}
    best = surprise(cases, pricer(traits))
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in names:
                for factor in (step, 1 / step):
                    tried = traits | {name: _moved(name, traits[name], factor)}
                    if (value := surprise(cases, pricer(tried))) < best * (1 - 1e-6):
                        traits, best, moved = tried, value, True
    return traits


def _moved(name: str, value: float, factor: float) -> float:
    # What the allocator reserves beyond what it hands out is what is fitted of the factor.
    return 1 + max(value - 1, 1e-3) * factor if name == "reserved_factor" else value * factor


def surprise(cases: Sequence[Case], prediction: Predicted) -> float:
    """Negative log likelihood: Laplace errors of the peaks, and which runs ran out of memory."""
    total = 0.0
    for case, logged, z in zip(cases, prediction.logged_gib, prediction.oom_z, strict=True):
        spread = case.problem.calibration.memory_spread
        if case.peak_gib is not None:
            total += abs(math.log(logged / case.peak_gib)) / spread
        probability = oom_probability(float(z))
        total -= math.log(max(probability if case.is_oom else 1 - probability, 1e-6))
    return total


# -- tables -----------------------------------------------------------------------------------------------------------


def show_table(cases: Sequence[Case], shipped: Predicted, held_out: Predicted | None) -> None:
    """Errors and verdicts by source, those that the presets were made with first."""
    print("                        as shipped                             every model left out in turn")
    print("source        runs   median    p90    bias     oom   F1      median    p90    bias   F1")
    for source in sorted({case.source for case in cases}, key=lambda name: (name not in FIRST_SOURCES, name)):
        which = [at for at, case in enumerate(cases) if case.source == source]
        own = [cases[at] for at in which]
        oom = sum(case.is_oom for case in own)
        line = f"{source:12}{len(own):6d}  {_errors(own, shipped.take(which))}"
        line += f"{oom:8d}  {_f1(own, shipped.take(which))}"
        if held_out is not None:
            line += f"    {_errors(own, held_out.take(which))}  {_f1(own, held_out.take(which))}"
        print(line)


def _errors(cases: Sequence[Case], prediction: Predicted) -> str:
    errors = errors_of(cases, prediction)
    if not len(errors):
        return f"{'-':>7}{'-':>8}{'-':>8}"
    median, tenth, bias = np.median(np.abs(errors)), np.quantile(np.abs(errors), 0.9), np.median(errors)
    return f"{100 * median:7.2f}{100 * tenth:8.1f}{100 * bias:+8.1f}"


def errors_of(cases: Sequence[Case], prediction: Predicted) -> Floats:
    """Predicted over measured peak, less one, of the cases with a measured peak."""
    pairs = zip(cases, prediction.logged_gib, strict=True)
    return np.array([logged / case.peak_gib - 1 for case, logged in pairs if case.peak_gib is not None])


def _f1(cases: Sequence[Case], prediction: Predicted) -> str:
    true = np.array([case.is_oom for case in cases])
    if not true.any():
        return f"{'-':>5}"
    hits = (true & (prediction.oom_z > 0)).sum()
    return f"{2 * hits / (2 * hits + (true != (prediction.oom_z > 0)).sum()):5.3f}"


def show_probabilities(cases: Sequence[Case], prediction: Predicted) -> None:
    """Print how often runs ran out of memory, by the probability that was given.

    Sources that publish no failed run say little: they leave out what ran out of memory, and Composer takes the largest
    micro-batch that fits.  Runs of which it is not told what they recompute, or that keep activations on the host, are
    left out: they need less than what is priced.
    """
    is_known = np.array([recompute_is_stated(case.run) for case in cases])
    num_left_out = (~is_known).sum()
    print(f"\n{num_left_out} runs do not tell what they recompute, or keep activations on the host: not counted below")
    fails = {case.source for case in cases if case.is_oom}
    later = np.array([case.source not in FIRST_SOURCES for case in cases])
    tells = np.array([case.source in fails for case in cases])
    for title, which in (
        ("sources that publish failed runs", tells),
        ("of them, those of the presets", tells & ~later),
        ("of them, those that came later", tells & later),
        ("sources of finished runs alone", ~tells),
    ):
        _show_bands(title, cases, prediction, which & is_known)
    for framework in sorted({case.problem.framework.name for case in cases if case.source in fails}):
        own = np.array([case.problem.framework.name == framework for case in cases])
        _show_bands(f"{framework}, of sources that publish failed runs", cases, prediction, own & tells & is_known)


def _show_bands(title: str, cases: Sequence[Case], prediction: Predicted, which: Bools) -> None:
    probability = np.array([oom_probability(float(z)) for z in prediction.oom_z])
    true = np.array([case.is_oom for case in cases])
    print(f"\nprobability of running out of memory: {title}")
    print("     band       runs   mean said   happened   95 % band of that         by source: said, happened")
    sizes = Counter(case.source for case, is_in in zip(cases, which, strict=True) if is_in)
    weight = np.array([min(sizes[case.source], WHOLE_SOURCE) / max(sizes[case.source], 1) for case in cases])
    for low, high in pairwise(BANDS):
        inside = which & (probability >= low) & ((probability < high) | (high == 1.0))
        if not (count := int(inside.sum())):
            continue
        happened, said = int(true[inside].sum()), 100 * probability[inside].mean()
        least, most = 100 * beta_band(happened, count)
        is_off = "" if least <= said <= most else "off"
        by_source = [100 * float(np.average(value[inside], weights=weight[inside])) for value in (probability, true)]
        print(
            f"{100 * low:4.0f} to {100 * high:3.0f} %{count:8d}{said:10.1f} %{100 * happened / count:9.1f} %"
            f"{least:9.1f} to {most:5.1f} %  {is_off:6}{by_source[0]:12.1f} %{by_source[1]:9.1f} %"
        )


def beta_band(happened: int, count: int) -> Floats:
    """Shares between which that of this many of `count` lies with 95 % (Clopper and Pearson, 1934)."""
    low = beta.ppf(0.025, happened, count - happened + 1) if happened else 0.0
    high = beta.ppf(0.975, happened + 1, count - happened) if happened < count else 1.0
    return np.array([low, high], dtype=np.float64)


def show_spreads(cases: Sequence[Case], prediction: Predicted) -> None:
    """The spread of log memory that a calibration should state: nine tenths of the errors within 1.645 of it."""
    print("\nspread of log(measured / predicted) by framework and generation, nine tenths within 1.645 of it")
    for key in sorted({case.key for case in cases}):
        which = [at for at, case in enumerate(cases) if case.key == key and case.peak_gib is not None]
        if which:
            errors = np.abs(np.log(1 + errors_of([cases[at] for at in which], prediction.take(which))))
            stated = cases[which[0]].problem.calibration.memory_spread
            name = " on ".join(key)
            print(f"  {name:36}{len(which):5d} runs {np.quantile(errors, 0.9) / 1.645:6.3f}, stated {stated:.3f}")
    print("\nspread under which verdicts are likeliest, where ten runs or more ran out of memory")
    for key in sorted({case.key for case in cases}):
        which = [at for at, case in enumerate(cases) if case.key == key]
        own = [cases[at] for at in which]
        if sum(case.is_oom for case in own) >= MIN_OOM:
            stated = own[0].problem.calibration.memory_spread
            found = likeliest_spread(own, stated * prediction.oom_z[which])
            print(f"  {' on '.join(key):36}{len(own):5d} runs {found:6.3f}, stated {stated:.3f}")


def likeliest_spread(cases: Sequence[Case], log_ratio: Floats) -> float:
    """The spread that gives the verdicts the largest likelihood, for log(predicted / capacity) of every case."""

    def log_likelihood(spread: float) -> float:
        says_oom = np.array([0.5 * math.erfc(-value / spread / math.sqrt(2)) for value in log_ratio])
        happened = np.array([case.is_oom for case in cases])
        # No verdict is surer than one of a thousand.
        return float(np.log(np.clip(np.where(happened, says_oom, 1.0 - says_oom), 1e-3, None)).sum())

    return max((step / 200 for step in range(2, 61)), key=log_likelihood)


def show_source(source: str, cases: Sequence[Case], worst: int) -> None:
    """Print the errors without each term, and the worst runs of one source with their terms."""
    measured = [case for case in cases if case.peak_gib is not None]
    if not measured:
        return
    costs = []
    for case in measured:
        assert case.run.plan is not None
        costs.append(estimate(case.problem, case.problem.batch([case.run.plan])))
    logged = np.array([float(cost.logged_memory_bytes[0]) for cost in costs])
    peak = np.array([(case.peak_gib or 0.0) * GIB for case in measured])
    print(f"\n{source}: median error without each term")
    kind = measured[0].problem.framework.memory.logs_memory
    for name in MEMORY_TERMS:
        if name in ALLOCATED_TERMS or kind == "device" or (kind == "reserved" and name in ("fragmentation", "cached")):
            term = np.array([float(cost.memory_terms_bytes[name][0]) for cost in costs])
            if term.any():
                print(f"  {name:14}{100 * np.median(np.abs((logged - term) / peak - 1)):7.2f} %")
    errors = logged / peak - 1
    for at in np.argsort(-np.abs(errors))[:worst]:
        case, terms = measured[at], costs[at].memory_terms_bytes
        shown = ", ".join(f"{name} {float(v[0]) / GIB:.1f}" for name, v in terms.items() if v[0] > 0.05 * GIB)
        what = case.run.plan.describe() if case.run.plan else ""
        print(f"  {case.run.id}: {case.peak_gib:.1f} GiB measured, {100 * errors[at]:+.0f} %: {what}")
        print(f"      {case.problem.model.name}, {case.problem.training.seq_len} tokens: {shown}")


if __name__ == "__main__":
    main()

"""Report of the closed loop (`closed_loop.py`): its plans predicted, and compared with what was measured."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from loop_plans import (
    GLOBAL_BATCH,
    HAS_GPUS,
    LAUNCHES,
    MAX_FOREIGN,
    MAX_SLOWDOWN,
    MODELS,
    PRECISION,
    RANKS,
    STEPS,
    WARMUP,
    Launch,
    compared_plans,
    family,
    kept,
    label,
    problem_of,
)

from autoplan.api.calibrations import MIN_RUNS, fitted_to
from autoplan.base.arrays import Floats
from autoplan.base.errors import InputError
from autoplan.base.files import write_text
from autoplan.base.units import format_volume
from autoplan.cost.calibration import MeasuredRun
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.cost.provenance import shares
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.timing import Provenance

CAPS = (0.5, 0.25)  # memory of which so many plans fit
TRUE_S, TRUE_BYTES = 0.05, 0.03  # errors up to which a prediction counts as true
FAR_APART = 0.10  # plans that are closer may come in either order


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The plans of a model, predicted and run."""

    plans: list[ParallelPlan]
    predicted_s: Floats
    measured_s: Floats  # median over the clean launches of a plan
    noise: Floats  # of one launch: half of what a plan's launches lie apart, over their median; NaN of a single one
    launches: list[Floats]  # each plan's undisturbed ones; where there is none, all
    loads: Floats  # share of the machine that others used beside them
    bytes_needed: Floats  # predicted
    bytes_held: Floats  # counted
    rests: dict[Provenance, Floats]  # share of the predicted step by provenance
    full: list[str]  # plans that ran out of memory, though they were predicted to fit
    calibrated_s: Floats  # predicted with a calibration of the other half of the plans; NaN where they are too few

    @property
    def bytes_used(self) -> Floats:
        """Counted bytes, or where some plan's were not, predicted ones of all."""
        return self.bytes_needed if np.isnan(self.bytes_held).any() else self.bytes_held

    @property
    def errors(self) -> Floats:
        """Relative, of every plan."""
        return self.predicted_s / self.measured_s - 1

    @property
    def bytes_errors(self) -> Floats:
        """Errors of its peak; NaN where that was not counted."""
        return self.bytes_needed / self.bytes_held - 1


def compare(folder: Path, name: str) -> Compared:
    """Predict the plans of a model that ran clean, from the profile alone."""
    problem, plans = problem_of(name, folder), compared_plans(name)
    launches: dict[str, list[Launch]] = {label(plan): [] for plan in plans}
    peak_bytes: dict[str, float] = {}
    full: set[str] = set()
    for launch in kept(folder):
        if launch.model == name and launch.plan in launches:
            if launch.is_full:
                full.add(launch.plan)
            if launch.step_s:
                launches[launch.plan].append(launch)
            if launch.peak_bytes:
                peak_bytes[launch.plan] = launch.peak_bytes
    plans = [plan for plan in plans if launches[label(plan)]]
    if not plans:
        raise InputError(f"no plan of {name} has run: launch first")
    used = [usable(launches[label(plan)]) for plan in plans]
    times = [np.array([launch.seconds for launch in of_plan]) for of_plan in used]
    batch = problem.batch(plans)
    cost = estimate(problem, batch)
    return Compared(
        plans=plans,
        predicted_s=cost.step_s,
        measured_s=np.array([np.median(time) for time in times]),
        noise=np.array([np.ptp(time) / 2 / np.median(time) if len(time) > 1 else np.nan for time in times]),
        launches=times,
        loads=np.array([np.median([launch.foreign for launch in of_plan]) for of_plan in used]),
        bytes_needed=cost.logged_memory_bytes,
        bytes_held=np.array([peak_bytes.get(label(plan), np.nan) for plan in plans]),
        rests=shares(problem, batch),
        full=sorted(full),
        calibrated_s=calibrated(problem, plans, np.array([np.median(time) for time in times])),
    )


def usable(launches: list[Launch]) -> list[Launch]:
    """Return the launches of a plan that no other load disturbed; all where there are none."""
    return [launch for launch in launches if launch.is_clean] or launches


def calibrated(problem: Problem, plans: list[ParallelPlan], measured_s: Floats) -> Floats:
    """Predict every plan with the profile and a calibration of every other plan, as `autoplan calibrate` makes it."""
    predicted_s = np.full(len(plans), np.nan)
    for half in (0, 1):
        runs = [
            MeasuredRun(problem=problem, plan=plan, step_s=float(step_s))
            for plan, step_s in zip(plans[1 - half :: 2], measured_s[1 - half :: 2], strict=True)
        ]
        if len(runs) >= MIN_RUNS:
            own = replace(problem, calibration=fitted_to(runs, name="half of the plans").calibration)
            batch = problem.batch(plans[half::2])
            predicted_s[half::2] = estimate(own, batch).step_s
    return predicted_s


def spearman(measured_s: Floats, predicted_s: Floats, apart: float = 0.0) -> tuple[float, int]:
    """(Spearman's rank correlation over the pairs of plans whose times are `apart`, number of these pairs).

    Over all pairs, the sum of products of differences of ranks over the root of the sums of their squares is Spearman's
    coefficient.
    """
    measured, predicted = (np.argsort(np.argsort(step_s)) for step_s in (measured_s, predicted_s))
    ratio = measured_s[:, None] / measured_s
    counts = np.maximum(ratio, 1 / ratio) > 1 + apart
    ours, theirs = ((step_s[:, None] - step_s)[counts].astype(np.float64) for step_s in (measured, predicted))
    return float((ours * theirs).sum() / np.sqrt((ours**2).sum() * (theirs**2).sum())), int(counts.sum() // 2)


def as_good_as_a_launch(found: Compared) -> tuple[float, float]:
    """(median error, Spearman's coefficient as `spearman` has it) of a launch as prediction of the plan's others.

    No prediction can be told to be better than that.  The mean over the turns, each of the plans with one to spare.
    """
    errors, ranks = [], []
    for turn in range(LAUNCHES):
        several = [launch for launch in found.launches if len(launch) > max(turn, 1)]
        if len(several) < 2:
            break
        others_s = np.array([np.median(np.delete(launch, turn)) for launch in several])
        launch_s = np.array([launch[turn] for launch in several])
        errors.append(np.median(np.abs(launch_s / others_s - 1)))
        ranks.append(spearman(others_s, launch_s, FAR_APART)[0])
    return (float(np.mean(errors)), float(np.mean(ranks))) if errors else (float("nan"), float("nan"))


def choice(found: Compared, cap_bytes: float) -> str:
    """Plan that is picked under a cap, and how much longer it takes than the best plan that fits."""
    fits, seems_to_fit = found.bytes_used <= cap_bytes, found.bytes_needed <= cap_bytes
    pick = int(np.argmin(np.where(seems_to_fit, found.predicted_s, np.inf)))
    best = int(np.argmin(np.where(fits, found.measured_s, np.inf)))
    regret = found.measured_s[pick] / found.measured_s[best] - 1
    noise = np.hypot(found.noise[pick], found.noise[best])
    cap = "no cap" if np.isinf(cap_bytes) else format_volume(cap_bytes)
    fit = "" if fits[pick] else ", and does not fit"
    return (
        f"| {cap} | {fits.sum()} | {label(found.plans[pick])}{fit} | {label(found.plans[best])} "
        f"| {100 * regret:.1f} % | {percent(float(noise))} |"
    )


def percent(share: float) -> str:
    """A share, or a dash where it is not known."""
    return "-" if np.isnan(share) else f"{100 * share:.1f} %"


def findings(name: str, found: Compared) -> list[str]:
    """Findings on a model, as Markdown."""
    model, seq_len = MODELS[name]
    errors = np.abs(found.errors)
    correlation, pairs = spearman(found.measured_s, found.predicted_s, FAR_APART)
    launch_error, launch_rank = as_good_as_a_launch(found)
    launches = [len(launch) for launch in found.launches]
    noises = found.noise[~np.isnan(found.noise)]
    noise = (float(np.median(noises)), float(noises.max())) if len(noises) else (float("nan"), float("nan"))
    rests = ", ".join(
        f"{100 * share.mean():.0f} % {kind}" for kind, share in found.rests.items() if share.mean() > 5e-3
    )
    lines = [
        f"## {name}",
        "",
        f"{count_parameters(model) / 1e6:.1f} M parameters: {model.num_layers} layers of {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, {GLOBAL_BATCH} sequences of {seq_len} a step.  {len(found.plans)} of "
        f"{len(compared_plans(name))} plans ran, {min(launches)} to {max(launches)} times each "
        f"({LAUNCHES} are wanted); the step rests on {rests}.",
        "",
        f"* error: median {100 * np.median(errors):.1f} %, worst {100 * errors.max():.1f} %, "
        f"bias {100 * np.median(found.errors):+.1f} %",
        f"* with a calibration of every other plan: {calibration_sentence(found)}",
        f"* noise of a launch: median {percent(noise[0])}, worst {percent(noise[1])}",
        f"* Spearman over the {pairs} pairs more than {100 * FAR_APART:.0f} % apart: {correlation:.3f}; "
        f"over all plans {spearman(found.measured_s, found.predicted_s)[0]:.3f}",
        f"* a launch instead of the prediction of the plan's other ones: error {percent(launch_error)} in the median, "
        f"Spearman {launch_rank:.3f}",
        accuracy_sentence(found),
        f"* out of memory, though predicted to fit: {'; '.join(found.full) or 'none'}",
        "",
        f"| {'counted' if found.bytes_used is found.bytes_held else 'predicted'} memory | plans that fit | picked "
        "| best | regret | noise of the two |",
        "|---|--:|---|---|--:|--:|",
        *(choice(found, cap) for cap in (np.inf, *np.quantile(found.bytes_used, CAPS))),
        "",
    ]
    lines += ["| family | plans | median error | worst | bias |", "|---|--:|--:|--:|--:|"]
    families = [family(plan) for plan in found.plans]
    for kind in dict.fromkeys(families):
        own = found.errors[np.array([family_name == kind for family_name in families])]
        lines.append(
            f"| {kind} | {len(own)} | {100 * np.median(np.abs(own)):.1f} % | {100 * np.abs(own).max():.1f} % "
            f"| {100 * np.median(own):+.1f} % |"
        )
    lines += [
        "",
        "| plan | predicted | calibrated | measured | error | launches | noise | other load | memory predicted ",
    ]
    lines[-1] += "| counted | error |"
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for at in np.argsort(found.measured_s):
        lines.append(
            f"| {label(found.plans[at])} | {1e3 * found.predicted_s[at]:.0f} ms "
            f"| {1e3 * found.calibrated_s[at]:.0f} ms | {1e3 * found.measured_s[at]:.0f} ms "
            f"| {100 * found.errors[at]:+.1f} % | {len(found.launches[at])} "
            f"| {percent(float(found.noise[at]))} | {percent(float(found.loads[at]))} "
            f"| {memory_sentence(found, int(at))} |"
        )
    return [*lines, ""]


def calibration_sentence(found: Compared) -> str:
    """Errors of the predictions with a calibration, as words."""
    if np.isnan(found.calibrated_s).any():
        return "too few ran"
    errors = np.abs(found.calibrated_s / found.measured_s - 1)
    return (
        f"error median {100 * np.median(errors):.1f} %, worst {100 * errors.max():.1f} %, "
        f"Spearman {spearman(found.measured_s, found.calibrated_s, FAR_APART)[0]:.3f}"
    )


def accuracy_sentence(found: Compared) -> str:
    """Sentence on how many predictions of time and peak are true, and how far off those of the peak are."""
    counted = found.bytes_errors[~np.isnan(found.bytes_errors)]
    within = f"{(np.abs(found.errors) <= TRUE_S).sum()} of {len(found.errors)} steps within {percent(TRUE_S)}"
    if not len(counted):
        return f"* {within}; no bytes were counted"
    return (
        f"* {within}, {(np.abs(counted) <= TRUE_BYTES).sum()} of {len(counted)} peaks within {percent(TRUE_BYTES)}; "
        f"peaks: median {percent(float(np.median(np.abs(counted))))}, worst {percent(float(np.abs(counted).max()))}"
    )


def memory_sentence(found: Compared, at: int) -> str:
    """Predicted and counted peak of a plan and the error, as cells."""
    needed, peak_bytes = found.bytes_needed[at], found.bytes_held[at]
    if np.isnan(peak_bytes):
        return f"{format_volume(needed)} | - | -"
    return f"{format_volume(needed)} | {format_volume(peak_bytes)} | {100 * found.bytes_errors[at]:+.1f} %"


def report_all(folder: Path, names: list[str], intro: str, path: Path | None) -> None:
    """Compare, print, and write it to `path`."""
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    machine = f"{RANKS} x {torch.cuda.get_device_name()}, {cores}" if HAS_GPUS else cores
    quiet = (
        ""
        if HAS_GPUS
        else ", of each plan those (if any) in which other load took at most "
        f"{100 * MAX_FOREIGN:.0f} % of the machine and a check at most {100 * MAX_SLOWDOWN:.0f} % longer than usual"
    )
    where = (
        f"On {machine}, torch {version('torch')}, products in {PRECISION}.  Measured: the median over launches{quiet}, "
        f"each of {STEPS} steps after {WARMUP}, the plans in turn, and in turn with visits of the profile.  Noise: "
        "half of what a plan's launches lie apart."
    )
    lines = [f"# Plans predicted and run, {time.strftime('%Y-%m-%d')}", "", intro, "", where, ""]
    for name in names:
        lines += findings(name, compare(folder, name))
    print("\n".join(lines))
    if path:
        write_text(path, "\n".join(lines), force=True)

"""Quality of predictions for measured runs: errors, intervals, ranks, picks, memory and verdicts, by source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

import numpy as np

from autoplan.spec.run_outcome import Prediction, RunOutcome

COLUMNS = (
    "runs",
    "finished",
    "priced",
    "medAPE",
    "p90APE",
    "bias",
    "cover",
    "width",
    "groups",
    "tau",
    "regret",
    "badpick",
    "memAPE",
    "oomP",
    "oomR",
    "oomF1",
)
COUNTS = ("runs", "finished", "groups")
MIN_PLANS = 4  # plans of a decision needed for a rank correlation or a regret

Row = dict[str, float | None]


def score_by_source(outcomes: Sequence[RunOutcome], predictions: Mapping[str, Prediction]) -> dict[str, Row]:
    """Return a row of `COLUMNS` for every source, for all runs and for the mean of sources; None without data.

    Errors, bias, width and regret are in percent.  A finished run without a prediction counts as 100 % off and not
    covered.
    """
    by_source: dict[str, list[RunOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_source[outcome.source].append(outcome)
    rows = {source: score(group, predictions) for source, group in sorted(by_source.items())}
    values_of = {name: [row[name] for row in rows.values() if row[name] is not None] for name in COLUMNS}
    mean: Row = {
        name: fmean(value for value in values if value is not None) if values else None
        for name, values in values_of.items()
    }
    return rows | {"all runs": score(outcomes, predictions), "mean of sources": mean}


def score(outcomes: Sequence[RunOutcome], predictions: Mapping[str, Prediction]) -> Row:
    """Return a row of `COLUMNS`."""
    return {
        "runs": len(outcomes),
        **_steps(outcomes, predictions),
        **_decisions(outcomes, predictions),
        **_memory(outcomes, predictions),
    }


def _steps(outcomes: Sequence[RunOutcome], predictions: Mapping[str, Prediction]) -> Row:
    errors, bias, covered, width = [], [], [], []
    for outcome in outcomes:
        if not outcome.is_finished or outcome.step_s is None:
            continue
        prediction = predictions.get(outcome.id)
        if prediction is None or prediction.step_time_s is None:
            errors.append(1.0)
            covered.append(0.0)
            continue
        errors.append(abs(prediction.step_time_s - outcome.step_s) / outcome.step_s)
        bias.append(math.log(prediction.step_time_s / outcome.step_s))
        low, high = prediction.step_time_low_s, prediction.step_time_high_s
        if low is None or high is None:
            covered.append(0.0)
        else:
            covered.append(float(low <= outcome.step_s <= high))
            width.append((high - low) / outcome.step_s)
    return {
        "finished": len(errors),
        "priced": len(bias) / len(errors) if errors else None,
        "medAPE": _quantile(errors, 0.5),
        "p90APE": _quantile(errors, 0.9),
        "bias": _quantile(bias, 0.5),
        "cover": fmean(covered) if covered else None,
        "width": _quantile(width, 0.5),
    }


class _Choice:
    """Distinct plan of a decision; repeated runs are averaged."""

    def __init__(self, members: Sequence[RunOutcome], predictions: Mapping[str, Prediction]) -> None:
        predicted = [predictions[member.id] for member in members if member.id in predictions]
        steps = [prediction.step_time_s for prediction in predicted if prediction.step_time_s is not None]
        measured = [member.step_s for member in members if member.is_finished and member.step_s is not None]
        self.predicted_s = fmean(steps) if steps else None
        self.measured_s = fmean(measured) if measured else None
        self.status = "ok" if measured else members[0].status
        first = predictions.get(members[0].id)
        self.verdict = first.verdict if first else "unpriced"


def _decisions(outcomes: Sequence[RunOutcome], predictions: Mapping[str, Prediction]) -> Row:
    decisions: dict[tuple[str, ...], dict[tuple[str, ...], list[RunOutcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        decisions[outcome.decision][outcome.plan].append(outcome)
    taus, regrets, bad = [], [], []
    for plans in decisions.values():
        choices = [_Choice(members, predictions) for members in plans.values()]
        chosen_s = [choice.measured_s for choice in choices if choice.measured_s is not None]
        pairs = [(choice.predicted_s, choice.measured_s) for choice in choices if choice.predicted_s is not None]
        priced = [(predicted, measured) for predicted, measured in pairs if measured is not None]
        if len(priced) >= MIN_PLANS and len({measured for _, measured in priced}) > 1:
            taus += [tau] if (tau := kendall_tau(priced)) is not None else []
        decided = [choice for choice in choices if choice.status in ("ok", "oom", "invalid")]
        if len(chosen_s) >= 2 and len(decided) >= MIN_PLANS:
            pick = _pick(decided)
            regrets.append(1.0 - min(chosen_s) / pick.measured_s if pick and pick.measured_s else 1.0)
            pick = _pick([choice for choice in choices if choice.status != "?"])
            bad.append(float(not (pick and pick.measured_s)))
    return {
        "groups": len(regrets),
        "tau": fmean(taus) if taus else None,
        "regret": 100.0 * fmean(regrets) if regrets else None,
        "badpick": fmean(bad) if bad else None,
    }


def _pick(choices: Sequence[_Choice]) -> _Choice | None:
    """Return the fastest plan predicted to fit, or the fastest risky one if none fits."""
    for verdict in ("fits", "risky"):
        if candidates := [choice for choice in choices if choice.verdict == verdict and choice.predicted_s]:
            return min(candidates, key=lambda choice: choice.predicted_s or 0.0)
    return None


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of two rankings; None if one of them has only ties."""
    concordant = first_untied = second_untied = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        first, second = (a > c) - (a < c), (b > d) - (b < d)
        concordant += first * second
        first_untied += first != 0
        second_untied += second != 0
    below = math.sqrt(first_untied * second_untied)
    return concordant / below if below else None


def _memory(outcomes: Sequence[RunOutcome], predictions: Mapping[str, Prediction]) -> Row:
    errors = []
    for outcome in outcomes:
        if outcome.status == "ok" and outcome.peak_gib is not None:
            prediction = predictions.get(outcome.id)
            guess = prediction.peak_memory_gib if prediction else None
            errors.append(1.0 if guess is None else abs(guess - outcome.peak_gib) / outcome.peak_gib)
    predicted_oom = {name for name, prediction in predictions.items() if prediction.verdict == "oom"}
    oom = [outcome.id for outcome in outcomes if outcome.status == "oom"]
    hits = sum(name in predicted_oom for name in oom)
    false = sum(outcome.status == "ok" and outcome.id in predicted_oom for outcome in outcomes)
    if not oom:
        return {"memAPE": _quantile(errors, 0.5), "oomP": None, "oomR": None, "oomF1": None}
    return {
        "memAPE": _quantile(errors, 0.5),
        "oomP": hits / (hits + false) if hits + false else 0.0,
        "oomR": hits / len(oom),
        "oomF1": 2 * hits / (hits + false + len(oom)),
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    return 100.0 * float(np.quantile(values, share)) if values else None


def score_table(rows: Mapping[str, Row]) -> str:
    """Return the rows as text in columns."""
    lines = [f"{'source':16}" + "".join(f"{name:>9}" for name in COLUMNS)]
    lines += [
        f"{source:16}" + "".join(f"{_cell(name, row[name]):>9}" for name in COLUMNS) for source, row in rows.items()
    ]
    return "\n".join(lines) + "\n"


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if name in COUNTS else f"{value:.2f}"

"""Likelihood of spreads of the surrogate of plans.

The steps of all finished plans of a sweep have a likelihood under the surrogate of `autoplan tune` about errors that
predictions have (`search.surrogate`).  This is its logarithm, summed over the sweeps of `tune_replay.py`, for values of
`SCATTER` and `DEGREES_SHARE`: less is less likely, by a factor of e for each 1.  Then the likeliest pair with each
source left out.  Predictions come from calibrations that have not seen the source, as in the replay.

usage: python benchmarks/surrogate_fit.py [--runs RUNS.csv] [--report REPORT.md]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from measured_runs import RUNS
from reports import existing, make_parser, write_report
from tune_replay import Group, read_groups

from autoplan.base.arrays import Floats
from autoplan.search import surrogate
from autoplan.search.surrogate import MeasuredPlan, Surrogate, pool_runs

SCATTERS = (0.3, 0.5, 0.7, 1.0, 1.4)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)


def main() -> None:
    """Try all pairs, print and, if asked, write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=str(RUNS))
    options = parser.parse_args()
    text = "\n".join(tables(read_groups(options.runs)))
    print(text)
    if options.report:
        write_report(options.report, "Spreads of the surrogate of plans", "`python benchmarks/surrogate_fit.py`", text)


def log_evidence(group: Group) -> float:
    """Log evidence of the steps of all finished plans of a group."""
    steps = [(at, answer.step_s) for at, answer in enumerate(group.answers)]
    measured = pool_runs([MeasuredPlan(at=at, step_s=step_s) for at, step_s in steps if step_s is not None])
    return Surrogate.of(group.plans, measured).log_evidence


def evidences(groups: Sequence[Group]) -> Floats:
    """Log evidence of every group under every pair: shape (scatters, shares, groups)."""
    found = np.empty((len(SCATTERS), len(SHARES), len(groups)))
    usual = surrogate.SCATTER, surrogate.DEGREES_SHARE
    for (row, scatter), (column, share) in itertools.product(enumerate(SCATTERS), enumerate(SHARES)):
        surrogate.SCATTER, surrogate.DEGREES_SHARE = scatter, share
        found[row, column] = [log_evidence(group) for group in groups]
    surrogate.SCATTER, surrogate.DEGREES_SHARE = usual
    return found


def tables(groups: Sequence[Group]) -> Iterator[str]:
    """Lines of the report."""
    found = evidences(groups)
    sources = np.array([group.source for group in groups])
    total = found.sum(axis=-1)
    shipped = f"SCATTER {surrogate.SCATTER:g}, DEGREES_SHARE {surrogate.DEGREES_SHARE:g}"
    yield f"{len(groups)} sweeps; the product has {shipped}"
    yield f"{'SCATTER':>8}  " + "".join(f"{f'share {share:g}':>12}" for share in SHARES)
    for scatter, row in zip(SCATTERS, total - total.max(), strict=True):
        yield f"{scatter:8g}  " + "".join(f"{value:12.1f}" for value in row)
    yield ""
    for source in sorted(set(sources.tolist())):
        rest = found[..., sources != source].sum(axis=-1)
        row, column = np.unravel_index(int(rest.argmax()), rest.shape)
        yield f"without {source:12} likeliest at SCATTER {SCATTERS[row]:g}, DEGREES_SHARE {SHARES[column]:g}"


if __name__ == "__main__":
    main()

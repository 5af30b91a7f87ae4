"""What goes into `plan.json`?"""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoplan.problem import Problem
    from autoplan.result import Certificate, PlanFile, RankedPlan

KEPT_ALTERNATIVES = 19  # twenty plans with the best


def make_plan_file(
    problem: Problem, plans: Sequence[RankedPlan], certificate: Certificate | None, *, timings: str = ""
) -> PlanFile:
    """The plan file of `plans`, best first; `timings` says whose the problem's measured times are."""
    from importlib.metadata import version

    from autoplan import __version__
    from autoplan.cost.estimate import estimate, stage_costs
    from autoplan.cost.provenance import shares
    from autoplan.plan import PlanBatch
    from autoplan.ranks import hosts
    from autoplan.result import PLAN_FILE_VERSION, PlanFile

    best = PlanBatch.of([plans[0].plan], problem.model.num_layers)
    listed = replace(best, placement=None)
    libraries = ("msgspec", "numpy", *(("optuna",) if certificate else ()))
    return PlanFile(
        schema_version=PLAN_FILE_VERSION,
        versions={
            "autoplan": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in libraries},
        },
        command=shlex.join(["autoplan", *sys.argv[1:]]),
        model=problem.model,
        training=problem.training,
        cluster=problem.cluster,
        framework=problem.framework,
        calibration=problem.calibration,
        reserve_bytes=problem.reserve_bytes,
        best=plans[0],
        stages=stage_costs(problem, plans[0].plan),
        alternatives=tuple(plans[1 : 1 + KEPT_ALTERNATIVES]),
        certificate=certificate,
        timings=timings,
        rests_on={name: float(share[0]) for name, share in shares(problem, best).items()},
        hosts=hosts(problem.cluster, plans[0].plan),
        listed_step_s=float(estimate(problem, listed).step_s[0]) if best.placement else None,
    )


def encode(file: PlanFile) -> str:
    """The text of a plan file: JSON in SI units, the same for the same plan."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(file), indent=2).decode() + "\n"

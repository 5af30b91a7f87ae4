"""Export of a plan to the built-in trainer, which reads the plan file itself."""

from __future__ import annotations

from autoplan.base.files import encode
from autoplan.frameworks.common.job import File, Job, LaunchVariable, Target
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.trainer.rules import DECLINES, RULES, check_model
from autoplan.spec.plan_file import PartPlanFile, PlanFile

_FILE = "plan.json"


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job that starts `autoplan run` on every device."""
    check_model(plan_file.model)
    check_legal(RULES, plan_file.model, plan_file.training, plan_file.best.plan, DECLINES)
    started = plan_file.mixed_file if isinstance(plan_file, PartPlanFile) else plan_file
    return Job(
        framework="the built-in trainer",
        variables=(LaunchVariable(name="STEPS", default="10", note="steps that are timed", counts_steps=True),),
        program=f'--no-python -- autoplan run "$HERE/{_FILE}"',  # "--" stops torchrun from parsing what follows
        trailing=('--steps "$STEPS"',),
        files=(File(name=_FILE, text=encode(started)),),
    )


TARGET = Target(name="autoplan", title="the built-in trainer", rules=("trainer",), job=job, unequal_batches=True)

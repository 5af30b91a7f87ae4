"""How does the built-in trainer run a plan?  It reads the plan file itself."""

from __future__ import annotations

from autoplan.errors import InputError
from autoplan.export.job import File, Job, Target, Variable
from autoplan.files import encode
from autoplan.result import PlanFile
from autoplan.rules import Setting, broken
from autoplan.rules.trainer import RULES, check_model

_FILE = "plan.json"


def job(plan_file: PlanFile, version: str = "") -> Job:
    """What starts `autoplan run` on every device."""
    check_model(plan_file.model)
    plan = plan_file.best.plan
    setting = Setting(model=plan_file.model, training=plan_file.training, num_devices=plan.num_devices)
    if problems := broken(RULES, setting, plan):
        raise InputError(f"the built-in trainer does not run the plan: {'; '.join(problems)}")
    return Job(
        framework="the built-in trainer",
        environment=(),
        variables=(Variable(name="STEPS", default="10", says="steps that are timed", counts_steps=True),),
        program=f'--no-python -- autoplan run "$HERE/{_FILE}"',  # torchrun would look for options of its own further on
        groups=(),
        replaceable=None,
        trailing=('--steps "$STEPS"',),
        files=(File(name=_FILE, text=encode(plan_file)),),
    )


TARGET = Target(name="autoplan", says="the built-in trainer", rules=("trainer",), job=job)

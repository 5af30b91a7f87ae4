"""Settings that start a plan with the probe."""

from __future__ import annotations

import json

from autoplan.frameworks.common.job import File, Job, LaunchVariable, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.probe.options import ROWS
from autoplan.frameworks.probe.rules import RULES
from autoplan.spec.plan_file import PlanFile


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job of a plan."""
    check_legal(RULES, plan_file.model, plan_file.training, plan_file.best.plan, "the probe cannot start the plan")
    settings = {"probe": True, "seq_len": plan_file.training.seq_len, **written(ROWS, plan_file)}
    return Job(
        framework="the probe",
        variables=(LaunchVariable(name="STEPS", default="10", says="steps", counts_steps=True),),
        program='probe.py "$HERE/probe.json"',
        files=(File(name="probe.json", text=json.dumps(settings, indent=2) + "\n"),),
    )


TARGET = Target(name="probe", says="the probe", rules=("probe",), job=job)

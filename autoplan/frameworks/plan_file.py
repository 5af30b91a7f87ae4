"""Reader of the `plan.json` of an earlier search, as a launch file."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.base.files import decode
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader
from autoplan.frameworks.presets import preset_frameworks
from autoplan.spec.plan_file import PlanFile

NAME = "plan.json"


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a plan file, by its first key."""
    return re.match(r'\s*\{\s*"schema_version"\s*:', text) is not None


def read(text: str, context: LaunchContext) -> Launch:
    """Return the best plan in the file; a model and length from the user replace those of the file."""
    try:
        table = json.loads(text)
    except ValueError as error:
        raise InputError(f"not valid JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(table, dict):
        raise InputError(f"must contain one table (object), not a {type(table).__name__}")
    file = decode(PlanFile, table, NAME)
    plan, training = file.best.plan, file.training
    if file.framework.name not in preset_frameworks():
        raise InputError(f"its framework {file.framework.name!r} is not built in: such plan files are not read")
    if context.num_devices not in (None, plan.num_devices):
        raise InputError(f"its plan is for {plan.num_devices} devices, not for {context.num_devices}")
    return Launch(
        target=NAME,
        framework=file.framework.name,
        model=context.model or file.model,
        training=replace(training, seq_len=context.seq_len or training.seq_len),
        plan=plan,
    )


READER = Reader(target=NAME, recognises=recognises, read=read)

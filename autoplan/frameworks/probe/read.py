"""Reader of the settings of the probe."""

from __future__ import annotations

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Given, Launch, Reader
from autoplan.frameworks.common.option_table import read_fields
from autoplan.frameworks.common.options import Options, parse_json
from autoplan.frameworks.probe.options import ROWS
from autoplan.spec.enums import Sharding
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec


def recognises(name: str, text: str) -> bool:
    """Return whether a file holds such settings."""
    return name.endswith(".json") and '"probe"' in text


def read(text: str, given: Given) -> Launch:
    """Return the plan of the settings, with the model that is given."""
    options = Options(parse_json(text, "the file"))
    options.known("probe")
    if given.model is None:
        raise InputError("settings of the probe say nothing of the model: pass --model")
    return Launch(
        target="probe",
        framework="probe",
        model=given.model,
        training=TrainingSpec(seq_len=options.count("seq_len")),
        plan=ParallelPlan(sharding=Sharding.ZERO3, **read_fields(ROWS, options)),
        options=tuple(options.read),
        unread=options.left("not known"),
    )


READER = Reader(target="probe", recognises=recognises, read=read)

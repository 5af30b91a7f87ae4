"""`autoplan schema`: what may stand in the files that autoplan reads and writes?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from autoplan.errors import InputError

KINDS = ("model", "cluster", "mixed-cluster", "framework", "training", "plan", "mixed-plan")


def schema(kind: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="The file that is described.")]) -> None:
    """Print the JSON Schema of a file."""
    import json

    from autoplan import files
    from autoplan.model import ModelSpec
    from autoplan.read.cluster import cluster_schema
    from autoplan.read.framework import framework_schema
    from autoplan.read.mixed import mixed_schema
    from autoplan.result import MixedPlanFile, PlanFile
    from autoplan.training import TrainingSpec

    # People write all of them in human units but plan.json, which autoplan writes in SI.
    schemas: dict[str, Callable[[], dict[str, Any]]] = {
        "model": lambda: files.schema(ModelSpec, human_units=True),
        "cluster": cluster_schema,
        "mixed-cluster": mixed_schema,
        "framework": framework_schema,
        "training": lambda: files.schema(TrainingSpec, human_units=True),
        "plan": lambda: files.schema(PlanFile, human_units=False),
        "mixed-plan": lambda: files.schema(MixedPlanFile, human_units=False),
    }
    if kind not in schemas:
        raise InputError(f"no schema {kind!r}: known are {', '.join(KINDS)}")
    typer.echo(json.dumps(schemas[kind](), indent=2))

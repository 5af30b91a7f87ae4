"""`autoplan schema`: what may stand in the files that autoplan reads and writes?"""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.errors import InputError

KINDS = ("model", "cluster", "framework", "training", "plan")


def schema(kind: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="The file that is described.")]) -> None:
    """Print the JSON Schema of a file."""
    import json

    from autoplan import files
    from autoplan.cluster import ClusterSpec
    from autoplan.framework import Framework
    from autoplan.model import ModelSpec
    from autoplan.read.cluster import cluster_schema
    from autoplan.result import PlanFile
    from autoplan.training import TrainingSpec

    types: dict[str, type] = {
        "model": ModelSpec,
        "cluster": ClusterSpec,
        "framework": Framework,
        "training": TrainingSpec,
        "plan": PlanFile,
    }
    if kind not in types:
        raise InputError(f"no schema {kind!r}: known are {', '.join(KINDS)}")
    # People write all of them in human units but plan.json, which autoplan writes in SI.
    described = cluster_schema() if kind == "cluster" else files.schema(types[kind], human_units=kind != "plan")
    typer.echo(json.dumps(described, indent=2))

"""Schemas of the files that autoplan reads and writes, and of what its commands print as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, get_args

from autoplan.base.errors import InputError

FILES = ("model", "cluster", "mixed-cluster", "framework", "training", "plan", "mixed-plan", "job-template")
# By command, what it prints with --json; 'db-add' is what becomes of records that `db push`, `pull` and `import` add.
PRINTED = {
    "search": "plan",
    "estimate": "plan",
    "explain": "explain",
    "compare": "compare",
    "replan": "replan",
    "export": "export",
    "read": "read",
    "predict": "predict",
    "score": "score",
    "calibrate": "calibrate",
    "list": "list",
    "discover": "discover",
    "profile": "profile",
    "topo": "topo",
    "run": "run",
    "tune": "tune",
    "doctor": "doctor",
    "db info": "db-info",
    "db list": "db-list",
    "db show": "db-show",
    "db push": "db-add",
    "db pull": "db-add",
    "db import": "db-add",
    "db export": "db-export",
    "db check": "db-check",
    "db report": "db-report",
    "db hide": "db-hide",
    "db approve": "db-hide",
}
KINDS = tuple(dict.fromkeys((*FILES, *PRINTED.values())))


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of one of `KINDS`; InputError where there is none."""
    if kind not in KINDS:
        raise InputError(f"no schema {kind!r}: known are {', '.join(KINDS)}")
    return _files()[kind]() if kind in FILES else _printed(kind)


def _files() -> Mapping[str, Callable[[], dict[str, Any]]]:
    """Return the schemas of files.  All are in human units but plan.json, which autoplan writes, in SI."""
    from autoplan.base.json_schema import schema as schema_of
    from autoplan.frameworks.presets import framework_schema
    from autoplan.jobs.template import job_template_schema
    from autoplan.readers.cluster import cluster_schema
    from autoplan.readers.mixed_cluster import mixed_schema
    from autoplan.spec.model import ModelSpec
    from autoplan.spec.plan_file import MixedPlanFile, PlanFile
    from autoplan.spec.training import TrainingSpec

    return {
        "model": lambda: schema_of(ModelSpec, human_units=True),
        "cluster": cluster_schema,
        "mixed-cluster": mixed_schema,
        "framework": framework_schema,
        "training": lambda: schema_of(TrainingSpec, human_units=True),
        "plan": lambda: schema_of(PlanFile, human_units=False),
        "mixed-plan": lambda: schema_of(MixedPlanFile, human_units=False),
        "job-template": job_template_schema,
    }


def _printed(kind: str) -> dict[str, Any]:
    """Return the schema of what a command prints, in SI units."""
    from autoplan.api import outputs
    from autoplan.api.doctor import Checkup
    from autoplan.api.export import Exported
    from autoplan.api.measured_runs import Imported
    from autoplan.api.traces import TraceResult
    from autoplan.frameworks.common.launch import Launch
    from autoplan.profiler.discover.report import ReportFile
    from autoplan.profiler.store import Added, Finding
    from autoplan.report.compare import Compared
    from autoplan.spec.explanation import Explanation, MixedExplanation
    from autoplan.spec.needed_times import StepSources
    from autoplan.spec.replan_summary import ReplanSummary
    from autoplan.spec.team_overview import TeamOverview
    from autoplan.spec.tune_report import TuneReport

    types: dict[str, Any] = {
        "explain": Explanation | MixedExplanation | StepSources,
        "compare": list[Compared],
        "replan": ReplanSummary,
        "export": Exported,
        "read": Launch | TraceResult,
        "predict": outputs.Predicted,
        "score": dict[str, dict[str, float | None]],
        "calibrate": outputs.Calibrated | Imported,
        "list": list[dict[str, str | int]],
        "discover": ReportFile,
        "profile": outputs.Profiled | outputs.PlannedMeasurements | outputs.CheckedHealth,
        "topo": outputs.Topology | outputs.MixedTopology,
        "tune": TuneReport,
        "doctor": Checkup,
        "db-info": outputs.Held,
        "db-list": list[outputs.Listed] | list[outputs.ListedRun],
        "db-show": outputs.Shown | outputs.ShownRun,
        "db-add": Added,
        "db-export": outputs.Written,
        "db-check": list[Finding],
        "db-report": TeamOverview,
        "db-hide": outputs.Changed,
    }
    if kind == "run":
        return _run_schema()
    several = get_args(types[kind]) if isinstance(types[kind], UnionType) else (types[kind],)
    return _any_of(several)


def _any_of(kinds: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of a value of one of some types; msgspec itself takes no union of two dataclasses."""
    from autoplan.base.json_schema import schema as schema_of

    parts = [schema_of(kind, human_units=False) for kind in kinds]
    definitions = {name: body for part in parts for name, body in part.pop("$defs", {}).items()}
    return {**(parts[0] if len(parts) == 1 else {"anyOf": parts}), "$defs": definitions}


def _run_schema() -> dict[str, Any]:
    """Return the schema of `autoplan.trainer.task.RunFile`, whose task is one of two."""
    from autoplan.trainer.task import Command, PredictedRun, Task, TrainingReport

    fields = {
        "task": _any_of((Task, Command)),
        "predicted": _any_of((PredictedRun,)),
        "measured": _any_of((TrainingReport,)),
    }
    definitions = {name: body for part in fields.values() for name, body in part.pop("$defs").items()}
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
        "$defs": definitions,
    }

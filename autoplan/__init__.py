"""autoplan finds the fastest parallel configuration for training a large model on a cluster.

The names below are the public interface; `docs/api.md` shows how to use them.  They are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoplan.base.version import __version__ as __version__

if TYPE_CHECKING:
    from inspect import Signature

    from autoplan.api.compare import CompareResult as CompareResult
    from autoplan.api.compare import compare as compare
    from autoplan.api.estimate import estimate as estimate
    from autoplan.api.explain import ExplainResult as ExplainResult
    from autoplan.api.explain import explain as explain
    from autoplan.api.export import ExportResult as ExportResult
    from autoplan.api.export import export as export
    from autoplan.api.launch_files import ReadResult as ReadResult
    from autoplan.api.launch_files import read as read
    from autoplan.api.measured_runs import CalibrateResult as CalibrateResult
    from autoplan.api.measured_runs import PredictResult as PredictResult
    from autoplan.api.measured_runs import ScoreResult as ScoreResult
    from autoplan.api.measured_runs import calibrate as calibrate
    from autoplan.api.measured_runs import predict as predict
    from autoplan.api.measured_runs import score as score
    from autoplan.api.mixed import search_mixed as search_mixed
    from autoplan.api.plan_result import PlanResult as PlanResult
    from autoplan.api.plan_result import load_plan as load_plan
    from autoplan.api.plan_run import run as run
    from autoplan.api.problem import load_cluster as load_cluster
    from autoplan.api.problem import load_framework as load_framework
    from autoplan.api.problem import load_model as load_model
    from autoplan.api.profiling import profile as profile
    from autoplan.api.replan import ReplanResult as ReplanResult
    from autoplan.api.replan import replan as replan
    from autoplan.api.results import MixedPlanResult as MixedPlanResult
    from autoplan.api.results import Table as Table
    from autoplan.api.search import search as search
    from autoplan.api.tuning import tune as tune
    from autoplan.base.errors import AutoplanError as AutoplanError
    from autoplan.base.errors import AutoplanWarning as AutoplanWarning
    from autoplan.base.errors import InputError as InputError
    from autoplan.base.errors import NoPlanError as NoPlanError
    from autoplan.base.errors import StoreError as StoreError
    from autoplan.base.errors import UnpricedError as UnpricedError
    from autoplan.spec.plan import ParallelPlan as ParallelPlan

_PUBLIC = {
    "autoplan.api.compare": ("compare", "CompareResult"),
    "autoplan.api.estimate": ("estimate",),
    "autoplan.api.explain": ("explain", "ExplainResult"),
    "autoplan.api.export": ("export", "ExportResult"),
    "autoplan.api.launch_files": ("read", "ReadResult"),
    "autoplan.api.measured_runs": (
        *("predict", "score", "calibrate"),
        *("PredictResult", "ScoreResult", "CalibrateResult"),
    ),
    "autoplan.api.mixed": ("search_mixed",),
    "autoplan.api.plan_result": ("load_plan", "PlanResult"),
    "autoplan.api.plan_run": ("run",),
    "autoplan.api.problem": ("load_model", "load_cluster", "load_framework"),
    "autoplan.api.profiling": ("profile",),
    "autoplan.api.replan": ("replan", "ReplanResult"),
    "autoplan.api.results": ("MixedPlanResult", "Table"),
    "autoplan.api.search": ("search",),
    "autoplan.api.tuning": ("tune",),
    "autoplan.base.errors": (
        *("AutoplanError", "InputError", "NoPlanError", "UnpricedError", "StoreError", "AutoplanWarning"),
    ),
    "autoplan.spec.plan": ("ParallelPlan",),
}
_HOMES = {name: home for home, names in _PUBLIC.items() for name in names}
__all__ = [*_HOMES]


class _CallablePackage(ModuleType):
    """The package `autoplan.search`, callable like the public function of the same name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from autoplan.api.search import search

        return search(*arguments, **options)

    @property
    def __signature__(self) -> Signature:
        from inspect import signature  # a fifth of the time of the import

        from autoplan.api.search import search

        return signature(search)


import_module("autoplan.search").__class__ = _CallablePackage


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""Measured runs as problems and plans, row by row from a table.

Only the columns that describe a configuration are read: an id is copied, and a source, a status or a measured value
is never looked at; of a note only the switches that it lists.  Blank columns take stated defaults, which every run
lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from autoplan.base.errors import AutoplanError
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.runs.recipes import Recipe
from autoplan.runs.row import Row
from autoplan.runs.row_plan import plan_of
from autoplan.runs.row_problem import problem_of, recipe_of
from autoplan.runs.table import read_rows
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import Fp8Scaling
from autoplan.spec.framework import Framework
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem

# Of what the recipe of a row chose, what a problem and its plan hold.
READ_OPTIONS = {
    "cuda_graph",
    "dispatcher",
    "dropout",
    "ep_overlap",
    "finetune",
    "fp8_attention",
    "fp8_params",
    "grad_reduce_overlap",
    "main_weights",
    "offload",
    "optimizer",
    "param_gather_overlap",
    "pp_layout",
    "recompute_modules",
    "token_dropping",
    "tp_overlap",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Row of a table: what was run, or why it cannot be priced, and which blanks were filled."""

    id: str
    problem: Problem | None
    plan: ParallelPlan | None
    refusal: str
    is_invalid: bool  # the framework itself would refuse it
    filled: tuple[str, ...]
    doubted: Framework | None = None  # which the run may as well have had; None: no doubt

    def calibrated(self, calibration: Calibration) -> Run:
        """Return the run under another calibration."""
        return replace(self, problem=self.problem and replace(self.problem, calibration=calibration))


def read_runs(path: Path) -> Iterator[Run]:
    """The runs of a CSV table in the columns of `measured_runs.csv`, in order; a bad row is a refusal, not an error."""
    return map(_run, read_rows(path, "runs", ("id", "framework", "gpu", "num_gpus", "model")))


def _run(cells: dict[str, str]) -> Run:
    row = Row(cells)
    problem, plan, refusal, invalid, doubted = None, None, "", False, None
    try:
        recipe = recipe_of(row)
        problem = problem_of(row, recipe)
        plan = plan_of(row, problem, recipe)
        if recipe.doubted and problem.cluster.num_nodes >= recipe.doubted_from_nodes:
            doubted = problem.framework.changed(**recipe.doubted)
        row.filled.extend(
            f"{name}={value} left out"
            for name, value in row.options().items()
            if name not in READ_OPTIONS | _read_under(row, recipe)
        )
        refusal = _refused_by_framework(problem, plan, recipe)
        invalid = bool(refusal)
    except AutoplanError as error:
        refusal = str(error)
    return Run(
        id=cells["id"],
        problem=problem,
        plan=plan if not refusal else None,
        refusal=refusal,
        is_invalid=invalid,
        filled=tuple(row.filled),
        doubted=doubted,
    )


def _read_under(row: Row, recipe: Recipe) -> set[str]:
    """Return the options that mean something under this recipe alone, or by what they name."""
    by_name = {"fp8_recipe": row.options().get("fp8_recipe") in tuple(Fp8Scaling), "packed": recipe.packed_document_len}
    return {name for name, is_read in by_name.items() if is_read}


def _refused_by_framework(problem: Problem, plan: ParallelPlan, recipe: Recipe) -> str:
    """The first rule that the plan breaks, or nothing.

    The rules of Megatron-LM are those of today, and most of its runs in tables are older: they answer to none.  Nor do
    runs of kin, which has other rules, or without mixed precision, which no plan is made for.
    """
    framework = problem.framework
    answers_to_none = recipe.is_kin or framework.rules == "megatron-lm" or problem.training.precision == "fp32"
    rules = universal.RULES if answers_to_none else book_of(framework).rules
    return next(iter(broken(rules, problem.workload, plan)), "")

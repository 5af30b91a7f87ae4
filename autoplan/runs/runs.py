"""Measured runs of a table as problems and plans, row by row.

Only columns that describe a configuration are read: the id is copied, and source, status and measured values are never
read; of a note only the switches that it lists.  Blank columns get stated defaults, which every run lists.
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
from autoplan.runs.row_plan import STATED, plan_of
from autoplan.runs.row_problem import problem_of, recipe_of
from autoplan.runs.table import read_rows
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import Fp8Scaling
from autoplan.spec.framework import Framework
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem

# Recipe options that are represented in a problem or its plan.
READ_OPTIONS = {
    "activation_fusion",
    "activation_offload_layers",
    "cluster",
    "cp_kind",
    "cuda_graph",
    "dense_layers",
    "dispatcher",
    "ep_overlap",
    "expert_balance",
    "finetune",
    "fp8_attention",
    "fp8_params",
    "grad_reduce_overlap",
    "offload",
    "optimizer",
    "param_gather_overlap",
    "peak_memory",
    "pp_layout",
    "recompute_modules",
    "token_dropping",
    "tp_overlap",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row of a table: the run, or why it cannot be priced, and which blanks were filled."""

    id: str
    problem: Problem | None
    plan: ParallelPlan | None
    refusal: str
    is_invalid: bool  # the framework itself would reject it
    filled: tuple[str, ...]
    is_input_bound: bool = False  # its steps waited for samples, which no plan explains
    rejected_plan: ParallelPlan | None = None  # which today's framework rejects and others could run
    doubted: Framework | None = None  # which the run may have used instead; None: no doubt

    def calibrated(self, calibration: Calibration) -> Run:
        """Return the run under another calibration."""
        return replace(self, problem=self.problem and replace(self.problem, calibration=calibration))


def read_runs(path: Path) -> Iterator[Run]:
    """Read the runs of a CSV table with the columns of `measured_runs.csv`; a bad row is a refusal, not an error."""
    return map(_run, read_rows(path, "runs", ("id", "framework", "gpu", "num_gpus", "model")))


def _run(cells: dict[str, str]) -> Run:
    row = Row(cells)
    problem, plan, rejected, refusal, invalid, doubted, input_bound = None, None, None, "", False, None, False
    try:
        recipe = recipe_of(row)
        problem = problem_of(row, recipe)
        plan = plan_of(row, problem, recipe)
        framework, doubted = recipe.builds(problem.framework, problem.cluster.num_nodes, plan.tp)
        problem = replace(problem, framework=framework)
        row.filled.extend(
            f"{name}={value} left out"
            for name, value in row.options().items()
            if name not in READ_OPTIONS | STATED | _read_under(row, recipe)
        )
        input_bound = row.has("input_bound") and row.flag("input_bound", False)
        refusal = _refused_by_framework(problem, plan, recipe)
        invalid = bool(refusal)
        if invalid and not next(iter(broken(universal.RULES, problem.workload, plan)), ""):
            rejected = plan
    except AutoplanError as error:
        refusal = str(error)
    return Run(
        id=cells["id"],
        problem=problem,
        plan=plan if not refusal else None,
        refusal=refusal,
        is_invalid=invalid,
        filled=tuple(row.filled),
        is_input_bound=input_bound,
        rejected_plan=rejected,
        doubted=doubted,
    )


def _read_under(row: Row, recipe: Recipe) -> set[str]:
    """Return the recipe options that apply under this recipe or by their own value."""
    by_name = {"fp8_recipe": row.options().get("fp8_recipe") in tuple(Fp8Scaling), "packed": recipe.packed_document_len}
    return {name for name, is_read in by_name.items() if is_read}


def _refused_by_framework(problem: Problem, plan: ParallelPlan, recipe: Recipe) -> str:
    """Return the first rule that the plan breaks, or nothing.

    No rules are checked for Megatron-LM, whose rules are current while most of its runs in tables are older; for older
    versions of others and for similar frameworks, which have other rules; and for runs without mixed precision, which
    no plan supports.
    """
    framework = problem.framework
    answers_to_none = (
        recipe.is_similar
        or recipe.had_other_rules
        or framework.rules == "megatron-lm"
        or problem.training.precision == "fp32"
    )
    rules = universal.RULES if answers_to_none else book_of(framework).rules
    return next(iter(broken(rules, problem.workload, plan)), "")

"""Does Primus get the rules of Megatron-LM, and two schedules more?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_lm import rules as megatron_lm
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.primus import rules as primus
from autoplan.frameworks.registry import book_of
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.workload import Workload
from commands import run
from megatron_plans import DEFECTS, MATRIX, ZERO_BUBBLE


def says(file: PlanFile, rules: tuple[object, ...], **changes: object) -> str:
    plan = replace(file.best.plan, **changes)  # type: ignore[arg-type]
    workload = Workload(model=file.model, training=file.training, num_devices=plan.num_devices)
    return "; ".join(broken(rules, workload, plan))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MATRIX | DEFECTS)
def test_plans_of_megatron_lm_are_admitted_as_there(name: str) -> None:
    file = MATRIX[name] if name in MATRIX else DEFECTS[name][0]
    assert bool(says(file, primus.RULES)) == bool(says(file, megatron_lm.RULES)) == (name in DEFECTS)


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_split_schedules_are_its_own(name: str) -> None:
    assert says(ZERO_BUBBLE[name], primus.RULES) == ""
    assert "does not exist" in says(ZERO_BUBBLE[name], megatron_lm.RULES)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("zb-h1", {"grad_reduce_overlap": True}, "overlaps neither reductions nor gathers"),
        ("zb-v", {"param_gather_overlap": True}, "overlaps neither reductions nor gathers"),
        ("zb-v", {"recompute": "full"}, "frees no memory"),
        ("zb-h1", {"gradient_accumulation_fusion": False}, "needs gradient_accumulation_fusion"),
        ("zb-h1", {"vp": 2, "layers_per_chunk": None}, "1f1b and zb-h1 have vp 1, zb-v has 2"),
    ],
)
def test_what_they_cannot_is_refused(name: str, changes: dict[str, object], expected: str) -> None:
    assert expected in says(ZERO_BUBBLE[name], primus.RULES, **changes)


def test_its_preset_is_megatron_core_with_its_rules() -> None:
    framework, core = load_framework("primus"), load_framework("megatron-core")
    assert book_of(framework).rules[: len(primus.RULES)] == primus.RULES
    of_core = {"name": core.name, "rules": core.rules, "sources": core.sources, "lacks": core.lacks}
    assert replace(framework, **of_core) == core  # type: ignore[arg-type]


def test_a_search_finds_a_plan_with_a_split_schedule_and_its_file(tmp_path: Path) -> None:
    search = "search llama3-8b --cluster h100-sxm:1x8 --global-batch 32 --seq-len 4096 --framework primus"
    done = run(tmp_path, *search.split(), "--fix", "schedule=zb-v", "--fix", "pp=4", "--fix", "tp=2")
    assert done.returncode == 0, done.stderr
    assert "ZB-V" in done.stdout
    written = run(tmp_path, *["export", "plan.json", "--to", "primus", "--out", "run"])
    assert written.returncode == 0, written.stderr
    assert "pp_algorithm: zbv-formatted" in (tmp_path / "run" / "primus.yaml").read_text()

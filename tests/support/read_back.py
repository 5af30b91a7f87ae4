"""Does a launch file mean what the plan says?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import autoplan
from autoplan.frameworks.common.launch import Launch
from autoplan.spec.plan_file import PlanFile


def check_price(file: PlanFile, launch: Launch, place: dict[str, Any]) -> None:
    """Compare what was read back of an exported plan with it: training, model, step and memory.

    `place` has the options with which the plan was estimated.
    """
    assert (launch.training, launch.model) == (file.training, file.model)
    again = autoplan.estimate(launch.model, **place, plan=launch.plan, training=launch.training).file
    assert again.best.step_s == pytest.approx(file.best.step_s, rel=1e-9)
    assert again.best.memory_bytes == pytest.approx(file.best.memory_bytes, rel=1e-9)


def check_adapters(read_back: Callable[[PlanFile], Launch], place: dict[str, Any], tuning: str, sharding: str) -> None:
    """Compare a plan of fine-tuning with what was read back of its export."""
    plan = {"micro_batch": 1, "sharding": sharding, "recompute": "full"}
    file = autoplan.estimate("llama3-8b", **place, plan=plan, finetune=tuning).file
    assert file.training.finetuning is not None
    check_price(file, read_back(file), place)


def matters(launch: Launch) -> set[str]:
    """Return the options that were not read and may cost time or memory."""
    return {unread.option for unread in launch.unread if unread.matters}

"""Variables of the environment that change a step are listed with a launch, others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.api.launch_files import make_context
from autoplan.frameworks.common.environment import unread_variables
from autoplan.frameworks.launch_files import read_launch
from test_conditions import TRAINING


@pytest.mark.parametrize(
    ("name", "value", "is_listed"),
    [
        ("NVTE_FUSED_ATTN", "0", True),
        ("NVTE_FUSED_ATTN", "1", False),
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_DEBUG", "INFO", False),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("ACCELERATE_MIXED_PRECISION", "fp8", True),
        ("ACCELERATE_LOG_LEVEL", "info", False),
        ("WANDB_MODE", "offline", False),
    ],
)
def test_variables_that_change_a_step_are_listed(name: str, value: str, is_listed: bool) -> None:
    assert [item.option for item in unread_variables({name: value})] == [name] * is_listed


def test_a_script_lists_what_its_command_sees(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"export NVTE_FLASH_ATTN=0\nNOT_SEEN=1 TP=2 DATA=a\nCUDA_LAUNCH_BLOCKING=1 {TRAINING.strip()}\n")
    unread = {item.option: item for item in read_launch(path, make_context()).unread}
    assert unread["NVTE_FLASH_ATTN"].matters
    assert "the host is priced as running ahead" in unread["CUDA_LAUNCH_BLOCKING"].why
    assert "NOT_SEEN" not in unread

"""Variables of the environment that change a step are listed with a launch, others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.api.launch_files import make_context
from autoplan.frameworks.common.environment import unread_variables
from autoplan.frameworks.launch_files import read_launch
from test_checks import TRAINING


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
        ("ACCELERATE_CONFIG_FILE", "zero3.yaml", False),
        ("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP", True),
        ("FSDP_SIZE", "8", False),
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


@pytest.mark.parametrize(
    "command",
    [
        "megatron sft --model Qwen/Qwen2.5-14B --micro_batch_size 1 --global_batch_size 8 --max_length 4096",
        "python scripts/training/run_recipe.py --recipe llama32_1b_pretrain_config train.global_batch_size=8",
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct data.max_prompt_length=1024 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ],
)
def test_scripts_of_every_reader_list_it(tmp_path: Path, command: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"export CUDA_LAUNCH_BLOCKING=1\n{command}\n")
    assert "CUDA_LAUNCH_BLOCKING" in [item.option for item in read_launch(path, make_context(devices=8)).unread]


@pytest.mark.parametrize(
    "before",
    [
        "env NCCL_P2P_DISABLE=1",
        "mpirun -x NCCL_P2P_DISABLE=1",
        """ray job submit --runtime-env-json='{"env_vars": {"NCCL_P2P_DISABLE": "1"}}' --""",
    ],
)
def test_variables_that_a_command_hands_on_are_listed(tmp_path: Path, before: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"TP=2 DATA=a\necho NCCL_IB_DISABLE=1\n{before} {TRAINING.strip()}\n")
    listed = [item.option for item in read_launch(path, make_context(devices=8)).unread]
    assert "NCCL_P2P_DISABLE" in listed
    assert "NCCL_IB_DISABLE" not in listed

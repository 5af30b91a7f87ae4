"""DeepSpeed's own parser and the checks that its engine makes of the sizes, without devices.

Reads [[number of devices, heads, heads of keys and values, JSON], ...] from stdin and writes for each {"error": ...} or
what DeepSpeed made of it, with the keys at the top that it never looks up.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from framework_parsers import answer


class Seen(dict[str, Any]):
    """Remembers which keys were looked up."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__(table)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def __copy__(self) -> Seen:
        return self


def made_of(world: int, heads: int, kv_heads: int, text: str) -> dict[str, Any]:
    """Settings that DeepSpeed makes of a configuration for `world` devices."""
    from deepspeed.module_inject.auto_ep_config import validate_autoep_config
    from deepspeed.runtime import config as parser
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deepspeed.json"
        file.write_text(text)
        table = Seen(load_ds_config(str(file)))
    with mock.patch.multiple(parser.dist, get_rank=lambda *_: 0, get_world_size=lambda *_: world):
        config = parser.DeepSpeedConfig(table)
    cp, zero = table.get("sequence_parallel_size", 1), config.zero_config
    validate_autoep_config(
        config.expert_parallel_config,
        world,
        1,
        config.tensor_parallel_config.autotp_size,
        cp,
        zero_stage=int(zero.stage),
        zero_offload_optimizer=zero.offload_optimizer is not None,
    )
    if cp > 1:
        group = {"get_rank": lambda *_: 0, "get_world_size": lambda *_: cp}
        with (
            mock.patch.multiple(ulysses_sp.dist, **group),
            mock.patch.object(ulysses_sp, "register_all_to_all_group", create=True),
        ):
            ulysses_sp.UlyssesSPAttentionHF(
                attn=None,
                batch_size=1,
                attn_head_count=heads,
                attn_head_size=64,
                kv_head_count=kv_heads,
                num_hidden_layers=1,
                process_group=None,
                seq_length_is_variable=True,
            )
    return {
        "never_read": sorted(set(table) - table.seen),
        "train_batch_size": config.train_batch_size,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "steps": config.gradient_accumulation_steps,
        "stage": int(zero.stage),
        "overlap_comm": zero.overlap_comm,
        "prefetch": zero.prefetch_bucket_size,
        "offload": zero.offload_optimizer is not None and str(zero.offload_optimizer.device),
        "bf16": config.bfloat16_config.enabled,
        "fp16": config.float16_config.enabled,
        "tp": config.tensor_parallel_config.autotp_size,
        "ep": config.expert_parallel_config.autoep_size,
    }


def prepare() -> Callable[[Any], dict[str, Any]]:
    os.environ.update(DS_ACCELERATOR="cpu", TRANSFORMERS_VERBOSITY="error")
    return lambda asked: made_of(*asked)


if __name__ == "__main__":
    answer(prepare)

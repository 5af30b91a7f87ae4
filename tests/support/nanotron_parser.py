"""nanotron's own loader, process groups and model on one machine without devices.

Reads [[world size, environment, YAML], ...] from stdin and writes for each {"error": ...} or what nanotron made of it.
Process groups are torch's own fakes, and the model is built on the meta device, for the first rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework_parsers import answer, stand_in


def made_of(world: int, text: str) -> dict[str, Any]:
    """Settings that nanotron makes of a configuration for `world` devices."""
    import nanotron.distributed as dist
    import torch
    from nanotron.config import get_config_from_file
    from nanotron.models.base import build_model
    from nanotron.parallel import ParallelContext
    from nanotron.parallel.pipeline_parallel.block import PipelineBlock
    from nanotron.parallel.pipeline_parallel.p2p import P2P
    from nanotron.random import RandomStates
    from nanotron.trainer import CONFIG_TO_MODEL_CLASS
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text)
        config = get_config_from_file(str(file))
    os.environ.update(WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(min(world, 8)))
    ParallelContext.set_device = lambda self: None
    randn = torch.randn
    torch.randn = lambda *sizes, **named: randn(*sizes, **named | {"device": "meta"})  # routers ask for a GPU
    P2P.__init__ = lambda self, group, device: setattr(self, "pg", group)
    dist.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    try:
        at = config.parallelism
        context = ParallelContext(
            tensor_parallel_size=at.tp,
            pipeline_parallel_size=at.pp,
            data_parallel_size=at.dp,
            expert_parallel_size=at.expert_parallel_size,
            context_parallel_size=at.context_parallel_size,
        )
        kind = CONFIG_TO_MODEL_CLASS[type(config.model.model_config).__name__]
        model = build_model(
            model_builder=lambda: kind(
                config=config.model.model_config,
                parallel_context=context,
                parallel_config=at,
                random_states=RandomStates({}),
            ),
            parallel_context=context,
            dtype=config.model.dtype,
            device=torch.device("meta"),
        )
        blocks = [(name, module.rank) for name, module in model.named_modules() if isinstance(module, PipelineBlock)]
        layers = [rank for name, rank in blocks if ".decoder." in name]
    finally:
        dist.destroy_process_group()
    return {
        "global_batch": config.global_batch_size,
        "seq_len": config.tokens.sequence_length,
        "stages": [layers.count(rank) for rank in range(at.pp)],
        "engine": type(at.pp_engine).__name__,
        "tp_mode": at.tp_mode.name,
        "zero_stage": config.optimizer.zero_stage,
        "model": {
            key: value
            for key, value in vars(config.model.model_config).items()
            if isinstance(value, bool | int | float) and not key.startswith("_")
        },
    }


def prepare() -> Callable[[Any], dict[str, Any]]:
    sys.path.insert(0, str(Path(os.environ["NANOTRON_DIR"]) / "src"))
    stand_in("triton", "flash_attn", "flash_attn_2_cuda", "grouped_gemm", "functorch", "ring_flash_attn")
    from nanotron import logging  # noqa: F401  (first: nanotron.config is part of a cycle)

    def asked_of(asked: tuple[int, dict[str, str], str]) -> dict[str, Any]:
        world, environment, text = asked
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update(environment)
        return made_of(world, text)

    return asked_of


if __name__ == "__main__":
    answer(prepare)

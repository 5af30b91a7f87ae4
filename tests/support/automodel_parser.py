"""What does NeMo AutoModel itself make of a recipe?  A process of its own, as it imports torch.

Reads [{text: "...", world: N}, ...] and writes for each either {error: ...} or the sizes of its mesh and the policies
of its strategy.  AUTOMODEL_DIR has its checkout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from framework_parsers import answer, stand_in


def check(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    import yaml
    from nemo_automodel.components._peft.lora import PeftConfig
    from nemo_automodel.components.distributed.mesh_utils import _create_device_meshes
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.quantization.fp8 import FP8Config
    from nemo_automodel.components.training.step_scheduler import StepScheduler
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from torch.testing._internal.distributed.fake_pg import FakeStore

    table = yaml.safe_load(case["text"])
    parsed = parse_distributed_section(table["distributed"])
    torch.distributed.init_process_group("fake", rank=0, world_size=case["world"], store=FakeStore())
    try:
        mesh, experts = _create_device_meshes(
            parsed["strategy_config"], parsed["parallelism_sizes"], world_size=case["world"]
        )
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh is not None else {}
        dp = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1) if sizes else case["world"]
        # The steps of accumulation, which the sizes of batches must divide into.
        scheduler = StepScheduler(
            **table["step_scheduler"], dp_size=dp, ckpt_every_steps=1, dataloader=[0], max_steps=1
        )
    finally:
        torch.distributed.destroy_process_group()
    sections = {"peft": PeftConfig, "fp8": FP8Config}
    for name, kind in sections.items():
        if name in table:
            kind(**{key: value for key, value in table[name].items() if key != "_target_"})
    backend = BackendConfig(**{key: value for key, value in table["model"]["backend"].items() if key != "_target_"})
    strategy, pipeline = parsed["strategy_config"], parsed["pipeline_config"]
    return {
        "sizes": {axis.value: size for axis, size in sizes.items()},
        "experts": {axis.value: size for axis, size in zip(experts.mesh_dim_names, experts.shape, strict=True)}
        if experts
        else {},
        "strategy": type(strategy).__name__,
        "recompute": parsed["activation_checkpointing"],
        "reshards": getattr(strategy, "reshard_after_forward", None),
        "reduces": str(getattr(getattr(strategy, "mp_policy", None), "reduce_dtype", None)),
        "offloads": getattr(strategy, "offload_policy", None) is not None,
        "schedule": pipeline.pp_schedule if pipeline else None,
        "layers_per_stage": pipeline.layers_per_stage if pipeline else None,
        "rounds": scheduler.grad_acc_steps,
        "dispatcher": backend.dispatcher,
    }


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    sys.path.insert(0, os.environ["AUTOMODEL_DIR"])
    stand_in("transformer_engine", "deep_ep", "triton", "nvidia_cutlass", "megatron", "megatron_fsdp")
    return check


if __name__ == "__main__":
    answer(prepare)

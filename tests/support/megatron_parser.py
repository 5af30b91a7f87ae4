"""Asks Megatron-LM, Megatron-Bridge, Primus and FlagScale themselves: run as a script, once for many plans.

Each kind reads a list from stdin, as JSON, and writes for every element what the framework made of it, or its refusal:

    python megatron_parser.py megatron-lm      [{"world", "environment", "words"}, ...]
    python megatron_parser.py megatron-bridge  [{"world", "environment", "text"}, ...]
    python megatron_parser.py primus           [{"world", "environment", "text"}, ...]
    python megatron_parser.py flagscale        [{"world", "words"}, ...]

No GPU is needed: triton and Transformer Engine are stood in for, and devices are pretended to be of an architecture.
Beyond the parsers it makes the configuration of the model, the groups of ranks (of a process group that only pretends)
and the layers of every stage, which the frameworks do before they train.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import tempfile
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework_parsers import answer, stand_in

ARCHITECTURE = 9
STOOD_IN = (
    "triton",
    "transformer_engine",
    "transformer_engine_torch",
    "nvidia_resiliency_ext",
    "modelopt",
    "mamba_ssm",
    "causal_conv1d",
    "fla",
    "qwen_vl_utils",
    "timm",
    "open_clip",
    "wandb",
    "diffusers",
    "megatron.energon",
    "nvtx",
    "nvdlfw_inspect",
    "transformers.modeling_attn_mask_utils",  # which transformers 5.24 lacks
)


def _prepare(stood_in: tuple[str, ...]) -> None:
    import typing_extensions

    if not hasattr(typing, "override"):  # Python 3.11, for which the frameworks are not written
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    stand_in(*stood_in)
    sys.path.insert(0, os.environ["MEGATRON_LM_DIR"])
    import megatron.core.utils
    import torch
    from packaging.version import Version

    megatron.core.utils._te_version = Version("2.14.0")
    properties = types.SimpleNamespace(
        major=ARCHITECTURE, minor=0, total_memory=80 << 30, name="pretended", multi_processor_count=132
    )
    torch.cuda.get_device_capability = lambda *_, **__: (ARCHITECTURE, 0)
    torch.cuda.get_device_properties = lambda *_, **__: properties
    torch.cuda.device_count = lambda: 8


def _enter(world: int, environment: dict[str, str]) -> None:
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(environment, RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world))


def _fused_kernels() -> None:
    """Functions of Transformer Engine that the configuration of a model looks for."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    for module in (rope_utils, moe_utils):
        for name in dir(module):
            if name.startswith("fused_") and getattr(module, name) is None:
                setattr(module, name, lambda *_, **__: None)


def _fused_adam() -> None:
    """The optimizer of Transformer Engine, whose parameters the configuration of an optimizer looks for."""
    from transformer_engine.pytorch import optimizers

    class FusedAdam:
        def __init__(
            self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: bool
        ) -> None: ...

    optimizers.FusedAdam = FusedAdam


def _stages(config: Any, world: int, **groups: Any) -> list[int]:
    """The layers of every chunk, rank by rank, after the groups of ranks could be made."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
            **groups,
        )
        chunks = config.virtual_pipeline_model_parallel_size
        layout = config.pipeline_model_parallel_layout
        if layout is not None:
            size = config.pipeline_model_parallel_size
            chunks_by_rank = [layout.layout[rank][chunk] for chunk in range(chunks or 1) for rank in range(size)]
            return [sum(kind.name == "decoder" for kind in chunk) for chunk in chunks_by_rank]
        counts = [
            get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
            for chunk in (range(chunks) if chunks else (None,))
            for rank in range(config.pipeline_model_parallel_size)
        ]
        if sum(counts) != config.num_layers:
            raise ValueError(f"the stages hold {sum(counts)} layers, the model has {config.num_layers}")
        return counts
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _checked(args: Any, world: int) -> dict[str, Any]:
    """Settings that Megatron-LM makes of parsed arguments, with the layers of every chunk."""
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args

    args = arguments.validate_args(args)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    config = core_transformer_config_from_args(args)
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    instances = args.num_distributed_optimizer_instances
    stages = _stages(config, world, order=order, num_distributed_optimizer_instances=instances)
    return {key: value for key, value in vars(args).items() if isinstance(value, _PLAIN)} | {"stages": stages}


_PLAIN = (bool, int, float, str, list, tuple, type(None))


def megatron_lm(asked: dict[str, Any]) -> dict[str, Any]:
    from megatron.training import arguments

    sys.argv = ["pretrain_gpt.py", *asked["words"]]
    return _checked(arguments.parse_args(), asked["world"])


def primus(asked: dict[str, Any]) -> dict[str, Any]:
    from megatron.training import arguments
    from primus.core.launcher.parser import PrimusParser

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(asked["text"])
        here = Path.cwd()
        os.chdir(folder)  # a workspace is made below
        try:
            options = argparse.Namespace(config=path, data_path="./data", backend_path=None, export_config=None)
            module = PrimusParser().parse(options).get_module_config("pre_trainer")
            written = PrimusParser()
            written.parse_exp(str(path))
            names = set(vars(written.exp.modules.pre_trainer.overrides))
            written.primus_home = Path(os.environ["PRIMUS_DIR"])
            written.exp.modules.pre_trainer.overrides = types.SimpleNamespace()
            written.parse_trainer_module("pre_trainer")
            presets = set(vars(written.exp.modules.pre_trainer))
        finally:
            os.chdir(here)
    sys.argv = ["pretrain_gpt.py"]
    args = arguments.parse_args()
    # Primus takes any key and drops those that it does not know.
    if unknown := names - presets - set(vars(args)):
        raise KeyError(f"no settings of Primus or Megatron-LM: {sorted(unknown)}")
    for key, value in vars(module).items():
        if hasattr(args, key):
            setattr(args, key, None if value == "null" else value)
    # A check that Megatron-LM got after the version that Primus is made for.
    args.add_position_embedding = args.add_position_embedding or args.position_embedding_type == "rope"
    args._is_global_batch_size_explicitly_specified = True
    result = _checked(args, asked["world"])
    kept = ("patch_primus_pipeline", "pp_algorithm")
    return result | {name: getattr(module, name) for name in kept}


def schedule(asked: dict[str, Any]) -> dict[str, Any]:
    """Primus' own table of a schedule: how many passes of each kind every rank runs."""
    from primus.core.pipeline_parallel.scheduler import schedule_table_factory

    made = schedule_table_factory.produce_schedule_instance(
        asked["algorithm"], asked["pp"], asked["vp"], asked["num_microbatches"]
    )
    table = made.generate_schedule_table()
    kinds = ("F", "B", "W")
    return {"passes": [[sum(node.func_type.name == kind for node in rank) for kind in kinds] for rank in table]}


def megatron_bridge(asked: dict[str, Any]) -> dict[str, Any]:
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.py"
        path.write_text(asked["text"])
        config = runpy.run_path(str(path))["plan_config"]()
    for section in ("model", "train", "ddp", "optimizer", "dist", "tokenizer", "checkpoint"):
        settings = getattr(config, section)
        declared = {name for kind in type(settings).__mro__ for name in getattr(kind, "__dataclass_fields__", ())}
        if phantoms := {name for name in vars(settings) if not name.startswith("_")} - declared:
            raise AttributeError(f"no fields of {section}: {sorted(phantoms)}")
    config = process_config_with_overrides(config, cli_overrides=["train.train_iters=7"])
    runtime_config_update(config)
    model = config.model
    if config.train.global_batch_size % (config.train.micro_batch_size * config.data_parallel_size):
        raise ValueError(f"global batch {config.train.global_batch_size} over dp {config.data_parallel_size}")
    order = "tp-cp-ep-pp-dp" if config.dist.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    instances = config.ddp.num_distributed_optimizer_instances
    stages = _stages(model, asked["world"], order=order, num_distributed_optimizer_instances=instances)
    sections = {"model": model, "train": config.train, "ddp": config.ddp, "optimizer": config.optimizer}
    made = {
        f"{section}.{name}": value
        for section, settings in sections.items()
        for name, value in vars(settings).items()
        if isinstance(value, _PLAIN)
    }
    return made | {"stages": stages, "data_parallel_size": config.data_parallel_size}


def flagscale(asked: dict[str, Any]) -> dict[str, Any]:
    """The mesh of every rank, by the options that FlagScale adds to Megatron-LM's parser and its checks of them."""
    import torch.distributed as dist
    from megatron.training.arguments import add_megatron_arguments
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder = Path(os.environ["FLAGSCALE_DIR"])
    for package, path in (("flagscale", "flagscale"), ("flagscale.train", "flagscale/train")):  # not what they import
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(folder / path)]
    from flagscale.train.arguments import FSTrainArguments

    patch = (folder / "flagscale/backends/Megatron-LM/megatron/training/arguments.py.patch").read_text()
    added = "\n".join(line[1:] for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++"))
    names: dict[str, Any] = {}
    begin = added.index("def _add_hetero_args")
    exec(added[begin : added.index("return parser", begin) + len("return parser")], names)
    ranks = []
    for rank in range(asked["world"]):
        parser = names["_add_hetero_args"](add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
        args = parser.parse_args(asked["words"])
        args.standalone_embedding_stage = False  # of FlagScale's other options
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=asked["world"])
        try:
            mapper = types.SimpleNamespace(to_logical_ranks=list)  # one device type: ranks as they are numbered
            FSTrainArguments(args, mapper).pre_validate_args()
        finally:
            dist.destroy_process_group()
        ranks.append([args.tensor_model_parallel_size, args.data_parallel_size, args.micro_batch_size])
    return {"layers": args.hetero_pipeline_layer_split, "meshes": args.hetero_process_meshes, "ranks": ranks}


def prepare(kind: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    if kind != "schedule":
        _prepare(STOOD_IN[:1] if kind in ("megatron-lm", "primus", "flagscale") else STOOD_IN)
    if kind in ("primus", "schedule"):
        sys.path.insert(0, os.environ["PRIMUS_DIR"])
    if kind == "megatron-bridge":
        sys.path.insert(0, str(Path(os.environ["MEGATRON_BRIDGE_DIR"]) / "src"))
    ask = {
        "megatron-lm": megatron_lm,
        "primus": primus,
        "megatron-bridge": megatron_bridge,
        "schedule": schedule,
        "flagscale": flagscale,
    }[kind]
    if kind != "schedule":
        _fused_kernels()
    if kind == "megatron-bridge":
        _fused_adam()

    def asked_of(asked: dict[str, Any]) -> dict[str, Any]:
        _enter(asked.get("world", 1), asked.get("environment", {}))
        return ask(asked)

    return asked_of


if __name__ == "__main__":
    answer(lambda: prepare(sys.argv[1]))

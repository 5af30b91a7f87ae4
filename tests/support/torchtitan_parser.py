"""What does torchtitan itself make of a configuration?  A process of its own, as it takes long to import.

Reads [{files: {name: text}, words: [...], world: N, build: bool}, ...] and writes for each either {error: ...} or
{values: {section: {name: value}}, stages: [[...]], parameters: N}.  What TORCHTITAN_FIRST names, where it is set,
comes before the installed torchtitan.  Of triton, grain and torchao, which are not needed to read a configuration,
stand-ins are imported where they are missing; quantisation is configured, not applied.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework_parsers import answer, stand_in


def without_quantisation() -> None:
    """Let converters be configured where their kernels are not installed."""
    try:
        from torchtitan.components import quantization
    except ImportError:
        return
    for name in quantization.__dict__:
        if name.endswith("Converter") and name != "QuantizationConverter":
            converter = getattr(quantization, name)
            converter.__init__ = lambda self, config: None
            converter.convert = lambda self, model: model


def check(case: dict[str, Any], here: Path) -> dict[str, Any]:
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    # Modules are imported once: each case has a folder and, in it, modules that are called after it.
    words = [word.replace("$HERE", str(here)) for word in case["words"]]
    for name, text in case["files"].items():
        stem, _, kind = name.partition(".")
        (here / (f"{stem}_{here.name}.py" if kind == "py" else name)).write_text(text)
        if kind == "py":
            words = [f"{stem}_{here.name}" if word == stem else word for word in words]
    sys.path.insert(0, str(here))
    config = ConfigManager().parse_args(words)
    return values_of(config, case, ParallelDims)


def values_of(config: Any, case: dict[str, Any], dims_of: Any) -> dict[str, Any]:
    parallelism, training, world = config.parallelism, config.training, case["world"]
    if hasattr(dims_of, "from_config"):
        dims = dims_of.from_config(parallelism, world)
    else:
        degrees = {name: getattr(parallelism, f"{long}_degree") for name, long in OLD_DEGREES.items()}
        dims = dims_of(**degrees, world_size=world)
    spec = getattr(config, "model_spec", None)
    if spec is not None:
        spec.model.update_from_config(config=config)
    check_trainer(training, parallelism, dims)
    check_mesh(dims)
    answer: dict[str, Any] = {"dp_shard": dims.dp_shard, "dp_replicate": dims.dp_replicate}
    sections = ("training", "parallelism", "compile", "activation_checkpoint", "model")
    answer["values"] = {
        name: plain(getattr(config, name)) for name in sections if dataclasses.is_dataclass(getattr(config, name, None))
    }
    answer["values"]["policy"] = type(getattr(config, "activation_checkpoint", None)).__qualname__
    if dims.pp > 1:
        answer["stages"] = stages(spec, parallelism, dims)
    if case.get("build"):
        answer["parameters"] = parameters(spec.model)
    return answer


OLD_DEGREES = {
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
}


def plain(section: Any) -> dict[str, Any]:
    listed = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in listed.items() if isinstance(value, bool | int | float | str | list)}


def check_trainer(training: Any, parallelism: Any, dims: Any) -> None:
    """Check what Trainer.__init__ does after it has got hold of devices (0.3.0 trainer.py:300 and :418)."""
    dp = dims.dp_replicate * dims.dp_shard
    if hasattr(training, "local_batch_size"):
        tokens, batch, least = training.seq_len, training.global_batch_size, training.local_batch_size * dp
    else:
        tokens = training.num_tokens_per_microbatch_per_dp_rank
        batch = training.num_tokens_per_train_step
        least = tokens * dp * (parallelism.num_pp_microbatches if dims.pp > 1 else 1)
    parts = (dims.tp if getattr(parallelism, "enable_sequence_parallel", True) else 1) * (
        2 * dims.cp if dims.cp > 1 else 1
    )
    if tokens % parts:
        raise ValueError(f"sequence of {tokens} must be divisible by {parts}")
    if batch > 0 and batch % least:
        raise ValueError(f"global batch {batch} must be a multiple of {least}")


def check_mesh(dims: Any) -> None:
    """Device meshes of all degrees, in a process group that talks to nobody."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=dims.world_size, store=FakeStore())
    try:
        dims.build_mesh()
    finally:
        torch.distributed.destroy_process_group()


def stages(spec: Any, parallelism: Any, dims: Any) -> Any:
    from torch.distributed.pipelining import schedules
    from torchtitan.distributed import pipeline_parallel

    kind = schedules.get_schedule_class(parallelism.pipeline_parallel_schedule)
    if spec is None:
        listed = parallelism.module_fqns_per_model_part
    else:
        counts = pipeline_parallel._get_pipeline_metadata(dims, parallelism, spec.model)
        listed = parallelism.module_fqns_per_model_part or pipeline_parallel._generate_llm_fqn_per_model_part(*counts)
        pipeline_parallel._get_pp_rank_to_stage_indices_mapping(
            0, dims.pp, parallelism.pipeline_parallel_schedule, len(listed)
        )
    if issubclass(kind, schedules.PipelineScheduleSingle) and len(listed) != dims.pp:
        raise ValueError(f"{len(listed)} stages on {dims.pp} ranks of a schedule with one stage a rank")
    return listed


def registry() -> dict[str, Any]:
    """Configurations that every function of the config registries gives, by model and function."""
    import importlib

    found: dict[str, Any] = {}
    for family in ("llama3", "qwen3", "deepseek_v3", "gpt_oss"):
        module = importlib.import_module(f"torchtitan.models.{family}.config_registry")
        for name, function in vars(module).items():
            if name.startswith(family) and callable(function) and "debug" not in name:
                config = function()
                found[f"{family} {name}"] = {
                    **plain(config.training),
                    **plain(config.parallelism),
                    "flavor": config.model_spec.flavor,
                    "policy": type(config.activation_checkpoint).__qualname__,
                    "compile": config.compile.enable and "model" in config.compile.components,
                    "async_tensor_parallel": config.compile.enable_async_tensor_parallel,
                }
    return found


def parameters(config: Any) -> int:
    """Parameters of a model, of which one layer of each kind is made."""
    import torch

    def count(part: Any) -> int:
        return sum({id(parameter): parameter.numel() for parameter in part.build().parameters()}.values())

    layers, config.layers = config.layers, []
    kinds: dict[bool, int] = {}
    with torch.device("meta"):
        whole = count(config)
        for layer in layers:
            is_moe = getattr(layer, "moe", None) is not None
            if is_moe not in kinds:
                kinds[is_moe] = count(layer)
            whole += kinds[is_moe]
    config.layers = layers
    return whole


def flavors() -> dict[str, Any]:
    """The number of parameters of every model that has a name."""
    import importlib

    counts: dict[str, Any] = {}
    for family in ("llama3", "qwen3", "deepseek_v3", "gpt_oss"):
        module = importlib.import_module(f"torchtitan.models.{family}")
        for flavor in getattr(module, f"{family.replace('_v3', 'v3').replace('_oss', 'oss')}_configs"):
            counts[f"{family} {flavor}"] = parameters(module.model_registry(flavor).model)
    return counts


def spread(*counts: int) -> list[list[str]]:
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    return _generate_llm_fqn_per_model_part(*counts)


def prepare(folder: Path) -> Callable[[Any], Any]:
    if checkout := os.environ.get("TORCHTITAN_FIRST"):
        sys.path.insert(0, checkout)
    stand_in(*(name for name in ("triton", "grain", "torchao") if importlib.util.find_spec(name) is None))
    without_quantisation()

    def asked_of(case: Any) -> Any:
        if case == "registry":
            return registry()
        if case == "flavors":
            return flavors()
        if "spread" in case:
            return [spread(*groups) for groups in case["spread"]]
        return check(case, Path(tempfile.mkdtemp(dir=folder)))

    return asked_of


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        answer(lambda: prepare(Path(folder)))

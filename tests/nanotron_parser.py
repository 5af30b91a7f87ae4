"""nanotron's own loader, process groups and model on one machine without devices.

Reads [[world size, environment, YAML], ...] from stdin and writes for each {"error": ...} or what nanotron made of it.
Packages that need a GPU to be imported stand in as modules whose every name exists; process groups are torch's own
fakes, and the model is built on the meta device, for the first rank.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any


class Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Anything(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inside = {"__init__": lambda *words, **named: None, "__class_getitem__": classmethod(lambda cls, key: cls)}
        return Names(name, (), inside) if name[0].isupper() else Anything(name)

    def __call__(self, *words: Any, **named: Any) -> Any:
        return words[0] if words and callable(words[0]) else lambda function: function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    missing = ("triton", "flash_attn", "flash_attn_2_cuda", "grouped_gemm", "functorch", "ring_flash_attn")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Anything(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def made_of(world: int, text: str) -> dict[str, Any]:
    """What nanotron makes of a configuration for `world` devices."""
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
        blocks = [(name, one.rank) for name, one in model.named_modules() if isinstance(one, PipelineBlock)]
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


def main() -> None:
    sys.path.insert(0, str(Path(os.environ["NANOTRON_DIR"]) / "src"))
    import torch.utils.flop_counter  # noqa: F401  (uses triton where it seems to be there)
    from torch.utils import _triton

    for probe in ("has_triton_package", "has_triton"):  # cached answers, before the stand-in exists
        getattr(_triton, probe, bool)()
    sys.meta_path.append(Finder())
    out, sys.stdout = sys.stdout, sys.stderr
    from nanotron import logging  # noqa: F401  (first: nanotron.config is part of a cycle)

    answers: list[dict[str, Any]] = []
    for world, environment, text in json.load(sys.stdin):
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update(environment)
        try:
            answers.append(made_of(world, text))
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"[:300]})
    json.dump(answers, out)


if __name__ == "__main__":
    main()

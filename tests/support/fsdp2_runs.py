"""What does the module that is exported for PyTorch FSDP2 do to a model?  A process of its own, as it imports torch.

Reads [{files: {name: text}, layers: N, rank: R}, ...] and writes what every plan made of a small model, in a process
group that talks to nobody.  Of {files: ...} alone it writes how far the gradients of one step are from those of one
process on each of two real ranks, which are forked so that torch is loaded once.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDTH = 8


def exported(files: dict[str, str], folder: Path) -> Any:
    for name, text in files.items():
        (folder / name).write_text(text)
    spec = importlib.util.spec_from_file_location("fsdp2_plan", folder / "fsdp2_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_model(layers: int) -> Any:
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.head(x).float()

    torch.manual_seed(7)
    return Model()


def applied(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plan = exported(case["files"], folder)
    settings = plan.load()
    world = settings["world_size"]
    torch.distributed.init_process_group("fake", rank=case["rank"], world_size=world, store=FakeStore())
    try:
        mesh = plan.make_mesh(settings, "cpu")
        own = plan.stages(settings, mesh) if settings["pipeline"] else [(0, 0, case["layers"])]
        _, first, last = own[0]
        model = small_model(last - first)
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan.apply(model, model.layers, settings, mesh, styles=styles)
        weight = dict(model.named_parameters())
        up = next((value for name, value in weight.items() if name.endswith("up.weight")), None)
        states = [
            module._get_fsdp_state()._fsdp_param_groups for module in model.modules() if hasattr(module, "reshard")
        ]
        kind = schedule_of(settings)
        return {
            "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
            "cp": plan.cp_mesh(settings, "cpu").mesh.tolist() if settings["mesh"]["cp"] > 1 else [case["rank"]],
            "stages": own,
            "placements": [str(placement) for placement in up.placements] if up is not None else [],
            "local": list(up.to_local().shape) if up is not None else [],
            "checkpointed": sum("CheckpointWrapper" in type(module).__name__ for module in model.modules()),
            "sharded": len(states),
            "schedule": kind,
        }
    finally:
        torch.distributed.destroy_process_group()


def schedule_of(settings: dict[str, Any]) -> str | None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(settings["pipeline"]["schedule"]).__name__ if settings["pipeline"] else None


def train(rank: int, world: int, files: dict[str, str], folder: Path) -> dict[str, Any]:
    """The gradient of every parameter after one step on this rank's half of the data, and alone on all of it."""
    import torch

    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=world, store=torch.distributed.FileStore(str(folder / "store"), world)
    )
    here = folder / str(rank)
    here.mkdir()
    plan = exported(files, here)
    settings = plan.load()
    settings["fully_shard"] |= {"param_dtype": "float32", "reduce_dtype": "float32"}
    data = torch.randn(world, WIDTH, generator=torch.Generator().manual_seed(1))
    whole = small_model(2)
    whole(data).mean().backward()
    model = small_model(2)
    plan.apply(model, model.layers, settings, plan.make_mesh(settings, "cpu"))
    model(data[rank : rank + 1]).mean().backward()
    found = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.full_tensor()
        for name, parameter in model.named_parameters()
    }
    worst = max(float((found[name] - parameter.grad).abs().max()) for name, parameter in whole.named_parameters())
    torch.distributed.destroy_process_group()
    return {"worst": worst, "parameters": len(found)}


def main() -> None:
    cases = json.load(sys.stdin)
    answer = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if isinstance(cases, dict):
            exported(cases["files"], folder)
            with multiprocessing.get_context("fork").Pool(2) as ranks:
                answer = ranks.starmap(train, [(rank, 2, cases["files"], folder) for rank in range(2)], chunksize=1)
        else:
            for at, case in enumerate(cases):
                here = folder / str(at)
                here.mkdir()
                try:
                    answer.append(applied(case, here))
                except Exception as error:
                    answer.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()

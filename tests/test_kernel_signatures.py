"""Do calls of libraries that run on GPUs alone fit the signatures in their checkouts?  Nothing of them is run."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from autoplan.profiler.operations.adapted_kernels import ADAPTERS, RECIPES, quantised

ENGINE = "transformer_engine.pytorch"


def signature(folder: str, path: str, *names: str) -> Callable[..., None]:
    """Return a function that takes what the named class or function of a file takes, and does nothing."""
    place = os.environ.get(folder)
    if not place:
        pytest.skip(f"{folder} names no checkout")
    body: Any = ast.parse((Path(place) / path).read_text()).body
    for name in names:
        node = next(node for node in body if getattr(node, "name", "") == name)
        body = node.body
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    made: dict[str, Any] = {}
    exec(f"def made({ast.unparse(arguments)}): pass", made)
    result: Callable[..., None] = made["made"]
    return result


def engine(path: str, *names: str) -> Callable[..., None]:
    return signature("TRANSFORMER_ENGINE_DIR", f"transformer_engine/{path}", *names)


class Group:
    def size(self) -> int:
        return 2


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand for Transformer Engine, with the signatures of its checkout."""
    module, router, recipes = (ModuleType(name) for name in (ENGINE, f"{ENGINE}.router", "recipe"))
    for name in ("initialize_ub", "destroy_ub"):
        setattr(module, name, engine("pytorch/module/base.py", name))
    topk = engine("pytorch/router.py", "fused_topk_with_score_function")
    router.fused_topk_with_score_function = lambda *given: (topk(*given), (given[0], given[0] > 0))[1]  # type: ignore[attr-defined]
    back = engine("pytorch/permutation.py", "moe_unpermute")
    module.moe_unpermute = lambda rows, ids, **words: (back(rows, ids, **words), rows)[1]  # type: ignore[attr-defined]
    source = ast.parse(
        Path(os.environ["TRANSFORMER_ENGINE_DIR"], "transformer_engine/common/recipe/__init__.py").read_text()
    )
    for node in source.body:
        if isinstance(node, ast.ClassDef):
            setattr(recipes, node.name, SimpleNamespace)
            names = [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]  # type: ignore[union-attr]
            assert node.name != "DelayedScaling" or "reduce_amax" in names
    for name, stand_in in (
        (ENGINE, module),
        (f"{ENGINE}.router", router),
        ("transformer_engine.common.recipe", recipes),
    ):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return module


def test_modules_of_transformer_engine(library: ModuleType) -> None:
    linear = engine("pytorch/module/layernorm_linear.py", "LayerNormLinear", "__init__")
    mlp = engine("pytorch/module/layernorm_mlp.py", "LayerNormMLP", "__init__")
    ADAPTERS[f"{ENGINE}:LayerNormLinear"](linear)(None, 8, 16, bias=False)
    made = ADAPTERS[f"{ENGINE}:LayerNormMLP"](lambda *sizes, **words: mlp(None, *sizes, **words))
    made(hidden_size=8, ffn_size=16)
    userbuffers = ADAPTERS[f"{ENGINE}.module:LayerNormMLP"](lambda *sizes, **words: mlp(None, *sizes, **words))
    for tokens in (64, 128):
        userbuffers(tokens=tokens, hidden_size=8, ffn_size=16, group=Group())


def test_routing_of_transformer_engine(library: ModuleType) -> None:
    there = engine("pytorch/permutation.py", "moe_permute_with_probs")

    def permute(*given: Any) -> tuple[torch.Tensor, None, None]:
        there(*given)
        return given[0], None, None

    permute.__module__ = f"{ENGINE}.permutation"
    routing = ADAPTERS[f"{ENGINE}:moe_permute_with_probs"](permute)(hidden_size=8, num_experts=4, experts_per_token=2)
    assert routing(torch.randn(16, 8)).shape == (16, 8)


def test_recipes_and_modules_in_8_bits(library: ModuleType) -> None:
    narrow, forward = engine("pytorch/quantization.py", "autocast", "__init__"), []
    for path, name in (("linear", "Linear"), ("layernorm_mlp", "LayerNormMLP"), ("grouped_linear", "GroupedLinear")):
        forward.append(engine(f"pytorch/module/{path}.py", name, "forward"))

    class Context:
        def __init__(self, **words: Any) -> None:
            narrow(self, **words)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    class Module(nn.Module):
        def forward(self, x: torch.Tensor, *others: Any, **words: Any) -> torch.Tensor:
            taken = forward[2:] if others else forward[:2]
            for check in taken:
                check(self, x, *others, **words)
            return x

    Module.__module__ = f"{ENGINE}.module.linear"
    library.autocast = Context  # type: ignore[attr-defined]
    for dtype in RECIPES:
        module = quantised(Module(), dtype)
        assert module(torch.ones(2)).shape == module(torch.ones(2), [1, 1]).shape
    assert quantised(Module(), "bf16").__class__ is Module


def test_dispatch_and_combine_of_deepep() -> None:
    calls = {
        name: signature("DEEP_EP_DIR", "deep_ep/buffers/legacy.py", "Buffer", name)
        for name in (
            "__init__",
            "get_dispatch_layout",
            "dispatch",
            "combine",
            "get_dispatch_config",
            "get_combine_config",
        )
    }

    class Config:
        def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
            return hidden_bytes

        get_rdma_buffer_size_hint = get_nvl_buffer_size_hint

    class Buffer:
        def __init__(self, *given: Any) -> None:
            calls["__init__"](self, *given)

        @staticmethod
        def get_dispatch_config(num_ranks: int) -> Config:
            calls["get_dispatch_config"](num_ranks)
            return Config()

        get_combine_config = get_dispatch_config

        def get_dispatch_layout(self, *given: Any) -> tuple[None, ...]:
            calls["get_dispatch_layout"](self, *given)
            return (None,) * 5

        def dispatch(self, x: torch.Tensor, **words: Any) -> tuple[Any, ...]:
            calls["dispatch"](self, x, **words)
            assert words["topk_idx"].dtype == torch.int64
            assert words["topk_weights"].dtype == torch.float32
            return x, None, None, [], (), None

        def combine(self, *given: Any, **words: Any) -> tuple[Any, ...]:
            calls["combine"](self, *given, **words)
            return given[0], None, None

    exchange = ADAPTERS["deep_ep:Buffer"](Buffer)(hidden_size=8, num_experts=4, experts_per_token=2, group=Group())
    assert exchange(torch.randn(16, 8)).shape == (16, 8)

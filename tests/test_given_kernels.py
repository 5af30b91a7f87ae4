"""Are kernels that a user names timed in place of torch's, kept under their names and used by prices?"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from autoplan.api.problem import load_framework
from autoplan.api.profiling import ProfileOptions, _named_kernels, profile
from autoplan.base.errors import InputError
from autoplan.base.processes import CrewError
from autoplan.profiler.operations.adapted_kernels import ADAPTERS, RECIPES, Layer, quantised
from autoplan.profiler.operations.given_kernels import GivenKernel, check_runs, given_kernels
from autoplan.profiler.operations.inputs import InputFactory, StagedRun
from autoplan.profiler.operations.kernels import _experts
from autoplan.profiler.operations.torch_modules import Routing
from autoplan.profiler.shipped_kernels import SHIPPED
from autoplan.profiler.store import Choice, open_store
from autoplan.spec.operations import Operation

CPU = torch.device("cpu")
MEGATRON = load_framework("megatron-core")
# A product, an attention and an optimizer that count what they are asked for.
MINE = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F

CALLS = []

class Linear(torch.nn.Linear):
    def forward(self, x):
        CALLS.append(("product", tuple(x.shape), self.weight.requires_grad, x.requires_grad))
        return super().forward(x)

class Grouped(torch.nn.Module):
    def __init__(self, experts, inputs, outputs, bias):
        super().__init__()
        assert not bias
        self.weights = torch.nn.ParameterList(torch.randn(outputs, inputs) / inputs**0.5 for _ in range(experts))

    def forward(self, x, rows):
        CALLS.append(("grouped", tuple(x.shape), tuple(rows), len(self.weights)))
        return torch.cat([part @ weight.T for part, weight in zip(x.split(rows), self.weights, strict=True)])

class Norm(torch.nn.RMSNorm):
    pass

def attention(q, k, v, *, causal):
    assert causal
    CALLS.append(("attention", tuple(q.shape), tuple(k.shape)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2), "statistics"

def windowed(q, k, v, *, causal, window_size=(-1, -1)):
    CALLS.append(("windowed", tuple(q.shape), tuple(v.shape), window_size))
    return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)

class Core(torch.nn.Module):
    # called like Transformer Engine's attention
    def __init__(self, num_heads, widths, *, num_gqa_groups, qkv_format, attn_mask_type):
        super().__init__()
        assert (qkv_format, attn_mask_type) == ("bshd", "causal")
        CALLS.append(("made", num_heads, widths, num_gqa_groups))

    def forward(self, q, k, v, *, window_size):
        CALLS.append(("core", window_size))
        return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).flatten(2)

class Whole(torch.nn.Module):
    # made and called like torchtitan's experts
    @dataclass(kw_only=True)
    class Config:
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))

    def forward(self, x, counts):
        CALLS.append(("whole", tuple(x.shape), counts.tolist(), tuple(self.weights.shape)))
        parts = zip(x.split(counts.tolist()), self.weights, strict=True)
        return torch.cat([part @ weight @ weight.T for part, weight in parts])

def broken(q, k, v, *, causal):
    raise RuntimeError("only on Mars")

word = "no function"
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    (tmp_path / "torch.py").write_text(MINE)
    return path


def calls_of(call: Any) -> list[tuple[Any, ...]]:
    """Return the calls that the file of a function or module notes."""
    calls: list[tuple[Any, ...]] = getattr(call, "forward", call).__globals__["CALLS"]
    return calls


def run_of(mine: Path, name: str, operation: Operation, *shape: int) -> tuple[object, list[tuple[object, ...]]]:
    """Build and run the operation of a shape once; return the result and the calls of `mine.py`."""
    family: Operation = "gemm" if operation in ("dgrad", "wgrad") else operation.removesuffix("_backward")  # type: ignore[assignment]
    kernel = given_kernels({family: f"{mine}:{name}"})[operation]
    run = kernel.build(operation, shape, InputFactory(device=CPU, dtype="fp32", kernel=kernel.name))
    calls = calls_of(kernel.call)
    calls.clear()
    return run(), list(calls)


def test_a_product_is_timed_forward_and_by_either_gradient(mine: Path) -> None:
    output, calls = run_of(mine, "Linear", "gemm", 6, 4, 8)
    assert isinstance(output, torch.Tensor)
    assert output.shape == (6, 4)
    assert calls == [("product", (6, 8), True, True)]
    assert run_of(mine, "Linear", "dgrad", 6, 4, 8)[1] == [("product", (6, 8), False, True)]
    assert run_of(mine, "Linear", "wgrad", 6, 4, 8)[1] == [("product", (6, 8), True, False)]


def test_a_gradient_by_the_weight_is_added_to_a_buffer_and_only_the_backward_pass_is_timed(mine: Path) -> None:
    kernel = given_kernels({"gemm": f"{mine}:Linear"})["wgrad"]
    run = kernel.build("wgrad", (6, 4, 8), InputFactory(device=CPU, dtype="fp32", kernel=kernel.name))
    assert isinstance(run, StagedRun)
    graph, output = run.prepare()
    run.run((graph, output))
    once = graph.total.clone()
    run.run((graph, graph.forward()))
    assert once.abs().sum() > 0
    torch.testing.assert_close(graph.total, 2 * once)


def test_attention_sees_tokens_before_heads_and_its_first_result_counts(mine: Path) -> None:
    output, calls = run_of(mine, "attention", "attention", 2, 16, 4, 2, 8, 0)
    assert isinstance(output, torch.Tensor)
    assert output.shape == (2, 16, 4, 8)
    assert calls == [("attention", (2, 16, 4, 8), (2, 16, 2, 8))]
    assert run_of(mine, "attention", "attention_backward", 2, 16, 4, 2, 8, 0)[1] == calls


def test_experts_are_two_grouped_products_of_the_rows_that_torch_has(mine: Path) -> None:
    shape = (256, 32, 64, 2, 8, 2, 4)  # 2 of 8 experts here, half as wide, of 64 rows each
    expected = [("grouped", (128, 32), (64, 64), 2), ("grouped", (128, 32), (64, 64), 2)]
    output, calls = run_of(mine, "Grouped", "experts", *shape)
    assert isinstance(output, torch.Tensor)
    assert output.shape == (128, 32)
    assert calls == expected
    torch_inputs = _experts(InputFactory(device=CPU, dtype="fp32", kernel="mm each"), *shape)[1]
    assert torch_inputs[0].shape == output.shape
    kernel = given_kernels({"experts": f"{mine}:Grouped"})["experts_backward"]
    run = kernel.build("experts_backward", shape, InputFactory(device=CPU, dtype="fp32", kernel=kernel.name))
    assert isinstance(run, StagedRun)
    graph, output = run.prepare()
    assert [tuple(wanted.shape) for wanted in graph.wanted] == [(128, 32), *2 * [(64, 32)], *2 * [(32, 32)]]
    run.run((graph, output))


def test_attention_within_a_window_and_with_narrow_values(mine: Path) -> None:
    assert run_of(mine, "windowed", "attention", 1, 16, 4, 2, 8, 4)[1] == [
        ("windowed", (1, 16, 4, 8), (1, 16, 2, 8), (3, 0))  # a token and the three before it
    ]
    output, calls = run_of(mine, "windowed", "latent_attention", 1, 16, 4, 12, 8)
    assert calls == [("windowed", (1, 16, 4, 12), (1, 16, 4, 8), (-1, -1))]
    assert isinstance(output, torch.Tensor)
    assert output.shape == (1, 16, 4, 8)
    kernels = given_kernels({"attention": f"{mine}:windowed", "latent_attention": f"{mine}:attention"})
    assert [kernels[operation].takes_windows for operation in ("attention", "latent_attention")] == [True, False]


def test_kernels_of_another_form_are_made_alike(mine: Path) -> None:
    """In the forms of Transformer Engine's attention and of torchtitan's experts."""
    core, whole = (given_kernels({"attention": f"{mine}:{name}"})["attention"].call for name in ("Core", "Whole"))
    calls = calls_of(core)
    attend = ADAPTERS["transformer_engine.pytorch:DotProductAttention"](core)
    factory = InputFactory(device=CPU, dtype="fp32")
    for operation, shape in (("attention", (1, 16, 4, 2, 8, 4)), ("latent_attention", (1, 16, 4, 12, 8))):
        output = GivenKernel(name="core", call=attend).build(operation, shape, factory)()  # type: ignore[arg-type]
        assert isinstance(output, torch.Tensor)
        assert output.shape == (1, 16, 4, 8)
    assert {call for call in calls if call[0] == "made"} == {("made", 4, 8, 2), ("made", 4, (12, 8), 4)}
    assert {call for call in calls if call[0] == "core"} == {("core", (3, 0)), ("core", None)}
    experts = GivenKernel(name="whole", call=ADAPTERS["torchtitan.models.common.moe:GroupedExperts"](whole))
    calls = calls_of(whole)
    # 2 of 8 experts here, half as wide, of 64 rows each
    run = experts.build("experts_backward", (256, 32, 64, 2, 8, 2, 4), factory)
    assert isinstance(run, StagedRun)
    run()
    assert set(map(str, calls)) == {str(("whole", (128, 32), [64, 64], (2, 32, 32)))}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # in torch's own imports
def test_kernels_are_compiled_where_asked(mine: Path) -> None:
    kernels = given_kernels({"norm": f"{mine}:Norm:compiled", "attention": f"{mine}:attention"})
    assert kernels["norm"].name.endswith(" compiled")
    assert not kernels["attention"].is_compiled
    with torch.compiler.set_stance("force_eager"):  # what it makes takes half a minute
        check_runs({"norm": kernels["norm"], "norm_backward": kernels["norm_backward"]}, "fp32", CPU)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(InputError, match="recompile"):
        check_runs({"norm": kernels["norm"]}, "fp32", CPU)


def test_a_library_names_all_its_kernels() -> None:
    named = _named_kernels(
        ["transformer-engine", "attention=flash-attn-3:compiled", "norm=torch.nn:RMSNorm:compiled"], MEGATRON
    )
    assert named == {
        **SHIPPED["transformer-engine"],
        "attention": "flash_attn_interface:flash_attn_func:compiled",
        "norm": "torch.nn:RMSNorm:compiled",
    }
    assert _named_kernels(["flash-attn:compiled"], MEGATRON) == {"attention": "flash_attn:flash_attn_func:compiled"}
    with pytest.raises(InputError, match="or a library: transformer-engine, torch, megatron-core"):
        _named_kernels(["gemm=flash-attn"], MEGATRON)
    assert "layer" not in _named_kernels(["torchtitan"], MEGATRON)
    assert "layer" in _named_kernels(["torchtitan"], load_framework("torchtitan"))
    with pytest.raises(InputError, match="no plan for megatron-core runs it"):
        _named_kernels(["layer=torchtitan"], MEGATRON)
    for library, names in SHIPPED.items():
        if library in ("torchtitan", "apex", "torch", "megatron-core"):
            continue
        for operation, name in names.items():
            with pytest.raises(InputError, match=r"cannot be imported here: No module named"):
                given_kernels({operation: name})


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # in torch's own imports
def test_torchtitan_itself() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torchtitan")
    kernels = given_kernels(SHIPPED["torchtitan"])
    assert {*kernels} == {"attention", "attention_backward", "experts", "experts_backward"}
    check_runs(kernels, "bf16", CPU)
    with pytest.raises(InputError, match="does not run experts in fp8 here: its library quantises it in another way"):
        check_runs({"experts": kernels["experts"]}, "fp8", CPU)


def test_a_changed_file_is_another_kernel_and_a_library_says_its_version(mine: Path) -> None:
    before = given_kernels({"norm": f"{mine}:Norm"})["norm"].name
    assert before.startswith("mine.py:Norm ")
    mine.write_text(MINE + "\n")
    assert given_kernels({"norm": f"{mine}:Norm"})["norm_backward"].name != before
    assert (
        given_kernels({"optimizer": "torch.optim:AdamW"})["optimizer"].name == f"torch.optim:AdamW {torch.__version__}"
    )


@pytest.mark.parametrize(
    ("operation", "name", "said"),
    [
        ("attention", "flash_attn_4711:flash_attn_func", "cannot be imported here: No module named 'flash_attn_4711'"),
        ("attention", "{mine}:lost", "has no attribute 'lost'"),
        ("attention", "{mine}:word", "is no function or class"),
        ("attention", "{mine}:broken", "does not run attention in fp32 here: only on Mars"),
        ("gemm", "builtins:dict", "does not run gemm in fp32 here"),
        ("norm", "builtins:int", "does not run norm in fp32 here"),
    ],
)
def test_what_is_not_here_or_does_not_run_is_said(mine: Path, operation: Operation, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_runs(given_kernels({operation: name.format(mine=mine)}), "fp32", CPU)


def test_a_file_shadows_no_module(mine: Path) -> None:
    given_kernels({"norm": f"{mine.with_name('torch.py')}:Norm"})
    assert sys.modules["torch"] is torch


def test_only_modules_that_quantise_run_in_types_with_scales(mine: Path) -> None:
    linear = given_kernels({"gemm": f"{mine}:Linear", "linear": f"{mine}:Linear"})["linear"]
    assert [linear.runs(name, "fp8") for name in ("gemm", "linear", "experts", "norm_linear")] == [False, *3 * [True]]
    assert [linear.runs(name, "bf16") for name in ("gemm", "linear", "mlp")] == [True, False, True]
    check_runs({"linear": linear, "linear_backward": linear}, "fp8_delayed", CPU)


def test_layers_of_transformer_engine_run_whole_under_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recipes = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common.recipe")
    entered: list[dict[str, Any]] = []

    @contextmanager
    def autocast(**words: Any) -> Iterator[None]:
        entered.append(words)
        yield
        entered.pop()

    for name in RECIPES.values():
        setattr(recipes, name, lambda name=name, **words: (name, words))
    engine.autocast = autocast  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    monkeypatch.setitem(sys.modules, recipes.__name__, recipes)
    seen: list[dict[str, Any]] = []

    def call(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.extend(entered)
        return x

    layer, x = Layer(torch.nn.Identity(), call, runs_narrow=True), torch.ones(2)
    assert quantised(layer, "bf16") is layer
    for dtype in ("fp8", "fp8_delayed"):
        quantised(layer, dtype)(x)
    # Scales that wait for other ranks would let a rank that measures longer wait for ever.
    recipes_seen = [("Float8CurrentScaling", {}), ("DelayedScaling", {"reduce_amax": False})]
    assert seen == [{"enabled": True, "recipe": recipe} for recipe in recipes_seen]
    with pytest.raises(InputError, match="quantises it in another way: name it with --dtypes bf16"):
        quantised(Layer(torch.nn.Identity(), call), "fp8")


LAYER = (2, 16, 32, 48, 4, 2, 8, 1)


def ran(kernel: GivenKernel, operation: Operation, shape: tuple[int, ...], dtype: str = "fp32") -> torch.Tensor:
    """Run both passes once; return the output."""
    factory = InputFactory(device=CPU, dtype=dtype, kernel=kernel.name)
    backward = kernel.build(f"{operation}_backward", shape, factory)  # type: ignore[arg-type]
    assert isinstance(backward, StagedRun)
    graph, output = backward.prepare()
    backward.run((graph, output))
    assert not output.isnan().any()
    assert isinstance(output, torch.Tensor)
    return output


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # in torch's own imports
def test_a_layer_of_torchtitan_itself() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torchtitan")
    kernel = given_kernels({"layer": SHIPPED["torchtitan"]["layer"]}, "torchtitan: ")["layer_backward"]
    assert kernel.name.startswith("torchtitan: torchtitan.models.llama3.model:Llama3TransformerBlock 0.")
    assert ran(kernel, "layer", LAYER, "bf16").shape == (2, 16, 32)
    with pytest.raises(InputError, match="on one device"):
        ran(kernel, "layer", (*LAYER[:-1], 2))
    with pytest.raises(InputError, match="quantises it in another way"):
        ran(kernel, "layer", LAYER, "fp8")


@pytest.mark.filterwarnings("ignore")  # of Megatron-Core, which misses Apex and Transformer Engine
def test_a_layer_of_megatron_core_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own modules on a CPU, for which it is told that the CPU is the device."""
    if not (place := os.environ.get("MEGATRON_LM_DIR")):
        pytest.skip("MEGATRON_LM_DIR names no checkout")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        kernels = given_kernels(SHIPPED["megatron-core"], "megatron-core: ")
        assert ran(kernels["layer"], "layer", LAYER).shape == (2, 16, 32)
        assert ran(kernels["moe_layer"], "moe_layer", (*LAYER, 4, 2)).shape == (2, 16, 32)
    finally:
        dist.destroy_process_group()


def test_routing_brings_back_what_experts_return() -> None:
    kernel = given_kernels({"routing": SHIPPED["torch"]["routing"]})["routing"]
    assert ran(kernel, "routing", (16, 8, 4, 2)).shape == (16, 8)
    whole = Routing(hidden_size=8, num_experts=4, experts_per_token=4)
    x = torch.randn(16, 8)
    torch.testing.assert_close(whole(x), x)  # by all experts, whose scores add up to 1


def test_a_profile_keeps_them_under_their_names(tmp_path: Path, mine: Path) -> None:
    db = str(tmp_path / "timings.db")
    model = tmp_path / "model.toml"
    model.write_text('name = "m"\nnum_layers = 1\nhidden_size = 32\nffn_size = 64\nnum_heads = 2\nvocab_size = 64\n')
    options = ProfileOptions(
        db=db, seq_len=16, tp="1", micro_batches="1", only="gemm,attention,norm", allowance="0.1s", ranks=1,
        kernels=(f"gemm={mine}:Linear", f"attention={mine}:attention"),
    )  # fmt: skip
    progress = profile(model, options=options)
    assert progress is not None
    with open_store(db) as store:
        kernels = {record.operation: record.kernel for record in store.records(Choice())}
    assert kernels["gemm"].startswith("mine.py:Linear ")
    assert kernels["attention"].startswith("mine.py:attention ")
    assert kernels["norm"] == "torch"
    assert all(math.isfinite(item) for record in progress.outcomes.values() for item in record.samples_s)
    with pytest.raises(CrewError, match="cannot be imported here"):
        profile(model, options=ProfileOptions(db=db, ranks=1, kernels=("norm=nowhere_4711:Norm",)))
    for text in ("rope=mine:Rope", "gemm=Linear", "gemm=mine:", "gemm"):
        with pytest.raises(InputError, match=r"write OPERATION=MODULE:NAME or OPERATION=FILE\.py:NAME"):
            profile(model, options=ProfileOptions(db=db, kernels=(text,)))

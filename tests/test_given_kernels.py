"""Are kernels that a user names timed in place of torch's, kept under their names and used by prices?"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from autoplan.api.profiling import ProfileOptions, profile
from autoplan.base.errors import InputError
from autoplan.base.processes import CrewError
from autoplan.profiler.operations.given_kernels import check_runs, given_kernels
from autoplan.profiler.operations.inputs import InputFactory, StagedRun
from autoplan.profiler.operations.kernels import _experts
from autoplan.profiler.store import Choice, open_store
from autoplan.spec.operations import Operation

CPU = torch.device("cpu")
# A product, an attention and an optimizer that count what they are asked for.
MINE = """
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


def run_of(mine: Path, name: str, operation: Operation, *shape: int) -> tuple[object, list[tuple[object, ...]]]:
    """Build and run the operation of a shape once; return the result and the calls of `mine.py`."""
    family: Operation = "gemm" if operation in ("dgrad", "wgrad") else operation.removesuffix("_backward")  # type: ignore[assignment]
    kernel = given_kernels({family: f"{mine}:{name}"})[operation]
    run = kernel.build(operation, shape, InputFactory(device=CPU, dtype="fp32", kernel=kernel.name))
    calls = kernel.call.__globals__["CALLS"] if name == "attention" else kernel.call.forward.__globals__["CALLS"]
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


def test_types_with_scales_are_refused(mine: Path) -> None:
    with pytest.raises(InputError, match="timed in bf16, fp16, fp32"):
        check_runs(given_kernels({"gemm": f"{mine}:Linear"}), "fp8", CPU)


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

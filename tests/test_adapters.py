"""Kernels of adapters and of quantised weights, against bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoplan.cost.kernels.adapters import DEQUANTISE_SHARE, UNPACK_SHARE, tuning_traffic
from autoplan.cost.kernels.block_shapes import layer_shapes
from autoplan.cost.kernels.memory_bound import Traffic
from autoplan.frameworks.presets import load_framework
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Block
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec
from problems import problem_for

TOKENS, HIDDEN = 512, 4096


def _traffic(finetuning: FineTuning, choices: dict[str, object] | None = None, **traits: object) -> dict[str, Traffic]:
    model = load_model("llama2-7b")
    problem = problem_for(
        model,
        "a100-sxm:1x1",
        load_framework("transformers").changed(**traits),
        training=TrainingSpec(seq_len=TOKENS, finetuning=finetuning),
    )
    batch = PlanBatch.of([ParallelPlan(global_batch=1, **(choices or {}))], model.num_layers)
    return tuning_traffic(problem, batch, layer_shapes(model, finetuning)[Block.ATTENTION])


@pytest.mark.parametrize(
    ("choices", "forward", "backward"),
    [({"main_weights": "bf16"}, 0 + 10, 6 + 4), ({}, 12 + 10, 18 + 4), ({"wide_adapters": True}, 8 + 26, 16 + 24)],
)
def test_an_adapter_moves_more_the_more_of_it_is_fp32(choices: dict[str, object], forward: int, backward: int) -> None:
    moved = _traffic(FineTuning(rank=16, targets=("o_proj",)), choices)["adapters"]
    np.testing.assert_allclose(moved.forward_bytes, forward * TOKENS * HIDDEN)
    np.testing.assert_allclose(moved.backward_bytes, backward * TOKENS * HIDDEN)


def test_dropout_reads_writes_and_keeps_a_mask() -> None:
    tuning = FineTuning(rank=16, targets=("o_proj",))
    wide: dict[str, object] = {"wide_adapters": True}
    plain = _traffic(tuning, wide)["adapters"]
    dropped = _traffic(replace(tuning, dropout=0.1), wide)["adapters"]
    np.testing.assert_allclose(dropped.forward_bytes - plain.forward_bytes, (4 + 4 + 1) * TOKENS * HIDDEN)


def test_torch_unpacks_integers_of_four_bits_in_the_forward_pass_alone() -> None:
    tuning = FineTuning(rank=16, targets=("o_proj",), quantization="int4")
    weights = 4 * HIDDEN**2
    by_torch, by_triton = _traffic(tuning)["dequantise"], _traffic(tuning, fuses_unpacking=True)["dequantise"]
    np.testing.assert_allclose(by_torch.forward_bytes, 16.5 / UNPACK_SHARE * weights)
    np.testing.assert_allclose(by_torch.backward_bytes, 0.0)
    np.testing.assert_allclose(by_triton.forward_bytes, (0.5 + 2.5 / 128 + 2) / DEQUANTISE_SHARE * weights)
    np.testing.assert_allclose(by_triton.backward_bytes, by_triton.forward_bytes)

"""Optimizers: bytes of their states against torch's own, and what their steps take."""

from __future__ import annotations

from typing import Any

import pytest

import autoplan
from autoplan.base.errors import InputError, NoPlanError
from autoplan.cost.collectives.end_of_step import end_of_step
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.orthogonalise import orthogonalise_s
from autoplan.cost.kernels.products import gemm_rate
from autoplan.cost.parameters import stage_parameters
from autoplan.cost.pipeline.layout import stage_blocks
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.spec.model import ModelSpec
from autoplan.spec.optimizers import OPTIMIZERS, TRAITS
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec

torch = pytest.importorskip("torch")
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode

MODEL = ModelSpec(name="small", num_layers=2, hidden_size=512, vocab_size=1024, num_heads=8, ffn_size=1536)
PLAN = ParallelPlan(global_batch=8, dp_shard=8)
WEIGHTS = 4 * 512**2 + 3 * 512 * 1536  # the matrices of a layer


def _problem(optimizer: str, framework: str = "megatron-core") -> Problem:
    return Problem(
        model=MODEL,
        training=TrainingSpec(seq_len=512, optimizer=optimizer),  # type: ignore[arg-type]
        cluster=load_cluster("h100-sxm:1x8"),
        framework=load_framework(framework),
    )


def _state_bytes(optimizer: str, framework: str = "megatron-core") -> float:
    costs = estimate(_problem(optimizer, framework), PlanBatch.of([PLAN], MODEL.num_layers))
    return float(costs.memory_terms_bytes["optimizer"][0])


TORCH: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}


@pytest.mark.parametrize("name", TORCH)
def test_states_of_a_matrix_are_those_that_torch_keeps(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(512, 512))
    optimizer = TORCH[name]([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = sum(
        value.numel() * value.element_size()
        for value in optimizer.state[weight].values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    kind = TRAITS[name]  # type: ignore[index]
    assert kind.moment_bytes * weight.numel() + kind.factored_bytes * 2 * 512 == kept


def test_states_of_a_model_follow_from_the_optimizer() -> None:
    # Main weights of 4 bytes and the moments, over 8 ranks; with Muon the ends have Adam's.
    ends = 2 * 1024 * 512 + 512
    parameters = 2 * (WEIGHTS + 2 * 512) + ends
    per_parameter = {
        "adam": 12.0,
        "adam8bit": 6.03125,
        "adam8bit-bnb": 6.03125,
        "adam4bit": 5.0625,
        "lion": 8.0,
        "sgd": 8.0,
    }
    for name, expected in per_parameter.items():
        assert _state_bytes(name) == pytest.approx(expected * parameters / 8), name
    assert _state_bytes("muon") == pytest.approx((8.0 * parameters + 4.0 * ends) / 8)
    assert _state_bytes("adafactor") == pytest.approx((4.0 + 8 / 512) * parameters / 8)


def test_no_optimizer_keeps_more_than_adam_and_none_less_than_nothing() -> None:
    for framework in ("megatron-core", "torch", "deepspeed-zero", "transformers"):
        states = {name: _state_bytes(name, framework) for name in OPTIMIZERS}
        assert max(states.values()) == states["adam"], framework
        assert min(states.values()) >= 0.0, framework


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_operations_of_newton_schulz_are_those_of_torch(shape: tuple[int, int]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    with FlopCounterMode(display=False) as counter:
        _zeropower_via_newtonschulz(torch.randn(shape), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    short, long = min(shape), max(shape)
    assert counter.get_total_flops() == 5 * (4 * short**2 * long + 2 * short**3)


def test_time_of_muon_is_that_of_its_products() -> None:
    problem, batch = _problem("muon"), PlanBatch.of([PLAN], MODEL.num_layers)
    square, gate_up, down = (5 * (4 * 512**2 * wide + 2 * 512**3) for wide in (512, 3072, 1536))
    qkv = 5 * (4 * 512**2 * 1536 + 2 * 512**3)
    operations = 2 * (qkv + square + gate_up + down)
    parameters = 2 * WEIGHTS + 2 * 1024 * 512
    own = parameters / 8
    found = orthogonalise_s(problem, batch, own + 0.0 * batch.tp)
    assert found == pytest.approx(operations / 8 / gemm_rate(problem, batch))
    adam = _problem("adam")
    assert not orthogonalise_s(adam, batch, own + 0.0 * batch.tp).any()


def test_ranks_that_share_momenta_of_muon_put_matrices_together() -> None:
    batch = PlanBatch.of([PLAN], MODEL.num_layers)
    sent = {}
    for name in ("adam", "muon"):
        problem = _problem(name)
        parameters = stage_parameters(problem, batch, stage_blocks(MODEL, batch, 1))
        sent[name] = end_of_step(problem, batch, parameters)
    more = sent["muon"].gather.buffer_bytes - sent["adam"].gather.buffer_bytes
    assert more == pytest.approx(0.25 * (4 + 2) * 2 * (WEIGHTS + 2 * 512))
    assert (sent["muon"].reduce.buffer_bytes == sent["adam"].reduce.buffer_bytes).all()


def test_choices_that_are_adams_are_refused_with_others() -> None:
    with pytest.raises(NoPlanError, match="offload optimizer needs Adam, the optimizer is lion"):
        _estimated("lion", {"offload": "optimizer"})
    with pytest.raises(NoPlanError, match="muon with zero3 is not priced: use zero1"):
        _estimated("muon", {"sharding": "zero3"}, framework="torch")
    with pytest.raises(InputError, match="--optimizer 'adamw9'"):
        _estimated("adamw9", {})


def _estimated(optimizer: str, plan: dict[str, Any], framework: str = "megatron-core") -> autoplan.PlanResult:
    return autoplan.estimate(
        "llama3-8b", cluster="h100-sxm:1x8", global_batch=64, seq_len=2048, plan=plan, framework=framework,
        optimizer=optimizer,
    )  # fmt: skip


def test_exports_name_the_optimizer_or_refuse_it() -> None:
    found = _estimated("adam8bit", {"sharding": "zero3", "recompute": "full"}, "transformers")
    assert "--optim adamw_torch_8bit" in autoplan.export(found, to="accelerate").texts["launch.sh"]
    lion = _estimated("lion", {"tp": 8})
    with pytest.raises(
        InputError, match=r"Megatron-LM cannot express Lion \(it takes adam\): use --to accelerate or axolotl"
    ):
        autoplan.export(lion, to="megatron-lm")
    muon = _estimated("muon", {"tp": 8})
    with pytest.raises(InputError, match=r"Megatron-LM cannot express Muon .*: use --to axolotl or llama-factory"):
        autoplan.export(muon, to="megatron-lm")


def test_a_model_fits_with_adafactor_where_adam_does_not() -> None:
    question = {"cluster": "h100-sxm:1x1", "global_batch": 8, "seq_len": 2048, "framework": "torch"}
    with pytest.raises(NoPlanError):
        autoplan.search("llama-7b", **question, forbid=["offload"])
    found = autoplan.search("llama-7b", **question, forbid=["offload"], optimizer="adafactor")
    assert found.file.best.verdict == "fits"

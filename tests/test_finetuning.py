"""Fine-tuning: parameters of adapters, memory and work that follow from what is frozen, and where it is read from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from saved_bytes import saved_sizes  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import autoplan  # noqa: E402
from autoplan.api.estimate import check_oracle  # noqa: E402
from autoplan.api.export import measurement  # noqa: E402
from autoplan.api.problem import make_problem  # noqa: E402
from autoplan.base.errors import InputError, NoPlanError  # noqa: E402
from autoplan.cost.collectives.sharded_states import sharded_states  # noqa: E402
from autoplan.cost.collectives.tensor_parallel import adapter_collectives, block_collectives  # noqa: E402
from autoplan.cost.estimate import estimate, stage_costs  # noqa: E402
from autoplan.cost.kernels.arithmetic import (  # noqa: E402
    count_parameters,
    count_trained_parameters,
    model_flops_per_token,
)
from autoplan.cost.kernels.block_shapes import block_shapes  # noqa: E402
from autoplan.cost.memory.recompute import activation_parts, kept_bytes  # noqa: E402
from autoplan.cost.parameters import unit_parameters  # noqa: E402
from autoplan.cost.state_types import reduced_grad_bytes  # noqa: E402
from autoplan.frameworks.presets import load_framework  # noqa: E402
from autoplan.readers.cluster import load_cluster  # noqa: E402
from autoplan.readers.finetuning import combined, load_finetuning  # noqa: E402
from autoplan.readers.huggingface import read_huggingface  # noqa: E402
from autoplan.readers.model import load_model  # noqa: E402
from autoplan.report.answer import answer_lines  # noqa: E402
from autoplan.spec.blocks import Block, Experts  # noqa: E402
from autoplan.spec.finetuning import FineTuning  # noqa: E402
from autoplan.spec.model import ModelSpec  # noqa: E402
from autoplan.spec.plan import ParallelPlan, PlanBatch  # noqa: E402
from autoplan.spec.problem import Problem  # noqa: E402
from autoplan.spec.training import TrainingSpec  # noqa: E402
from autoplan.trainer.transformer import Layer  # noqa: E402
from model_specs import QWEN_VL  # noqa: E402

SMALL = ModelSpec(name="small", num_layers=4, hidden_size=256, vocab_size=2048, num_heads=8, ffn_size=704)
ALL = FineTuning(rank=16, targets=("all-linear",))


def _problem(
    model: ModelSpec,
    finetuning: FineTuning | None,
    framework: str = "torch",
    cluster: str = "h100-sxm:1x1",
    **more: object,
) -> Problem:
    training = TrainingSpec(seq_len=512, finetuning=finetuning)
    return Problem(
        model=model,
        training=replace(training, **more),  # type: ignore[arg-type]
        cluster=load_cluster(cluster),
        framework=load_framework(framework),
    )


# -- parameters and operations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank", "targets", "published"),
    [
        # Lightning-AI/litgpt 4839345, tutorials/resource-tables.md: queries and values with rank 8.
        ("llama2-7b", 8, ("q_proj", "v_proj"), 4_194_304),
        ("llama2-13b", 8, ("q_proj", "v_proj"), 6_553_600),
        # The QLoRA recipes of Unsloth and TRL print it for Llama-3-8B, every linear layer, rank 16.
        ("llama3-8b", 16, ("all-linear",), 41_943_040),
        # One matrix of queries, keys and values, as Megatron's: 16 x (h + 3 h) and 16 x 2 h a layer.
        ("llama2-7b", 16, ("linear_qkv", "linear_proj"), 32 * 16 * 6 * 4096),
    ],
)
def test_adapters_have_published_numbers_of_parameters(
    name: str, rank: int, targets: tuple[str, ...], published: int
) -> None:
    assert count_trained_parameters(load_model(name), FineTuning(rank=rank, targets=targets)) == published


def test_magnitudes_are_one_for_each_output() -> None:
    plain, dora = (FineTuning(rank=8, targets=("o_proj",), dora=dora) for dora in (False, True))
    more = count_trained_parameters(SMALL, dora) - count_trained_parameters(SMALL, plain)
    assert more == SMALL.num_layers * SMALL.hidden_size


def test_saved_modules_are_trained_beside_adapters() -> None:
    saved = replace(ALL, saved_modules=("embed_tokens", "lm_head"))
    more = count_trained_parameters(SMALL, saved) - count_trained_parameters(SMALL, ALL)
    assert more == 2 * SMALL.vocab_size * SMALL.hidden_size


def test_full_finetuning_trains_what_is_not_frozen() -> None:
    model = SMALL
    frozen = FineTuning(frozen=("embed_tokens",))
    assert count_trained_parameters(model, FineTuning()) == count_parameters(model)
    assert count_trained_parameters(model, frozen) == count_parameters(model) - model.vocab_size * model.hidden_size


def test_frozen_weights_cost_two_thirds_of_the_operations() -> None:
    seq_len, rank_one = 512, FineTuning(rank=1, targets=("q_proj",))
    full, frozen = model_flops_per_token(SMALL, seq_len), model_flops_per_token(SMALL, seq_len, rank_one)
    attention = 3 * SMALL.num_layers * 2 * (seq_len / 2) * 2 * SMALL.hidden_size
    adapter = 3 * 2 * SMALL.num_layers * 2 * SMALL.hidden_size
    assert frozen == pytest.approx((full - attention) * 2 / 3 + attention + adapter)


def test_targets_that_a_model_lacks_are_refused() -> None:
    plain = replace(SMALL, gated_mlp=False)
    with pytest.raises(InputError, match=r"no module gate_proj: its linear layers are .*c_fc"):
        block_shapes(plain, FineTuning(rank=8, targets=("gate_proj",)))
    with pytest.raises(InputError, match="no module 'q_prj'"):
        FineTuning(rank=8, targets=("q_prj",))


def test_weights_in_four_bits_need_adapters() -> None:
    with pytest.raises(InputError, match="cannot be trained: give the LoRA rank"):
        FineTuning(quantization="nf4")
    with pytest.raises(InputError, match="give --lora-rank too"):
        combined(None, quantize="nf4")


# -- memory -----------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it, as PEFT computes it."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.into = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.out = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.out(self.into(self.dropout(x))) * 2.0
        return result


MODULES = {
    "q_proj": ("attention", "q"),
    "k_proj": ("attention", "k"),
    "v_proj": ("attention", "v"),
    "o_proj": ("attention", "out"),
    "gate_proj": ("mlp", "gate"),
    "up_proj": ("mlp", "up"),
    "down_proj": ("mlp", "down"),
}


def _torch_bytes(model: ModelSpec, finetuning: FineTuning, dtype: torch.dtype, seq_len: int) -> int:
    """Bytes that a layer of plain torch keeps for its backward pass, of two sequences."""
    layer = Layer(model, model.layers[0]).to(dtype)
    layer.requires_grad_(requires_grad=False)
    targets = MODULES if finetuning.targets == ("all-linear",) else finetuning.targets
    for name in targets:
        block, part = MODULES[name]
        holder = getattr(layer, block)
        setattr(holder, part, Adapted(getattr(holder, part), finetuning.rank or 0, finetuning.dropout))
    x = torch.randn(2, seq_len, model.hidden_size, dtype=dtype, requires_grad=True)
    angles = torch.randn(seq_len, model.qk_head_dim), torch.randn(seq_len, model.qk_head_dim)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *angles)}
    with saved_sizes(known) as sizes:
        layer(x, angles).float().sum()
    casts = 2 * seq_len * model.qk_head_dim * dtype.itemsize if dtype != torch.float32 else 0
    return sum(sizes.values()) - 2 * casts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "finetuning",
    [
        ALL,
        FineTuning(rank=8),
        FineTuning(rank=64, targets=("down_proj",)),
        FineTuning(rank=8, targets=("o_proj", "up_proj")),
        FineTuning(rank=16, targets=("all-linear",), dropout=0.1),
    ],
    ids=str,
)
def test_bytes_kept_by_a_layer_are_those_of_torch(finetuning: FineTuning, precision: str) -> None:
    problem = _problem(SMALL, finetuning, cluster="cpu:1x1", precision=precision)
    plan = ParallelPlan(global_batch=2, micro_batch=2, precision=precision)  # type: ignore[arg-type]
    batch = PlanBatch.of([plan], SMALL.num_layers)
    shapes = block_shapes(SMALL, finetuning)
    parts = (activation_parts(problem, batch, block, shapes[block]) for block in SMALL.layers[0])
    predicted = sum(float(kept_bytes(problem, batch, part)[0]) for part in parts)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert predicted == pytest.approx(_torch_bytes(SMALL, finetuning, dtype, 512), rel=0.05)


def test_gathers_are_of_all_weights_and_reductions_of_adapters() -> None:
    problem = _problem(SMALL, replace(ALL, quantization="nf4"), cluster="h100-sxm:1x8")
    plan = ParallelPlan(global_batch=8, dp_shard=8, sharding="zero3")  # type: ignore[arg-type]
    batch = PlanBatch.of([plan], SMALL.num_layers)
    shape = block_shapes(SMALL, problem.training.finetuning)[Block.MLP]
    unit = sharded_states(problem, batch, unit_parameters(problem, batch, shape))
    weights, adapters = 3 * 256 * 704, 3 * 16 * (256 + 704)
    assert unit.gather.buffer_bytes == pytest.approx(0.5625 * weights + 2 * (256 + adapters))
    assert unit.reduce.buffer_bytes == pytest.approx(reduced_grad_bytes(problem, batch)[0] * adapters)


def test_tensor_parallel_ranks_send_what_adapters_need_and_gather_inputs_once() -> None:
    tuned = FineTuning(rank=16, targets=("linear_qkv", "linear_proj"))
    frozen, plain = (_problem(SMALL, finetuning, "megatron-core", "h100-sxm:1x4") for finetuning in (tuned, None))
    batch = PlanBatch.of([ParallelPlan(global_batch=4, tp=4, sp=True)], SMALL.num_layers)
    shape = block_shapes(SMALL, tuned)[Block.ATTENTION]
    gather, scatter, reduce = adapter_collectives(frozen, batch, shape)
    # One of the two adapters is gathered forward and the other scattered; without sequence parallelism both are sums.
    assert gather.buffer_bytes == pytest.approx(2 * 512 * 16)
    assert (gather.forward, gather.backward, scatter.forward, scatter.backward) == (1.0, 1.0, 1.0, 1.0)
    assert not reduce.forward.any()
    assert block_collectives(plain, batch).gather.backward == 2.0
    assert block_collectives(frozen, batch).gather.backward == 1.0


def test_a_frozen_model_in_four_bits_takes_two_thirds_of_a_gigabyte() -> None:
    """S26, AlphaTuning: 1.3 billion weights in 4 bits, .1 % trained: .67 GB instead of 20.8 GB, and no ZeRO."""
    model = ModelSpec(
        name="1.3b", num_layers=26, hidden_size=2048, vocab_size=64, num_heads=32, ffn_size=8192, gated_mlp=False
    )
    tuned = FineTuning(rank=6, targets=("q_proj", "v_proj"), quantization="nf4-dq")
    adapters = count_trained_parameters(model, tuned)
    assert count_parameters(model) == pytest.approx(1.3e9, rel=0.01)
    assert adapters / count_parameters(model) == pytest.approx(0.001, rel=0.05)
    memory = {}
    for tuning in (tuned, None):
        problem = _problem(model, tuning, "deepspeed-zero")
        costs = estimate(problem, PlanBatch.of([ParallelPlan(global_batch=1, sharding="none", grad_dtype="bf16")], 26))  # type: ignore[arg-type]
        memory[tuning] = sum(float(costs.memory_terms_bytes[name][0]) for name in ("weights", "gradients", "optimizer"))
    assert memory[tuned] == pytest.approx(0.67e9, rel=0.05)  # of which .02 GB are scales
    assert memory[None] == pytest.approx(20.8e9, rel=0.01)
    plans = [
        autoplan.search(
            model, cluster="a100-sxm-40:1x8", global_batch=64, seq_len=2048, finetune=tuning, framework=name
        )
        for tuning, name in ((tuned, "transformers"), (None, "transformers"))
    ]
    assert [found.file.best.plan.sharding for found in plans] == ["none", "zero2"]


def test_frozen_weights_make_sharding_needless() -> None:
    """Where the states of a model fit a device with room to spare, no rank waits for gathers."""
    found = autoplan.search(
        "llama3-8b", cluster="h100-sxm:1x8", global_batch=64, seq_len=2048, framework="torch",
        lora_rank=16, lora_targets="all-linear", quantize="nf4",
    )  # fmt: skip
    assert found.file.best.plan.sharding != "zero3"
    assert found.file.best.plan.tp == found.file.best.plan.pp == 1


@pytest.mark.parametrize("framework", ["torch", "deepspeed-zero", "megatron-core", "torchtitan"])
def test_less_is_held_the_less_is_trained(framework: str) -> None:
    model = load_model("llama3-8b")
    tunings = (None, ALL, replace(ALL, quantization="int8"), replace(ALL, quantization="nf4"))
    plan = ParallelPlan(global_batch=8, sharding="zero1", dp_shard=8, recompute="full")  # type: ignore[arg-type]
    stages = [stage_costs(_problem(model, tuning, framework, "h100-sxm:1x8"), plan)[0] for tuning in tunings]
    memory = [stage.memory_bytes for stage in stages]
    assert memory == sorted(memory, reverse=True)
    assert stages[1].memory_terms_bytes["optimizer"] < 0.02 * stages[0].memory_terms_bytes["optimizer"]


def test_frozen_experts_have_adapters_of_their_own() -> None:
    moe = replace(
        SMALL, ffn_size=0, moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=128), name="small-moe"
    )
    tuned = FineTuning(rank=4, targets=("gate_proj", "down_proj"))
    assert count_trained_parameters(moe, tuned) == 4 * 8 * 2 * 4 * (256 + 128)
    batch = PlanBatch.of([ParallelPlan(global_batch=8, dp_shard=8, ep=4)], 4)
    unit = unit_parameters(_problem(moe, tuned), batch, block_shapes(moe, tuned)[Block.MOE])
    assert unit.trained_expert == pytest.approx(8 / 4 * 2 * 4 * (256 + 128))
    assert unit.trained_dense == pytest.approx(0)


# -- time -------------------------------------------------------------------------------------------------------------


def test_adapters_spare_weight_gradients_and_quantisation_costs_time() -> None:
    model = load_model("llama3-8b")
    steps = []
    for tuning in (None, FineTuning(rank=8), FineTuning(rank=8, quantization="nf4")):
        costs = estimate(
            _problem(model, tuning, seq_len=4096),
            PlanBatch.of([ParallelPlan(global_batch=4, recompute="full")], 32),  # type: ignore[arg-type]
        )
        assert np.isfinite(costs.step_s).all()
        steps.append({name: float(value[0]) for name, value in costs.terms_s.items()})
    full, lora, qlora = steps
    assert lora["gemm"] < 0.72 * full["gemm"]
    assert lora["head"] < full["head"]
    assert qlora["memory_bound"] > lora["memory_bound"]
    assert qlora["gemm"] == lora["gemm"]


def test_attention_to_packed_documents_takes_as_much_less() -> None:
    model, steps = load_model("llama3-8b"), {}
    batch = PlanBatch.of([ParallelPlan(global_batch=4, recompute="full")], 32)  # type: ignore[arg-type]
    for length in (None, 8192, 1024):
        problem = _problem(model, FineTuning(), seq_len=8192, document_len=length)
        steps[length] = {name: float(value[0]) for name, value in estimate(problem, batch).terms_s.items()}
    assert steps[None] == steps[8192]
    assert steps[1024]["attention"] < steps[None]["attention"] / 4
    assert steps[1024]["gemm"] == steps[None]["gemm"]
    packed, whole = (model_flops_per_token(model, length) for length in (1024, 8192))
    assert whole - packed == 3 * 32 * 2 * (8192 - 1024) / 2 * 32 * 2 * 128
    with pytest.raises(InputError, match="document_len must"):
        TrainingSpec(seq_len=512, document_len=1024)


# -- where it is read from --------------------------------------------------------------------------------------------


def test_methods_are_read_with_their_settings() -> None:
    assert load_finetuning("lora") == FineTuning(rank=8)
    assert load_finetuning("lora:r=16,targets=q_proj+k_proj,dropout=.1") == FineTuning(
        rank=16, targets=("q_proj", "k_proj"), dropout=0.1
    )
    assert load_finetuning("qlora:r=64") == FineTuning(rank=64, targets=("all-linear",), quantization="nf4-dq")
    assert load_finetuning("full:freeze=embed_tokens") == FineTuning(frozen=("embed_tokens",))
    assert combined("lora:r=16", quantize="int8") == FineTuning(rank=16, quantization="int8")
    for text, says in (
        ("lora:r", "write NAME=VALUE"),
        ("lora:alpha=3", "settings are r, targets"),
        ("lora:r=0", "rank"),
        ("lora:r=8,r=16", "--finetune lora:r is given twice"),
        ("full:r=8", "full:r needs adapters, and full has none"),
        ("full:freeze=lm_head,quantize=nf4", "full:quantize needs adapters"),
        ("prefix", "write lora, dora, qlora or full"),
        ("a" * 5000, "write lora, dora, qlora or full"),
    ):
        with pytest.raises(InputError, match=says):
            load_finetuning(text)
    with pytest.raises(InputError, match="--finetune trains all weights, --lora-rank adapters"):
        combined("full", lora_rank=8)
    assert combined("lora:r=16", lora_rank=16) == FineTuning(rank=16)
    with pytest.raises(InputError, match="--finetune says rank 16, --lora-rank 8: leave one of them out"):
        combined("lora:r=16", lora_rank=8)


@pytest.mark.parametrize(
    ("line", "optimizer"),
    [("optim: adamw_bnb_8bit", "adam8bit-bnb"), ("optimizer: adafactor", "adafactor"), ("seed: 1", "adam")],
)
def test_the_optimizer_of_a_yaml_is_priced_unless_another_is_said(tmp_path: Path, line: str, optimizer: str) -> None:
    (tmp_path / "x.yaml").write_text(f"model_name_or_path: x\nuse_peft: true\n{line}\n")
    about = {"cluster": "h100-sxm:1x8", "seq_len": 2048, "finetune": tmp_path / "x.yaml", "framework": "transformers"}
    assert make_problem("llama3-8b", **about).training.optimizer == optimizer  # type: ignore[arg-type]
    assert make_problem("llama3-8b", optimizer="sgd", **about).training.optimizer == "sgd"  # type: ignore[arg-type]
    (tmp_path / "x.yaml").write_text("model_name_or_path: x\noptim: galore_adamw\n")
    with pytest.raises(InputError, match="optim 'galore_adamw' is not priced: say one that is with --optimizer"):
        make_problem("llama3-8b", **about)  # type: ignore[arg-type]


def test_adapter_config_of_peft_is_read(tmp_path: Path) -> None:
    table = {
        "peft_type": "LORA",
        "r": 32,
        "lora_alpha": 64,
        "lora_dropout": 0.05,
        "target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"],
        "modules_to_save": ["lm_head"],
        "use_dora": True,
        "bias": "none",
        "layers_to_transform": None,
    }
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(table))
    expected = FineTuning(rank=32, targets=("q_proj", "v_proj"), dropout=0.05, dora=True, saved_modules=("lm_head",))
    assert load_finetuning(str(path)) == load_finetuning(str(tmp_path)) == expected
    for key, value, says in (
        ("peft_type", "IA3", "peft_type 'IA3' is not priced"),
        ("target_modules", ".*_proj", "a pattern"),
        ("rank_pattern", {"q_proj": 4}, "rank_pattern .* is not priced"),
        ("r", "many", "rank"),
    ):
        path.write_text(json.dumps(table | {key: value}))
        with pytest.raises(InputError, match=says):
            load_finetuning(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "base_model: m\nadapter: qlora\nlora_r: 32\nlora_target_linear: true\nlora_dropout: 0.05\n",
            FineTuning(rank=32, targets=("all-linear",), dropout=0.05, quantization="nf4-dq"),
        ),
        (
            "base_model: m\nadapter: lora\nload_in_8bit: true\nlora_target_modules: [q_proj, v_proj]\n",
            FineTuning(rank=8, quantization="int8"),
        ),
        ("base_model: m\nsequence_len: 2048\n", FineTuning()),
        (
            "stage: sft\nfinetuning_type: lora\nlora_target: all\nquantization_bit: 4\n",
            FineTuning(rank=8, targets=("all-linear",), quantization="nf4-dq"),
        ),
        ("stage: sft\nfinetuning_type: full\n", FineTuning()),
        (
            "model_name_or_path: m\nuse_peft: true\nload_in_4bit: true\nlora_target_modules: [o_proj]\n",
            FineTuning(rank=16, targets=("o_proj",), dropout=0.05, quantization="nf4"),
        ),
    ],
)
def test_files_of_trainers_are_read(tmp_path: Path, text: str, expected: FineTuning) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert load_finetuning(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\n", "neither of axolotl"),
        ("- 1\n", "must hold a table"),
        ("a: [\n", "not valid YAML"),
        ("stage: ppo\nfinetuning_type: lora\n", "stage 'ppo' is not priced"),
        ("base_model: m\nadapter: relora\n", "adapter 'relora' is not priced"),
        ("base_model: m\nadapter: qlora\nload_in_8bit: true\n", "load_in_8bit together with 4-bit weights"),
    ],
)
def test_what_is_not_priced_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        load_finetuning(str(path))


# -- what starts it ---------------------------------------------------------------------------------------------------


def _planned(**options: Any) -> autoplan.PlanResult:
    plan = {"sharding": "zero3", "recompute": "full"}
    return autoplan.estimate("llama3-8b", cluster="h100-sxm:1x8", global_batch=64, seq_len=2048, plan=plan, **options)


@pytest.mark.parametrize(("framework", "target"), [("transformers", "accelerate"), ("deepspeed-zero", "deepspeed")])
def test_adapters_are_exported_as_peft_reads_them(framework: str, target: str, tmp_path: Path) -> None:
    tuned = FineTuning(
        rank=16,
        targets=("q_proj", "down_proj"),
        dropout=0.1,
        dora=True,
        quantization="nf4-dq",
        saved_modules=("lm_head",),
    )
    texts = autoplan.export(_planned(framework=framework, finetune=tuned), to=target).texts
    path = tmp_path / "adapter_config.json"
    path.write_text(texts["adapter_config.json"])
    assert replace(load_finetuning(str(path)), quantization="nf4-dq") == tuned
    quantized = json.loads(texts["quantization_config.json"])
    assert quantized["load_in_4bit"]
    assert quantized["bnb_4bit_use_double_quant"]
    transformers = pytest.importorskip("transformers")
    assert transformers.BitsAndBytesConfig.from_dict(quantized).bnb_4bit_compute_dtype == torch.bfloat16


def test_megatron_bridge_has_adapters_of_both_kinds() -> None:
    fused = FineTuning(rank=16, targets=("linear_qkv", "linear_proj"))
    for tuned, line in (
        (fused, "cfg.peft = LoRA(target_modules=['linear_qkv', 'linear_proj'], dim=16, alpha=32, dropout=0.0)"),
        (replace(fused, dora=True), "cfg.peft = DoRA(target_modules=['linear_qkv', 'linear_proj'], dim=16"),
        (FineTuning(rank=8), "cfg.peft = CanonicalLoRA(target_modules=['linear_q', 'linear_v'], dim=8"),
        (ALL, "cfg.peft = CanonicalLoRA(target_modules=['linear_q', 'linear_k', 'linear_v', 'linear_proj', "),
    ):
        recipe = autoplan.export(_planned(finetune=tuned, framework="nemo"), to="megatron-bridge").texts["recipe.py"]
        compile(recipe, "recipe.py", "exec")
        assert line in recipe
        assert "    finetune(process_config_with_overrides(" in recipe
        assert "pretrain" not in recipe.replace("_pretrain_common", "").replace("pretrained_checkpoint", "")


@pytest.mark.parametrize(
    ("framework", "target", "tuned", "says"),
    [
        (
            "megatron-core",
            "megatron-lm",
            ALL,
            "Megatron-LM cannot express LoRA of rank 16 on all-linear: use --to .*megatron-bridge",
        ),
        ("torchtitan", "torchtitan", replace(ALL, dora=True), "torchtitan cannot express DoRA"),
        ("torch", "autoplan", ALL, "the built-in trainer cannot express LoRA"),
        ("megatron-core", "megatron-bridge", replace(ALL, quantization="nf4"), "cannot express frozen weights in nf4"),
        ("transformers", "hf-trainer", FineTuning(frozen=("embed_tokens",)), "cannot express a frozen embed_tokens"),
        ("transformers", "accelerate", replace(ALL, targets=("q_proj", "all-linear")), "all-linear stands alone"),
    ],
)
def test_what_a_target_would_not_train_so_is_refused(framework: str, target: str, tuned: FineTuning, says: str) -> None:
    with pytest.raises(InputError, match=says):
        autoplan.export(_planned(framework=framework, finetune=tuned), to=target)


@pytest.mark.parametrize(("framework", "target"), [("transformers", "accelerate"), ("deepspeed-hf", "deepspeed")])
def test_programs_of_the_user_freeze_parts_of_their_models(framework: str, target: str) -> None:
    tuned = FineTuning(frozen=("vision_tower", "embed_tokens"))
    model = read_huggingface(QWEN_VL, "qwen2.5-vl-7b")
    found = autoplan.estimate(
        *(model,), cluster="h100-sxm:1x8", global_batch=8, seq_len=4096, framework=framework, finetune=tuned,
        plan={"sharding": "zero3"},
    )  # fmt: skip
    script = autoplan.export(found, to=target).texts["launch.sh"]
    assert "freezes encoder and embed_tokens (requires_grad_(False))" in script


def test_files_say_that_sequences_are_packed_from_documents() -> None:
    for length, says in ((512, True), (None, False)):
        found = autoplan.estimate(
            "llama3-8b", cluster="h100-sxm:1x8", global_batch=64, seq_len=2048, plan={"tp": 8}, document_len=length
        )
        assert (
            "packed from documents of 512 tokens" in autoplan.export(found, to="megatron-lm").texts["launch.sh"]
        ) is says


def test_full_finetuning_is_exported_as_training() -> None:
    plain = autoplan.estimate("llama3-8b", cluster="h100-sxm:1x8", global_batch=64, seq_len=2048, plan={"tp": 8})
    full = autoplan.estimate(
        "llama3-8b", cluster="h100-sxm:1x8", global_batch=64, seq_len=2048, plan={"tp": 8}, finetune="full"
    )
    assert full.file.best.step_s == plain.file.best.step_s
    assert dict(answer_lines(full.file))["trains"] == "full fine-tuning: 8,030,261,248 parameters, 100 %"
    assert autoplan.export(full, to="megatron-lm").texts.keys() == autoplan.export(plain, to="megatron-lm").texts.keys()


def test_the_built_in_trainer_refuses_what_it_would_not_train(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for options, says in (
        ({"lora_rank": 8}, "the built-in trainer trains all weights, not LoRA of rank 8"),
        ({"optimizer": "lion"}, "the built-in trainer has Adam, not lion"),
    ):
        found = autoplan.estimate(
            "qwen2.5-0.5b", cluster="h100-sxm:1x1", global_batch=2, seq_len=128, framework="torch", **options
        )
        found.save(path, force=True)
        assert measurement(found.file, path).endswith("plan.json --command -- PROGRAM")
        with pytest.raises(InputError, match=says):
            autoplan.run(path)
        with pytest.raises(InputError, match=says):
            check_oracle(found)
        with pytest.raises(InputError, match=says):
            autoplan.tune(path)


def test_adapters_are_planned_for_transformers_where_no_framework_is_named() -> None:
    given: dict[str, Any] = {"cluster": "rtx-4090:1x4", "global_batch": 16, "seq_len": 2048}
    tuned = autoplan.search("llama3-8b", lora_rank=16, quantize="nf4", **given)
    assert tuned.problem.framework.name == "transformers"
    assert (tuned.plan.pp, tuned.plan.tp) == (1, 1)
    assert "accelerate.yaml" in tuned.export("accelerate").texts
    assert autoplan.search("llama3-8b", fix={"pp": 1}, **given).problem.framework.name == "megatron-core"
    named = autoplan.search("llama3-8b", lora_rank=16, framework="nemo", **given)
    assert named.problem.framework.name == "nemo"


def test_tensor_parallelism_does_not_cut_quantised_weights() -> None:
    given: dict[str, Any] = {"cluster": "rtx-4090:1x4", "global_batch": 16, "seq_len": 2048, "lora_rank": 16}
    assert autoplan.search("llama3-8b", fix={"tp": 2}, **given).plan.tp == 2
    with pytest.raises(NoPlanError, match="tp 2 of quantised weights"):
        autoplan.search("llama3-8b", fix={"tp": 2}, quantize="nf4", **given)


@pytest.mark.parametrize(
    ("word", "optimizer"), [("adamw", "adam"), ("paged_adamw_8bit", "adam8bit-bnb"), ("muon", "muon")]
)
def test_optimizers_have_the_names_of_others_too(word: str, optimizer: str) -> None:
    problem = make_problem("llama3-8b", cluster="h100-sxm:1x8", seq_len=4096, optimizer=word)
    assert problem.training.optimizer == optimizer


def test_adapters_of_bert_are_named_as_in_its_layers() -> None:
    """Two matrices of rank 8 beside queries and values of 12 layers, as PEFT counts them: 12 * 2 * 8 * (768 + 768)."""
    table = {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    table |= {"intermediate_size": 3072, "vocab_size": 30522, "architectures": ["BertForMaskedLM"]}
    model = read_huggingface(table, "bert")
    assert count_trained_parameters(model, FineTuning(rank=8, targets=("query", "value"))) == 294_912
    assert count_trained_parameters(model, FineTuning(rank=8, targets=("key",))) == 147_456

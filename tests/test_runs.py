"""Reading tables of measured runs and predicting them."""

from __future__ import annotations

import csv
import io
import random
import re
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.cli.predict import predict as command
from autoplan.runs.predictions import COLUMNS, Prediction, predict, predict_all, prediction_table
from autoplan.runs.runs import Run, read_runs
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.training import OWN_ROUTING_LOSS

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "measured_runs.csv"
# What a prediction may never depend on.
ANSWERS = (
    "source",
    "locator",
    "notes",
    "status",
    "step_time_s",
    "step_time_origin",
    "tokens_per_s_per_gpu",
    "peak_memory_gib",
)

LLAMA = {
    "id": "mine-1",
    "framework": "NeMo/Megatron-Core",
    "year": "2025",
    "gpu": "h100-sxm",
    "gpu_memory_gib": "80",
    "gpus_per_node": "8",
    "num_gpus": "64",
    "model": "my llama",
    "num_layers": "80",
    "hidden_size": "8192",
    "num_heads": "64",
    "num_kv_heads": "8",
    "ffn_size": "28672",
    "gated_mlp": "1",
    "vocab_size": "128256",
    "seq_len": "8192",
    "global_batch": "128",
    "micro_batch": "1",
    "tp": "4",
    "cp": "2",
    "pp": "4",
    "vp": "5",
    "dp": "2",
    "sharding": "zero1",
    "recompute": "none",
}


def table(*rows: dict[str, str]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def runs_of(tmp_path: Path, *rows: dict[str, str]) -> list[Run]:
    path = tmp_path / "runs.csv"
    path.write_text(table(*rows), encoding="utf-8")
    return list(read_runs(path))


def test_a_run_becomes_the_problem_and_plan_that_the_row_describes(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, LLAMA)
    assert run.problem is not None
    assert run.plan is not None
    assert (run.problem.cluster.num_devices, run.problem.cluster.device.name) == (64, "h100-sxm")
    assert run.problem.framework.name == "nemo-25.04"
    plan = run.plan
    assert (plan.tp, plan.cp, plan.pp, plan.vp, plan.dp, plan.sp) == (4, 2, 4, 5, 2, True)
    assert (plan.schedule, plan.num_microbatches) == ("interleaved", 64)


def test_blanks_take_the_stated_defaults_and_the_note_says_so(tmp_path: Path) -> None:
    row = {**LLAMA, "micro_batch": "", "recompute": "?", "sharding": "?", "vocab_size": ""}
    (run,) = runs_of(tmp_path, row)
    note = predict(run).note
    assert run.plan is not None
    assert (run.plan.micro_batch, run.plan.recompute, run.plan.sharding) == (1, "none", "zero1")
    for default in ("micro_batch=1", "recompute=none", "sharding=zero1", "vocab_size=50257"):
        assert default in note


@pytest.mark.parametrize(
    ("framework", "year", "pp", "micro_batch"),
    [("torchtitan (FSDP2)", "2024", "8", 4), ("torchtitan (FSDP2)", "2025", "8", 1), ("torchtitan", "2024", "1", 1)],
)
def test_a_pipeline_of_the_first_torchtitan_has_a_micro_batch_per_rank(
    tmp_path: Path, framework: str, year: str, pp: str, micro_batch: int
) -> None:
    row = {**LLAMA, "framework": framework, "year": year, "tp": "8", "cp": "", "pp": pp, "vp": "", "num_gpus": "512"}
    row |= {"dp": "", "global_batch": "256", "micro_batch": "", "sharding": "zero3", "precision": "bf16"}
    (run,) = runs_of(tmp_path, row)
    assert run.plan is not None, run.refusal
    assert run.plan.micro_batch == micro_batch
    assert f"micro_batch={micro_batch}" in predict(run).note


@pytest.mark.parametrize(
    ("num_layers", "pp", "layers"),
    [
        ("61", "4", (*[4] * 15, 1)),  # recipes of DeepSeek-V3
        ("61", "8", (1, *[2] * 30, 0)),  # theirs on H100: "Et|(tt|)*30mL"
        ("62", "4", None),  # 64 with embedding and loss
        ("64", "4", None),
        ("45", "4", None),  # nothing would be left for the last chunk
        ("33", "8", None),  # nor for the one before it
    ],
)
def test_layers_that_do_not_divide_leave_the_last_chunk_with_the_rest(
    tmp_path: Path, num_layers: str, pp: str, layers: tuple[int, ...] | None
) -> None:
    (run,) = runs_of(tmp_path, LLAMA | {"num_layers": num_layers, "pp": pp, "vp": "4", "tp": "2", "cp": "", "dp": ""})
    assert run.plan is not None
    assert run.plan.layers_per_chunk == layers


@pytest.mark.parametrize(
    ("framework", "num_layers", "layers"),
    [
        ("AA-Scaling", "80", (20, 21, 20, 19)),  # 82 with embedding and head
        ("AA-Scaling", "82", (20, 21, 21, 20)),
        ("AA-Scaling", "4", None),  # the last stage would have the head alone
        ("Megatron-LM", "80", None),
    ],
)
def test_pipelines_of_aleph_alpha_take_embedding_and_head_for_layers(
    tmp_path: Path, framework: str, num_layers: str, layers: tuple[int, ...] | None
) -> None:
    changes = {"framework": framework, "year": "2022", "num_layers": num_layers, "vp": "", "cp": "", "dp": "4"}
    (run,) = runs_of(tmp_path, LLAMA | changes)
    assert run.plan is not None, run.refusal
    assert run.plan.layers_per_chunk == layers


@pytest.mark.parametrize(
    ("changes", "vp"),
    [
        ({}, 20),  # 80 layers over 4 stages
        ({"framework": "Megatron-Core r0.8.0", "year": "2024"}, 1),
        ({"global_batch": "12"}, 1),  # 6 micro-batches for 4 stages
        ({"num_layers": "81"}, 1),
        ({"vp": "1"}, 1),
    ],
)
def test_dense_recipes_of_nemo_interleave_chunks_of_one_layer(tmp_path: Path, changes: dict[str, str], vp: int) -> None:
    (run,) = runs_of(tmp_path, LLAMA | {"vp": ""} | changes)
    assert run.plan is not None, run.refusal
    assert run.plan.vp == vp


MIXTURE = LLAMA | {
    "framework": "Megatron-Bridge/Megatron-Core 26.04",
    "num_experts": "256",
    "experts_per_token": "8",
    "expert_ffn_size": "2048",
    "tp": "1",
    "cp": "1",
    "dp": "16",
}


@pytest.mark.parametrize(("num_layers", "ep"), [("80", 16), ("4", 1)])
def test_experts_that_no_device_holds_are_spread_over_a_stage(tmp_path: Path, num_layers: str, ep: int) -> None:
    """4 bytes of weights and gradients for 3 x 8,192 x 2,048 x 256 in 20 layers of a stage, or in one, of 79 GiB."""
    (run,) = runs_of(tmp_path, MIXTURE | {"num_layers": num_layers, "vp": "1"})
    assert run.plan is not None, run.refusal
    assert run.plan.ep == ep
    assert f"ep={ep}" in predict(run).note


@pytest.mark.parametrize(
    ("framework", "model", "drops"),
    [
        ("Megatron-Bridge/Megatron-Core 25.11", "mine (tokendrop)", True),
        ("Megatron-Bridge/Megatron-Core 25.09", "mine (dropless)", False),
        ("NeMo/Megatron-Core", "mine", True),
        ("Megatron-Bridge/Megatron-Core 25.11", "mine", False),
    ],
)
def test_tables_say_behind_a_model_whether_its_experts_drop_tokens(
    tmp_path: Path, framework: str, model: str, drops: bool
) -> None:
    (run,) = runs_of(tmp_path, MIXTURE | {"framework": framework, "model": model, "ep": "16"})
    assert run.plan is not None
    assert run.plan.token_dropping == drops


@pytest.mark.parametrize(
    ("changes", "overlaps"),
    [({}, True), ({"ep": "8"}, False), ({"vp": "1"}, False), ({"framework": "NeMo/Megatron-Core"}, False)],
)
def test_recipes_overlap_expert_traffic_between_nodes_in_interleaved_pipelines(
    tmp_path: Path, changes: dict[str, str], overlaps: bool
) -> None:
    (run,) = runs_of(tmp_path, MIXTURE | {"ep": "16"} | changes)
    assert run.plan is not None, run.refusal
    assert run.plan.ep_overlap == overlaps


def test_a_shared_expert_that_no_column_counts_is_that_of_the_model(tmp_path: Path) -> None:
    """As in tables of Llama 4, whose config has no number of them."""
    row = MIXTURE | {"model": "Llama4 Maverick 400B", "num_layers": "48", "hidden_size": "5120", "num_heads": "40"}
    row |= {"ffn_size": "16384", "num_experts": "128", "experts_per_token": "1", "expert_ffn_size": "8192", "ep": "16"}
    (run,) = runs_of(tmp_path, row | {"num_shared_experts": "0", "vp": "12"})
    assert run.problem is not None
    assert run.problem.model.moe is not None
    assert run.problem.model.moe.shared_expert_ffn_size == 8192


def test_a_model_without_a_gate_that_is_no_gpt_has_the_blocks_of_its_preset(tmp_path: Path) -> None:
    row = LLAMA | {
        "gated_mlp": "0",
        "num_layers": "32",
        "hidden_size": "6144",
        "num_heads": "48",
        "vocab_size": "256000",
    }
    nemotron, gpt = runs_of(tmp_path, row | {"model": "nemotron4_15b"}, row | {"id": "mine-2", "model": "my GPT"})
    assert nemotron.problem is not None
    assert gpt.problem is not None
    model = nemotron.problem.model
    assert (model.position_embedding, model.mlp_bias, model.squared_relu) == ("rope", False, True)
    assert not model.tied_embeddings
    assert (gpt.problem.model.position_embedding, gpt.problem.model.mlp_bias) == ("learned", True)


@pytest.mark.parametrize(
    ("framework", "gpu", "recompute"),
    [
        ("NeMo/Megatron-Core", "gb200", "selective"),
        ("NeMo/Megatron-Core", "h100-sxm", "none"),
        ("Megatron-Bridge/Megatron-Core 26.04", "gb200", "none"),
    ],
)
def test_latent_attention_on_blackwell_had_no_kernel_of_its_own_at_first(
    tmp_path: Path, framework: str, gpu: str, recompute: str
) -> None:
    row = MIXTURE | {"framework": framework, "gpu": gpu, "gpu_memory_gib": "", "gpus_per_node": "", "ep": "16"}
    row |= {"model": "DeepSeek-V3 671B", "mla": "1", "num_heads": "128", "recompute": "?", "vp": "1"}
    (run,) = runs_of(tmp_path, row)
    assert run.problem is not None
    assert run.plan is not None, run.refusal
    assert run.problem.stores_scores(run.plan.attention) == (recompute != "none")
    assert run.plan.recompute == recompute


def test_wide_heads_on_blackwell_had_flash_attention_where_values_are_as_wide(tmp_path: Path) -> None:
    """Nemotron-4 340B with heads of 192 took 32.66 s a step on 128 GB200 (dgxc-benchmarking v25.05.05, nemotron)."""
    row = {
        "framework": "NeMo/Megatron-Core",
        "gpu": "gb200",
        "gpu_memory_gib": "186",
        "gpus_per_node": "4",
        "num_gpus": "128",
        "model": "nemotron4-340b",
        "seq_len": "4096",
        "global_batch": "512",
        "tp": "8",
        "cp": "1",
        "vp": "12",
        "dp": "4",
    }
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "gated_mlp", "vocab_size")
    (run,) = runs_of(tmp_path, LLAMA | row | dict.fromkeys(sizes, ""))
    assert run.problem is not None, run.refusal
    assert run.plan is not None
    assert not run.problem.stores_scores(run.plan.attention)
    assert predict(run).step_time_s == pytest.approx(32.66, rel=0.05)


@pytest.mark.parametrize(
    ("framework", "name", "depths"),
    [
        ("Megatron-LM", "(w/ MTP)", 1),
        ("Megatron-LM", "", 0),
        ("Megatron-Bridge/Megatron-Core 26.04", "", 1),
        ("Megatron-Bridge/Megatron-Core 25.11", "(w/o MTP)", 0),
    ],
)
def test_a_table_says_behind_the_name_whether_a_model_predicts_several_tokens(
    tmp_path: Path, framework: str, name: str, depths: int
) -> None:
    """Or does not, where all recipes of a framework train its prediction layer."""
    row = MIXTURE | {"model": f"DeepSeekV3 {name}".strip(), "mla": "1", "num_heads": "128", "framework": framework}
    (run,) = runs_of(tmp_path, row)
    assert run.problem is not None, run.refusal
    assert run.problem.model.num_mtp_layers == depths


@pytest.mark.parametrize(
    ("framework", "recompute", "modules"),
    [
        ("Megatron-Bridge/Megatron-Core 26.04", "selective", ("mla_up_proj",)),
        ("Megatron-Bridge/Megatron-Core 26.04", "none", ("core_attn",)),
        ("Megatron-LM", "selective", ("core_attn",)),
    ],
)
def test_recipes_for_latent_attention_recompute_its_up_projections(
    tmp_path: Path, framework: str, recompute: str, modules: tuple[str, ...]
) -> None:
    row = MIXTURE | {"model": "DeepSeekV3", "mla": "1", "num_heads": "128", "framework": framework}
    (run,) = runs_of(tmp_path, row | {"recompute": recompute})
    assert run.plan is not None, run.refusal
    assert run.plan.recompute_modules == modules


@pytest.mark.parametrize(
    ("recompute", "verdict"), [("?", "risky"), ("selective", "risky"), ("none", "oom"), ("full", "fits")]
)
def test_a_run_of_which_it_is_not_told_what_it_recomputes_may_fit(tmp_path: Path, recompute: str, verdict: str) -> None:
    """16 sequences a micro-batch do not fit in 80 GB unless layers are recomputed."""
    row = LLAMA | {"num_layers": "16", "micro_batch": "16", "pp": "1", "vp": "", "dp": "8", "recompute": recompute}
    (run,) = runs_of(tmp_path, row)
    assert predict(run).verdict == verdict


def test_activations_of_layers_on_the_host_are_in_the_plan_of_a_run(tmp_path: Path) -> None:
    row = LLAMA | {"num_layers": "16", "micro_batch": "4", "pp": "1", "vp": "", "dp": "8", "recompute": "none"}
    offloads = (row | {"id": number, "options": f"activation_offload_layers={number}"} for number in ("8", "5"))
    plain, half, third = runs_of(tmp_path, row, *offloads)
    assert [run.plan and run.plan.offload_layers for run in (plain, half, third)] == ["none", "1/2", "1/4"]
    assert any("as 1/4 of the layers" in column for column in third.filled)
    assert not any("offload" in column for column in half.filled)
    assert predict(half).peak_memory_gib < predict(third).peak_memory_gib < predict(plain).peak_memory_gib


def test_what_a_recipe_chose_goes_before_what_recipes_usually_choose(tmp_path: Path) -> None:
    experts = {"num_experts": "128", "experts_per_token": "8", "expert_ffn_size": "1536", "ep": "8"}
    chosen = "dispatcher=deepep;ep_overlap=1;grad_reduce_overlap=0;recompute_modules=moe_act+layernorm;tp_overlap=0"
    row = LLAMA | experts | {"recompute": "selective", "options": chosen + ";token_dropping=0;expert_balance=forced"}
    (run,) = runs_of(tmp_path, row)
    assert run.problem is not None
    assert run.plan is not None
    assert (run.plan.dispatcher, run.plan.ep_overlap, run.plan.tp_overlap) == ("deepep", True, False)
    assert (run.plan.grad_reduce_overlap, run.plan.param_gather_overlap) == (False, True)
    assert run.plan.recompute_modules == ("layernorm", "moe_act")
    assert not run.plan.token_dropping
    assert run.problem.training.balancing_loss == 1.0
    (dropping,) = runs_of(tmp_path, row | {"options": "token_dropping=1;dispatcher=hybridep;recompute_modules=none"})
    assert dropping.problem is not None
    assert dropping.plan is not None
    assert dropping.plan.token_dropping
    assert (dropping.plan.dispatcher, dropping.plan.recompute) == ("alltoall", "none")


def test_a_row_says_whether_a_router_or_a_benchmark_chooses_experts(tmp_path: Path) -> None:
    experts = {"num_experts": "128", "experts_per_token": "8", "expert_ffn_size": "1536", "ep": "8", "tp": "1"}
    row = LLAMA | experts
    torch = row | {"framework": "torchtitan", "year": "2025"}
    rows = [row, row | {"options": "expert_balance=router"}, torch, torch | {"options": "expert_balance=forced"}]
    rows.append(torch | {"framework": "OLMo-core"})  # experts of its own on torchtitan's layers
    losses = [
        run.problem and run.problem.training.balancing_loss
        for run in runs_of(tmp_path, *(cells | {"id": f"mine-{at}"} for at, cells in enumerate(rows)))
    ]
    assert losses == [1.0, OWN_ROUTING_LOSS, OWN_ROUTING_LOSS, 1.0, 1.0]
    (odd,) = runs_of(tmp_path, row | {"options": "expert_balance=fair"})
    assert odd.refusal == "option expert_balance 'fair' is neither forced nor router"


def test_a_row_says_what_is_launched_as_cuda_graphs(tmp_path: Path) -> None:
    for said, graphs in (
        ("cuda_graph=attn+moe_router", "attn"),
        ("cuda_graph=layer", "layer"),
        ("cuda_graph=full_iteration", "full_iteration"),
        ("cuda_graph=none", "none"),
        ("tp_overlap=0", "none"),
    ):
        (run,) = runs_of(tmp_path, LLAMA | {"framework": "Megatron-Bridge 26.02", "options": said})
        assert run.plan
        assert run.plan.cuda_graphs == graphs
    (refused,) = runs_of(tmp_path, LLAMA | {"options": "cuda_graph=everything"})
    assert "option cuda_graph 'everything' is not one of attn, full_iteration" in refused.refusal


def test_a_row_of_torchtitan_that_captures_nothing_was_not_compiled(tmp_path: Path) -> None:
    row = LLAMA | {
        "framework": "torchtitan (FSDP2)",
        "year": "2024",
        "sharding": "zero3",
        "pp": "1",
        "vp": "",
        "dp": "8",
    }
    eager, default = runs_of(tmp_path, row | {"options": "cuda_graph=none"}, row | {"id": "2"})
    assert eager.problem is not None
    assert default.problem is not None
    assert eager.problem.framework.name == "torchtitan-eager"
    assert default.problem.framework.name == "torchtitan-0.1"


def test_scales_of_rows_are_told_apart_from_scales_of_tensors(tmp_path: Path) -> None:
    row = LLAMA | {
        "framework": "torchtitan (FSDP2)",
        "year": "2025",
        "sharding": "zero3",
        "pp": "1",
        "vp": "",
        "dp": "8",
        "precision": "fp8",
    }
    rows, tensors = runs_of(tmp_path, row | {"options": "fp8_recipe=rowwise"}, row | {"id": "2"})
    assert rows.plan is not None
    assert tensors.plan is not None
    assert (rows.plan.fp8_scaling, tensors.plan.fp8_scaling) == ("rowwise", "tensorwise")
    assert not any("fp8_recipe" in text for text in rows.filled)


def test_nemo_megatron_added_gradients_up_in_products_of_pipelines_alone(tmp_path: Path) -> None:
    """gradient_accumulation_fusion of NeMo 1.11 needs more than one pipeline stage."""
    row = LLAMA | {"framework": "NeMo Megatron 22.08", "year": "2022", "vp": "1"}
    piped, flat = runs_of(tmp_path, row, row | {"id": "2", "pp": "1", "dp": "8"})
    assert piped.plan, piped.refusal
    assert flat.plan, flat.refusal
    assert (piped.plan.gradient_accumulation_fusion, flat.plan.gradient_accumulation_fusion) == (True, False)


@pytest.mark.parametrize(
    ("framework", "sharding"), [("PyTorch FSDP", "zero2"), ("Mine on FSDP", "zero3"), ("Mine", "zero3")]
)
def test_fsdp_in_a_pipeline_is_that_of_torchs_pipelines(tmp_path: Path, framework: str, sharding: str) -> None:
    row = LLAMA | {"framework": framework, "sharding": sharding, "vp": "1"}
    piped, flat = runs_of(tmp_path, row, row | {"id": "2", "pp": "1", "dp": "8"})
    assert piped.problem
    assert flat.problem
    assert (piped.problem.framework.name, flat.problem.framework.name) == ("torchtitan-0.2", "pytorch-fsdp")


@pytest.mark.parametrize(
    ("attention", "option", "is_narrow"),
    [("flash", "1", True), ("", "1", True), ("flash", "0", False), ("flash2", "1", False)],
)
def test_a_row_says_that_attention_ran_in_8_bits(tmp_path: Path, attention: str, option: str, is_narrow: bool) -> None:
    row = LLAMA | {"precision": "fp8", "attention": attention, "options": f"fp8_attention={option}"}
    (run,) = runs_of(tmp_path, row)
    assert run.plan is not None
    assert run.plan.fp8_attention == is_narrow
    assert not any("fp8_attention" in column for column in run.filled)


def test_recipes_of_the_library_fuse_the_router_beside_a_fused_dispatcher_alone(tmp_path: Path) -> None:
    experts = {"num_experts": "8", "experts_per_token": "2", "expert_ffn_size": "1024", "ep": "8"}
    for framework, said, fuses, dispatcher in (
        ("Megatron-Bridge/Megatron-Core", "", False, "alltoall"),
        ("Megatron-Bridge/Megatron-Core", "dispatcher=hybridep", True, "hybridep"),
        ("Megatron-Bridge/Megatron-Core 26.04", "", True, "hybridep"),
    ):
        (run,) = runs_of(tmp_path, LLAMA | experts | {"framework": framework, "year": "2026", "options": said})
        assert run.problem
        assert run.plan
        assert (run.plan.router_fusion, run.plan.dispatcher) == (fuses, dispatcher)


def test_a_layout_of_the_pipeline_says_the_layers_of_every_chunk(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, LLAMA | {"options": "pp_layout=Et*3|(t*4|)*18t*5L"})
    assert run.plan is not None
    assert run.plan.layers_per_chunk == (3, *[4] * 18, 5)
    (refused,) = runs_of(tmp_path, LLAMA | {"options": "tp_overlap=yes"})
    assert refused.refusal == "option tp_overlap is neither 0 nor 1: 'yes'"


def test_a_blank_architecture_is_looked_up_by_the_model_name(tmp_path: Path) -> None:
    row = {**LLAMA, "model": "Llama 3.1 70B", "num_layers": "", "hidden_size": "", "num_heads": "", "ffn_size": ""}
    (run,) = runs_of(tmp_path, row)
    assert run.problem is not None
    assert run.problem.model.name == "llama3.1-70b"
    assert "architecture of preset llama3.1-70b" in predict(run).note


@pytest.mark.parametrize(("year", "seq_len"), [("2021", 2048), ("2026", 4096)])
def test_a_row_without_a_sequence_length_has_that_of_most_runs_of_its_time(
    tmp_path: Path, year: str, seq_len: int
) -> None:
    (run,) = runs_of(tmp_path, {**LLAMA, "year": year, "seq_len": ""})
    assert run.problem is not None
    assert run.problem.training.seq_len == seq_len
    assert f"seq_len={seq_len}" in predict(run).note


def test_a_row_states_how_many_layers_are_dense(tmp_path: Path) -> None:
    row = {**LLAMA, "model": "deepseek-v3", "mla": "1", "num_layers": "14", "options": "dense_layers=3"}
    row |= {"num_experts": "64", "experts_per_token": "8", "expert_ffn_size": "2048", "pp": "1", "dp": "8", "tp": "1"}
    (run,) = runs_of(tmp_path, row)
    assert run.problem is not None, run.refusal
    assert run.problem.model.moe is not None
    assert run.problem.model.moe.num_dense_layers == 3


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({"gpu": "tpu-v5"}, "unpriced", "not a known device"),
        ({"gpu": "h100-sxn"}, "unpriced", "did you mean h100-sxm"),
        ({"model": "unheard", "num_layers": ""}, "unpriced", "not known"),
        ({"tp": "x"}, "unpriced", "tp is not a number"),
        ({"tp": "1e400"}, "unpriced", "tp is not a count"),
        ({"micro_batch": "0"}, "unpriced", "micro_batch must be between 1"),
        ({"tp": "0"}, "unpriced", "tp must be between 1 and 1000000, got 0"),
        ({"pp": "1e10", "framework": "nanotron"}, "unpriced", "pp must be between 1 and 1000000, got 1e10"),
        ({"pp": "1", "dp": "8", "vp": "1e17"}, "unpriced", "vp must be between 0 and 1000000, got 1e17"),
        ({"ep": "1e7"}, "unpriced", "ep must be"),
        ({"etp": "1e7"}, "unpriced", "etp must be"),
        ({"dp": "1e7"}, "unpriced", "dp must be"),
        ({"shard_group": "1e7"}, "unpriced", "shard_group must be"),
        ({"dp": "4"}, "unpriced", "tp 4 x cp 2 x pp 4 x dp 4 is not num_gpus 64"),
        ({"shard_group": "4"}, "unpriced", "shard_group 4 does not divide dp 2"),
        ({"num_gpus": "1e7"}, "unpriced", "num_gpus must be"),
        ({"gpus_per_node": "0"}, "unpriced", "gpus_per_node must be"),
        ({"gated_mlp": "2"}, "unpriced", "gated_mlp must be"),
        ({"sp": "3"}, "unpriced", "sp must be"),
        ({"fused_norm": "x"}, "unpriced", "fused_norm is not a number"),
        ({"gpu_memory_gib": "x"}, "unpriced", "gpu_memory_gib is not a number: 'x'"),
        ({"gpu_memory_gib": "-80"}, "unpriced", "gpu_memory_gib is not a positive number"),
        ({"recompute": "some"}, "unpriced", "recompute 'some' is not one of none, selective, full"),
        (
            {"precision": "nvfp4"},
            "unpriced",
            "h100-sxm has no nvfp4 matrix units: pass --precision bf16 or fp16 or fp8",
        ),
        (
            {"gpu": "v100", "gpu_memory_gib": "32", "gpus_per_node": "16", "precision": "bf16"},
            "unpriced",
            "v100 has no bf16 .*: pass --precision fp16",
        ),
        ({"sharding": "zero9"}, "unpriced", "zero9"),
        ({"global_batch": "3"}, "invalid", "global.batch 3"),
        ({"pp": "128", "vp": "1", "num_gpus": "2048"}, "invalid", "exceed"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(tmp_path: Path, change: dict[str, str], verdict: str, words: str) -> None:
    (run,) = runs_of(tmp_path, {**LLAMA, **change})
    prediction = predict(run)
    assert prediction.verdict == verdict
    assert re.search(words, prediction.note)
    assert prediction.step_time_s is None


def test_what_a_row_says_and_the_price_leaves_out_stands_in_the_note(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, {**LLAMA, "pp": "1", "dp": "8", "vp": "4", "gpu_memory_gib": "85"})
    note = predict(run).note
    assert "vp=1 without a pipeline" in note
    assert "gpu_memory_gib=80 as shipped" in note


def test_the_prediction_table_has_the_columns_that_a_scorer_reads(tmp_path: Path) -> None:
    lines = prediction_table(predict(run) for run in runs_of(tmp_path, LLAMA)).splitlines()
    (row,) = csv.DictReader(lines)
    assert tuple(row) == COLUMNS
    assert float(row["step_time_low_s"]) < float(row["step_time_s"]) < float(row["step_time_high_s"])
    assert row["verdict"] in VERDICTS


@pytest.fixture(scope="module")
def measured_rows() -> list[dict[str, str]]:
    if not SHARED.is_file():
        pytest.skip(f"{SHARED.name} is not beside the project")
    with SHARED.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    return random.Random(1).sample(rows, 200)


@pytest.fixture(scope="module")
def predicted(measured_rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prediction]:
    """The predictions of measured runs, by id."""
    runs = runs_of(tmp_path_factory.mktemp("runs"), *measured_rows)
    return {prediction.id: prediction for prediction in predict_all(runs)}


def test_predictions_are_blind_to_answers_and_to_the_order_of_rows(
    measured_rows: list[dict[str, str]], predicted: dict[str, Prediction], tmp_path: Path
) -> None:
    rows = measured_rows
    blank = [{**row, **dict.fromkeys(ANSWERS, ""), "id": f"x{at}"} for at, row in enumerate(rows)]
    random.Random(2).shuffle(blank)
    for prediction in predict_all(runs_of(tmp_path, *blank)):
        original = predicted[rows[int(prediction.id[1:])]["id"]]
        assert prediction.step_time_s == original.step_time_s
        assert prediction.step_time_high_s == original.step_time_high_s
        assert prediction.peak_memory_gib == original.peak_memory_gib
        assert (prediction.verdict, prediction.note) == (original.verdict, original.note)


def test_nearly_every_finished_run_is_priced(
    measured_rows: list[dict[str, str]], predicted: dict[str, Prediction]
) -> None:
    finished = [row["id"] for row in measured_rows if row["status"] == "ok" and row["step_time_s"]]
    priced = [predicted[run_id].step_time_s is not None for run_id in finished]
    assert sum(priced) / len(priced) >= 0.95


def test_the_command_writes_a_table_and_keeps_to_the_rules_of_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    runs.write_text(table(LLAMA, {**LLAMA, "id": "mine-2", "gpu": "tpu"}), encoding="utf-8")
    command(runs=runs, out=out)
    assert capsys.readouterr().out.startswith("2 runs: 1 fits, 1 unpriced; written to ")
    assert [row["id"] for row in csv.DictReader(io.StringIO(out.read_text()))] == ["mine-1", "mine-2"]
    with pytest.raises(InputError, match="--force"):
        command(runs=runs, out=out)
    command(runs=runs, out=out, force=True)
    with pytest.raises(InputError, match="is a folder"):
        command(runs=runs, out=tmp_path, force=True)
    with pytest.raises(InputError, match="cannot be written"):
        command(runs=runs, out=Path("/proc/out.csv"))


def test_a_variant_of_a_device_has_the_memory_that_the_row_says(tmp_path: Path) -> None:
    row = LLAMA | {"gpu": "v100", "precision": "fp16", "attention": "megatron-fused"}
    small, large = runs_of(tmp_path, row | {"gpu_memory_gib": "16"}, row | {"id": "2", "gpu_memory_gib": "32"})
    assert small.problem is not None
    assert large.problem is not None
    assert small.problem.device.memory_bytes == large.problem.device.memory_bytes / 2
    assert small.problem.capacity_bytes == pytest.approx(large.problem.capacity_bytes / 2)


def test_gpus_of_an_nvlink_domain_are_not_those_of_a_node(tmp_path: Path) -> None:
    row = LLAMA | {"gpu": "gb200", "gpu_memory_gib": "192", "num_gpus": "144", "dp": ""}
    for per_node in ("4", "72"):
        (run,) = runs_of(tmp_path, row | {"gpus_per_node": per_node})
        assert run.problem is not None, run.refusal
        assert run.problem.cluster.devices_per_node == 4


def test_a_node_of_eight_v100_is_a_cube_mesh_of_which_a_pair_has_a_sixth(tmp_path: Path) -> None:
    row = LLAMA | {"gpu": "v100", "gpu_memory_gib": "32", "intra_node_gbytes_per_s": "150", "precision": "fp16"}
    pair = row | {"id": "2", "num_gpus": "2", "tp": "2", "cp": "1", "pp": "1", "vp": "", "dp": "1"}
    whole, half, large = runs_of(tmp_path, row, pair, row | {"id": "3", "gpus_per_node": "16"})
    levels = [run.problem.cluster.levels[-1] for run in (whole, half, large) if run.problem]
    assert [level.is_mesh for level in levels] == [True, True, False]
    assert [level.bandwidth_bytes_per_s for level in levels] == [150e9, pytest.approx(150e9 / 6, rel=0.01), 150e9]


@pytest.mark.parametrize(("nominal", "of_device"), [("150", 450e9), ("450", 450e9), ("300", 300e9)])
def test_a_table_may_state_the_rate_between_two_devices_of_a_mesh(
    nominal: str, of_device: float, tmp_path: Path
) -> None:
    """150 GB/s to each of three other GH200; a rate that is neither of the two is the device's."""
    row = LLAMA | {"gpu": "gh200", "gpu_memory_gib": "96", "gpus_per_node": "4", "intra_node_gbytes_per_s": nominal}
    (run,) = runs_of(tmp_path, row | {"num_gpus": "4", "tp": "4", "cp": "1", "pp": "1", "vp": "", "dp": "1"})
    assert run.problem is not None
    assert run.problem.cluster.levels[-1].bandwidth_bytes_per_s == of_device


def test_a_run_under_an_unknown_framework_is_less_sure_to_fit(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table(LLAMA, {**LLAMA, "id": "mine-2", "framework": "Homegrown"}))
    known, unknown = read_runs(path)
    assert known.problem is not None
    assert unknown.problem is not None
    assert unknown.problem.calibration.memory_spread > 2 * known.problem.calibration.memory_spread
    assert any("framework treated as" in note for note in unknown.filled)


def test_a_row_may_say_which_peak_it_reports(tmp_path: Path) -> None:
    shown = {}
    for word in ("allocated", "reserved", "device"):
        (run,) = runs_of(tmp_path, LLAMA | {"options": f"peak_memory={word}"})
        shown[word] = predict(run).peak_memory_gib or 0.0
    assert shown["allocated"] < shown["reserved"] < shown["device"]
    (run,) = runs_of(tmp_path, LLAMA | {"options": "peak_memory=guessed"})
    assert "peak_memory 'guessed'" in run.refusal


def test_a_row_may_say_that_its_activations_are_not_fused(tmp_path: Path) -> None:
    row = LLAMA | {"framework": "Megatron-Bridge", "precision": "bf16"}
    peaks = []
    for options, year in (("", "2026"), ("activation_fusion=0", "2025"), ("activation_fusion=0", "2026")):
        (run,) = runs_of(tmp_path, row | {"options": options, "year": year})
        peaks.append(predict(run).peak_memory_gib or 0.0)
    assert peaks == sorted(set(peaks))


def test_what_its_scripts_train_in_goes_before_what_a_table_calls_it(tmp_path: Path) -> None:
    row = LLAMA | {"framework": "Sailor (Megatron-DeepSpeed based)", "cp": "1", "pp": "2", "vp": "1", "dp": "8"}
    row |= {"precision": "fp16", "sharding": "?"}
    (run,) = runs_of(tmp_path, row)
    assert run.problem is not None
    assert run.plan is not None
    assert (run.problem.training.precision, run.plan.attention) == ("fp32", "unfused")
    assert run.plan.sharding == "none"
    assert "precision=fp32 as its scripts train" in run.filled


@pytest.mark.parametrize(
    ("num_layers", "pp", "layers"),
    [
        ("24", "4", (6, 7, 7, 4)),
        ("48", "8", (6, 6, 7, 7, 7, 7, 7, 1)),
        ("24", "2", None),
        ("20", "8", (2, 2, 2, 2, 3, 3, 3, 3)),
    ],
)
def test_pipelines_of_libai_have_fewer_layers_on_the_last_stage(
    tmp_path: Path, num_layers: str, pp: str, layers: tuple[int, ...] | None
) -> None:
    row = LLAMA | {"framework": "OneFlow LiBai 0.2.0", "num_layers": num_layers, "pp": pp, "vp": "1", "cp": "1"}
    (run,) = runs_of(tmp_path, row | {"tp": "1", "dp": str(64 // int(pp))})
    assert run.plan is not None
    assert run.plan.layers_per_chunk == layers


def test_an_adapter_that_a_node_has_alone_is_shared_by_its_devices(tmp_path: Path) -> None:
    rates = ("1.5625", "0.390625", "6.25", "25")
    rows = [LLAMA | {"id": rate, "inter_node_gbytes_per_s": rate} for rate in rates]
    networks = [run.problem.cluster.network for run in runs_of(tmp_path, *rows) if run.problem]
    assert [network.nics_per_device for network in networks] == [pytest.approx(0.15625), 0.125, 0.625, 1.0]
    assert [network.nic_bytes_per_s * network.nics_per_device / 1e9 for network in networks] == [
        pytest.approx(float(rate)) for rate in rates
    ]


def test_a_row_may_name_the_cluster_of_its_device(tmp_path: Path) -> None:
    named = [LLAMA | {"id": name, "options": f"cluster={name}"} for name in ("h100-sxm", "aws-p5", "aws-p5en")]
    usual, infiniband, efa, other = runs_of(tmp_path, LLAMA, *named)
    assert infiniband.problem is not None
    assert efa.problem is not None
    assert infiniband.problem == usual.problem
    assert (infiniband.problem.cluster.network.kind, efa.problem.cluster.network.kind) == ("infiniband", "efa")
    assert "cluster 'aws-p5en' is none of h100-sxm" in other.refusal


def test_a_node_of_eight_v100_of_which_no_network_is_told_has_one_adapter(tmp_path: Path) -> None:
    row = LLAMA | {"gpu": "v100", "gpu_memory_gib": "32", "precision": "fp16"}
    (run,) = runs_of(tmp_path, row)
    assert run.problem is not None
    network = run.problem.cluster.network
    assert network.nic_bytes_per_s * network.nics_per_device * 8 == 12.5e9


def test_kin_is_said_and_keeps_to_rules_that_hold_everywhere(tmp_path: Path) -> None:
    """FSDP of PyTorch has no tensor parallelism to go with it here; what works like it may."""
    row = LLAMA | {
        "framework": "veScale",
        "year": "2025",
        "sharding": "zero3",
        "cp": "1",
        "pp": "1",
        "vp": "",
        "dp": "16",
    }
    (run,) = runs_of(tmp_path, row)
    assert run.plan is not None, run.refusal
    assert "framework treated as torchtitan-0.2" in run.filled


@pytest.mark.parametrize(("year", "is_refused"), [("2025", False), ("2026", True)])
def test_runs_of_an_older_torchtitan_may_split_experts_twice(tmp_path: Path, year: str, is_refused: bool) -> None:
    """Its 0.2 split experts by tp beside ep, which the current one refuses."""
    layout = {"tp": "4", "cp": "1", "pp": "1", "vp": "", "ep": "2", "etp": "4", "dp": "2", "sharding": "zero3"}
    sizes = ("id", "gpu", "gpu_memory_gib", "gpus_per_node", "seq_len", "global_batch", "micro_batch")
    row = {key: LLAMA[key] for key in sizes} | layout | {"framework": "torchtitan (FSDP2)", "year": year}
    (run,) = runs_of(tmp_path, row | {"model": "Qwen3 30B-A3B", "num_gpus": "8", "recompute": "full"})
    assert run.is_invalid is is_refused, run.refusal
    assert (run.plan is None) is is_refused


@pytest.mark.parametrize(
    ("framework", "kind"),
    [("DeepSpeed ZeRO-3 (HF)", "all_to_all"), ("DeepSpeed", "all_to_all"), ("torchtitan (FSDP2)", "ring")],
)
def test_a_sequence_is_split_over_ranks_as_the_framework_can(tmp_path: Path, framework: str, kind: str) -> None:
    """DeepSpeed's sequence parallelism is Ulysses alone, of which no column of a table tells."""
    row = {"framework": framework, "year": "2025", "sharding": "zero3", "tp": "1", "cp": "8", "pp": "1", "vp": ""}
    (run,) = runs_of(tmp_path, LLAMA | row | {"dp": "8", "recompute": "full"})
    assert run.plan is not None, run.refusal
    assert run.plan.cp_kind == kind
    assert not run.is_invalid


@pytest.mark.parametrize(("options", "kind"), [("", "all_to_all"), ("cp_kind=ring", "ring")])
def test_context_parallelism_with_windows_is_by_heads_unless_a_row_says_otherwise(
    tmp_path: Path, options: str, kind: str
) -> None:
    """Transformer Engine's ring takes neither windows nor attention sinks, and gpt-oss has both."""
    layout = {"tp": "1", "cp": "2", "pp": "1", "vp": "", "ep": "4", "dp": "4", "sharding": "zero1"}
    sizes = ("id", "gpu", "gpu_memory_gib", "gpus_per_node", "seq_len", "global_batch", "micro_batch")
    row = {key: LLAMA[key] for key in sizes} | layout | {"framework": "Megatron-LM", "year": "2025"}
    (run,) = runs_of(tmp_path, row | {"model": "gpt-oss-20b", "num_gpus": "8", "options": options})
    assert run.plan is not None, run.refusal
    assert run.plan.cp_kind == kind
    assert not any("cp_kind" in text for text in run.filled)


def test_automodel_keeps_weights_gradients_and_moments_in_16_bits(tmp_path: Path) -> None:
    """Qwen3-30B-A3B on 8 H100 with ep 8 ran so (its performance summary), where 16 bytes a parameter do not fit."""
    row = {
        "framework": "NeMo AutoModel (FSDP2)",
        "model": "Qwen3 30B-A3B",
        "num_gpus": "8",
        "seq_len": "4096",
        "global_batch": "512",
        "micro_batch": "4",
        "ep": "8",
        "sharding": "zero3",
        "recompute": "full",
    }
    sizes = ("id", "year", "gpu", "gpu_memory_gib", "gpus_per_node")
    as_summarised, as_torchtitan = (
        predict(runs_of(tmp_path, {key: LLAMA[key] for key in sizes} | row | {"framework": framework})[0])
        for framework in (row["framework"], "torchtitan (FSDP2)")
    )
    assert as_summarised.verdict in ("fits", "risky")
    assert as_torchtitan.verdict == "oom"


def test_a_row_may_say_that_its_weights_have_16_bits_alone(tmp_path: Path) -> None:
    row = LLAMA | {"framework": "MaxText", "sharding": "zero3"}
    wide, narrow = (predict(run) for run in runs_of(tmp_path, row, row | {"id": "2", "options": "main_weights=bf16"}))
    assert wide.peak_memory_gib is not None
    assert narrow.peak_memory_gib is not None
    assert narrow.peak_memory_gib < wide.peak_memory_gib


def test_a_row_may_name_types_of_states_and_kernels_of_the_loss(tmp_path: Path) -> None:
    row = LLAMA | {"framework": "Megatron-Bridge", "year": "2025"}
    said = "grad_dtype=fp32;moment_dtype=bf16;cross_entropy_fusion=native"
    usual, stated = runs_of(tmp_path, row, row | {"id": "2", "options": said})
    for run, grad, moment, fusion in ((usual, "bf16", "fp32", "te"), (stated, "fp32", "bf16", "native")):
        assert run.plan is not None
        assert (run.plan.grad_dtype, run.plan.moment_dtype, run.plan.cross_entropy_fusion) == (grad, moment, fusion)
        assert not run.refusal
    assert not [text for text in stated.filled if "left out" in text]


@pytest.mark.parametrize(
    ("container", "precision", "options", "is_narrow"),
    [
        ("25.11", "nvfp4", "", False),
        ("26.04", "nvfp4", "", False),
        ("26.04", "nvfp4", "fp8_params=1", True),
        ("26.04", "mxfp8", "", True),
        ("26.04.01", "nvfp4", "", True),
        ("26.06", "nvfp4", "", True),
    ],
)
def test_weights_have_4_bits_since_a_container(
    tmp_path: Path, container: str, precision: str, options: str, is_narrow: bool
) -> None:
    row = LLAMA | {"framework": f"Megatron-Bridge/Megatron-Core {container}", "year": "2026", "gpu": "gb200"}
    (run,) = runs_of(tmp_path, row | {"precision": precision, "options": options, "gpus_per_node": "4"})
    assert run.plan is not None
    assert run.plan.narrow_params is is_narrow


def test_a_row_may_say_that_its_loss_takes_the_logits_in_pieces(tmp_path: Path) -> None:
    row = LLAMA | {"framework": "torchtune", "sharding": "none", "num_gpus": "1"}
    row |= dict.fromkeys(("tp", "cp", "pp", "vp", "dp", "micro_batch", "global_batch"), "1")
    runs = runs_of(tmp_path, row, row | {"id": "2", "options": "chunked_loss=1"})
    assert [run.plan and run.plan.chunked_loss for run in runs] == ["none", "liger"], runs[1].refusal


def test_dropout_and_weights_in_8_bits_are_as_the_recipe_chose(tmp_path: Path) -> None:
    row = LLAMA | {"framework": "NeMo 23.09", "year": "2023", "gated_mlp": "0", "precision": "fp8"}
    plain, chosen = runs_of(tmp_path, row, row | {"id": "2", "options": "dropout=0;fp8_params=1"})
    (gated,) = runs_of(tmp_path, row | {"gated_mlp": "1"})
    assert plain.plan is not None
    assert chosen.plan is not None
    assert gated.plan is not None
    assert (plain.plan.dropout, chosen.plan.dropout, gated.plan.dropout) == (True, False, False)
    assert (plain.plan.narrow_params, chosen.plan.narrow_params) == (False, True)


def test_a_recipe_that_tells_its_choices_and_no_dispatcher_sends_tokens_by_all_to_all(tmp_path: Path) -> None:
    experts = {"num_experts": "8", "experts_per_token": "2", "expert_ffn_size": "1024", "ep": "8"}
    row = LLAMA | experts | {"framework": "Megatron-Bridge/Megatron-Core 26.02", "year": "2026"}
    for said, dispatcher in (
        ("token_dropping=0", "hybridep"),
        ("cuda_graph=moe_router;token_dropping=0", "alltoall"),
        ("cuda_graph=moe_router;dispatcher=deepep", "deepep"),
    ):
        (run,) = runs_of(tmp_path, row | {"options": said})
        assert run.plan
        assert run.plan.dispatcher == dispatcher, said


def test_prediction_layers_of_a_preset_are_trained_where_recipes_do(tmp_path: Path) -> None:
    row = LLAMA | dict.fromkeys(("num_layers", "hidden_size", "num_heads", "ffn_size"), "") | {"model": "DeepSeek-V3"}
    for framework, depths in (("Megatron-Bridge/Megatron-Core 26.02", 1), ("NeMo AutoModel", 0)):
        (run,) = runs_of(tmp_path, row | {"framework": framework, "year": "2026"})
        assert run.problem
        assert run.problem.model.num_mtp_layers == depths


def test_a_gated_model_of_a_preset_has_what_no_column_says(tmp_path: Path) -> None:
    sizes = {"num_layers": "36", "hidden_size": "2880", "num_heads": "64", "num_kv_heads": "8", "ffn_size": "2880"}
    experts = {
        "num_experts": "128",
        "experts_per_token": "4",
        "expert_ffn_size": "2880",
        "ep": "8",
        "vocab_size": "201088",
    }
    row = LLAMA | sizes | experts
    known, unknown = runs_of(tmp_path, row | {"model": "GPT OSS 120B"}, row | {"id": "mine-2", "model": "my mixture"})
    assert known.problem is not None
    assert unknown.problem is not None
    model = known.problem.model
    assert (model.window, model.full_attention_interval, model.attention_sinks) == (128, 2, True)
    assert (model.mlp_bias, model.clamped_activation, model.tied_embeddings) == (True, True, False)
    assert (unknown.problem.model.window, unknown.problem.model.mlp_bias) == (None, False)


def test_a_row_says_what_it_fine_tunes_in_the_words_of_the_command_line(tmp_path: Path) -> None:
    said = "finetune=qlora:r=64,targets=q_proj+v_proj;optimizer=adamw_torch;offload=parameters"
    row = LLAMA | {"framework": "Hugging Face Trainer", "sharding": "zero3", "recompute": "full"}
    row |= {"tp": "1", "sp": "0", "cp": "1", "pp": "1", "vp": "1", "dp": "64", "micro_batch": "1", "global_batch": "64"}
    (run,) = runs_of(tmp_path, row | {"options": said})
    assert run.problem is not None
    assert run.plan is not None, run.refusal
    tuning = run.problem.training.finetuning
    assert tuning is not None
    assert (tuning.rank, tuning.targets, tuning.quantization) == (
        64,
        ("q_proj", "v_proj"),
        "nf4-dq",
    )
    assert run.problem.training.optimizer == "adam"
    assert run.plan.offload == "parameters"
    assert not any("left out" in column for column in run.filled)


@pytest.mark.parametrize(
    "said", ["finetune=adapter_config.json", "finetune=lora:rank=8", "optimizer=ftrl", "offload=all"]
)
def test_words_of_fine_tuning_that_are_none_are_refused_by_name(tmp_path: Path, said: str) -> None:
    (run,) = runs_of(tmp_path, LLAMA | {"options": said})
    assert run.plan is None
    assert said.partition("=")[0] in run.refusal


@pytest.mark.parametrize(
    ("framework", "year", "priced_with"),
    [
        ("ms-swift 3.8 (Megatron)", "2025", "megatron-core"),
        ("ms-swift 3.8", "2025", "deepspeed-hf"),
        ("Accelerate FSDP", "2025", "pytorch-fsdp"),
        ("LLaMA-Factory (DeepSpeed ZeRO-3)", "2025", "deepspeed-hf"),
        ("verl, Megatron workers", "2025", "megatron-core"),
        ("verl", "2025", "pytorch-fsdp"),
        ("a pipeline schedule of ours (Megatron)", "2020", "megatron-lm-2021"),
        ("Megatron LM", "?", "megatron-core"),  # without a year: today's
    ],
)
def test_a_front_end_is_priced_as_the_backend_that_its_name_states(
    tmp_path: Path, framework: str, year: str, priced_with: str
) -> None:
    (run,) = runs_of(tmp_path, LLAMA | {"framework": framework, "year": year, "vp": "", "pp": "1", "dp": "8"})
    assert run.problem is not None, run.refusal
    assert run.problem.framework.name == priced_with
    assert f"framework treated as {priced_with}" in run.filled


@pytest.mark.parametrize(
    ("spelled", "device"),
    [("rtx4090", "rtx-4090"), ("H100", "h100-sxm"), ("gb200", "gb200"), ("a100-40g", "a100-sxm-40")],
)
def test_a_device_may_be_spelled_as_people_do(tmp_path: Path, spelled: str, device: str) -> None:
    (run,) = runs_of(tmp_path, LLAMA | {"gpu": spelled, "gpu_memory_gib": ""})
    assert run.problem is not None, run.refusal
    assert run.problem.cluster.device.name == device


def test_a_device_without_bf16_trains_in_fp16_unless_stated(tmp_path: Path) -> None:
    volta = LLAMA | {"gpu": "v100", "gpu_memory_gib": "32", "framework": "Megatron-LM", "year": "2021"}
    (run,) = runs_of(tmp_path, volta)
    assert run.problem is not None, run.refusal
    assert run.problem.training.precision == "fp16"


def test_a_plan_that_only_the_framework_rejects_has_a_price_beside_the_verdict(tmp_path: Path) -> None:
    """A rule may be newer than the run: its time is worth more than none."""
    row = LLAMA | {"framework": "torchtitan (FSDP2)", "year": "2026", "pp": "1", "vp": "", "dp": "8"}
    (rejected,) = runs_of(tmp_path, row)
    (run,) = runs_of(tmp_path, row | {"sharding": "zero2"})
    assert rejected.plan is None
    assert rejected.is_invalid
    alike = predict(run)
    prediction = predict(rejected)
    assert prediction.verdict == "invalid"
    assert prediction.note.startswith("sharding 'zero1' does not exist")
    assert prediction.step_time_s == pytest.approx(alike.step_time_s, rel=0.5)
    assert prediction.step_time_low_s < prediction.step_time_s < prediction.step_time_high_s


def test_a_plan_that_no_framework_can_run_has_no_price(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, LLAMA | {"framework": "torchtitan (FSDP2)", "year": "2026", "global_batch": "127"})
    prediction = predict(run)
    assert prediction.verdict == "invalid"
    assert prediction.step_time_s is None

"""Are the scripts for Megatron-LM right word by word, and inert whatever the names?"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoplan.base.errors import InputError
from autoplan.base.units import GIB
from autoplan.frameworks.common.job import File
from autoplan.frameworks.common.rules import Rule
from autoplan.frameworks.megatron_lm.export import checked_parts
from autoplan.frameworks.megatron_lm.notation import pipeline_layout
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.frameworks.megatron_lm.table import words
from autoplan.launch.launcher import launch_files
from autoplan.launch.names import Launcher
from autoplan.launch.start import Start
from autoplan.launch.targets import job_of
from autoplan.spec.blocks import Experts
from autoplan.spec.calibration import Calibration
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PLAN_FILE_VERSION, PlanFile
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec, DeviceSpec, LinkLevel, NetworkSpec, NodeGroup
from launched import launched
from model_specs import DEEPSEEK3, gpt

GOLDEN = Path(__file__).parent / "golden" / "megatron_lm"

LLAMA_8B = ModelSpec(
    name="llama3-8b",
    num_layers=32,
    hidden_size=4096,
    vocab_size=128256,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=14336,
    rope_base=500000.0,
)
LLAMA_70B = replace(LLAMA_8B, name="llama3-70b", num_layers=80, hidden_size=8192, num_heads=64, ffn_size=28672)
LLAMA_405B = replace(LLAMA_8B, name="llama3.1-405b", num_layers=126, hidden_size=16384, num_heads=128, ffn_size=53248)
GPT3 = gpt(96, 12288, 96, vocab_size=50257, name="gpt3-175b")
DEEPSEEK = replace(DEEPSEEK3, num_mtp_layers=1)
GPT_OSS = ModelSpec(
    name="gpt-oss-20b",
    num_layers=24,
    hidden_size=2880,
    vocab_size=201088,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    clamped_activation=True,
    mlp_bias=True,
    qkv_bias=True,
    attention_output_bias=True,
    attention_sinks=True,
    window=128,
    full_attention_interval=2,
    rope_base=150000.0,
    moe=Experts(num_experts=32, experts_per_token=4, expert_ffn_size=2880, router_bias=True),
)


def words_of(plan_file: PlanFile, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """The options of model and plan in a command."""
    lines = [line for part in checked_parts(plan_file, rules=rules) for line in part.lines]
    return [word for line in lines for word in words(line, plan_file)]


def cluster_of(num_nodes: int, generation: str = "hopper", name: str = "lab") -> ClusterSpec:
    device = DeviceSpec(
        name=f"{generation}-80g",
        vendor="nvidia",
        generation=generation,  # type: ignore[arg-type]
        memory_bytes=80.0 * GIB,
        visible_memory_bytes=79.0 * GIB,
        memory_bandwidth_bytes_per_s=3.35e12,
        compute_units=132,
        tdp_w=700.0,
        host_link_bytes_per_s=55e9,
        gemm_efficiency=0.7,
        memory_efficiency=0.9,
        peak_flops_per_s={"bf16": 989e12},
    )
    level = LinkLevel(name="nvlink", kind="nvlink", num_devices=8, bandwidth_bytes_per_s=450e9, latency_s=1e-6)
    return ClusterSpec(
        name=name,
        device=device,
        num_nodes=num_nodes,
        devices_per_node=8,
        levels=(level,),
        network=NetworkSpec(kind="infiniband", nic_bytes_per_s=50e9),
    )


def plan_file_of(
    model: ModelSpec,
    cluster: ClusterSpec | None = None,
    seq_len: int = 4096,
    **plan: Any,
) -> PlanFile:
    parts = {"has_experts": model.moe is not None, "has_latents": model.mla is not None}
    chosen = ParallelPlan.derived(**{"global_batch": 256, "etp": 1, **parts, **plan})
    best = RankedPlan(
        plan=chosen,
        step_s=7.31,
        low_s=6.6,
        high_s=8.1,
        tokens_per_s_per_device=1120.4,
        mfu=0.431,
        memory_bytes=71.3 * GIB,
        memory_headroom_bytes=7.7 * GIB,
        host_memory_bytes=100.0 * GIB,
        oom_probability=0.012,
        verdict="fits",
        terms_s={},
    )
    return PlanFile(
        schema_version=PLAN_FILE_VERSION,
        versions={"autoplan": "0.1.0", "numpy": "2.0"},
        command=f"autoplan search {model.name} --cluster lab --global-batch {chosen.global_batch}",
        model=model,
        training=TrainingSpec(seq_len=seq_len, precision=chosen.precision),
        cluster=cluster or cluster_of(-(-chosen.num_devices // 8)),
        framework=Framework(name="megatron-core"),
        calibration=Calibration(),
        reserve_bytes=0.0,
        best=best,
        stages=(),
        alternatives=(),
        certificate=None,
    )


LISTED = replace(cluster_of(4), nodes=(NodeGroup(names=("node6", "node7", "node8", "node9"), switches=("a",)),))
PLACED = plan_file_of(
    LLAMA_8B,
    cluster=LISTED,
    tp=8,
    sp=True,
    pp=2,
    dp_shard=2,
    rank_order="tp-cp-ep-pp-dp",
    placement=("node8", "node6", "node7", "node9"),
)

MIDDLES = (8,) * 14
EXPORTS: dict[str, tuple[PlanFile, Launcher]] = {
    "dense": (plan_file_of(LLAMA_8B, tp=2, sp=True, dp_shard=4, tp_overlap=True), "torchrun"),
    "gpt3_interleaved": (
        plan_file_of(GPT3, seq_len=2048, tp=8, sp=True, pp=8, vp=6, schedule="interleaved", recompute="full"),
        "torchrun",
    ),
    "latent_experts": (
        plan_file_of(DEEPSEEK, global_batch=2048, tp=2, sp=True, pp=8, ep=32, dp_shard=64, precision="fp8"),
        "slurm",
    ),
    "uneven": (
        plan_file_of(LLAMA_405B, seq_len=8192, tp=8, sp=True, pp=16, dp_shard=4, layers_per_chunk=(7, *MIDDLES, 7)),
        "torchrun",
    ),
    "slurm": (
        plan_file_of(LLAMA_70B, seq_len=8192, tp=4, sp=True, pp=4, dp_shard=8, global_batch=512, dp_replicate=2),
        "slurm",
    ),
    "fsdp": (plan_file_of(LLAMA_8B, dp_shard=8, dp_replicate=2, sharding="zero3"), "torchrun"),
    "windows_and_sinks": (
        plan_file_of(GPT_OSS, ep=4, cp=2, cp_kind="all_to_all", dp_shard=4, offload="optimizer"),
        "torchrun",
    ),
    "placed": (PLACED, "torchrun"),
    "placed_slurm": (PLACED, "slurm"),
}


def files_of(name: str) -> tuple[File, ...]:
    plan_file, launcher = EXPORTS[name]
    return launch_files(Start.of(plan_file, job_of(plan_file, "megatron-lm"), launcher))


def export_megatron_lm(plan_file: PlanFile, launcher: Launcher) -> str:
    """The script of the nodes."""
    files = launch_files(Start.of(plan_file, job_of(plan_file, "megatron-lm"), launcher))
    return next(file.text for file in files if file.name == "launch.sh")


@pytest.mark.parametrize("name", EXPORTS)
def test_a_script_is_the_golden_one(name: str) -> None:
    script = export_megatron_lm(*EXPORTS[name])
    golden = GOLDEN / f"{name}.sh"
    if not golden.exists():
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(script)
        pytest.fail(f"{golden.name} was missing and is written now: read it before it is kept")
    assert script == golden.read_text()


@pytest.mark.parametrize("name", EXPORTS)
def test_a_script_is_bash(name: str) -> None:
    script = export_megatron_lm(*EXPORTS[name])
    result = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


# -- what the launchers receive ---------------------------------------------------------------------------------------


def test_torchrun_receives_exactly_the_words_of_the_plan(tmp_path: Path) -> None:
    words = launched(tmp_path, files_of("dense"), "--lr", "a b", MEGATRON_LM_DIR="/opt/my megatron")
    one_queue, *command = words
    assert one_queue == "1"
    assert command[:8] == ["--nnodes", "1", "--nproc-per-node", "8", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    assert command[8:11] == ["--master-port", "29500", "/opt/my megatron/pretrain_gpt.py"]
    arguments = words_of(EXPORTS["dense"][0])
    assert command[11 : 11 + len(arguments)] == arguments
    rest = command[11 + len(arguments) :]
    assert rest[-4:] == ["--train-iters", "100", "--lr", "a b"]
    assert "--mock-data" in rest


def test_a_placed_plan_takes_its_ranks_in_its_order(tmp_path: Path) -> None:
    assert "--use-tp-pp-dp-mapping" in launched(tmp_path, files_of("placed"))


def test_data_of_the_environment_replaces_the_mock_data(tmp_path: Path) -> None:
    data = "--data-path corpus_text_document --tokenizer-type HuggingFaceTokenizer"
    words = launched(tmp_path, files_of("dense"), DATA_ARGS=data)
    assert "--mock-data" not in words
    assert words[-6:-2] == data.split()


def test_fsdp_unsets_the_single_queue(tmp_path: Path) -> None:
    files = files_of("fsdp")
    words = launched(tmp_path, files, CUDA_DEVICE_MAX_CONNECTIONS="1", MASTER_ADDR="node7", NODE_RANK="1")
    assert words[0] == ""


# -- single decisions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "num_mtp_layers", "layout"),
    [
        ((3, 4, 4, 2), 0, "Et*3|(t*4|)*2t*2L"),
        ((1, 1), 0, "Et|tL"),
        ((2, 0, 2), 0, "Et*2||t*2L"),
        ((0, 2, 2, 0), 1, "E|(t*2|)*2mL"),
        ((3, 3, 2), 2, "Et*3|t*3|t*2m*2L"),
    ],
)
def test_layouts_are_written_as_megatron_reads_them(counts: tuple[int, ...], num_mtp_layers: int, layout: str) -> None:
    assert pipeline_layout(counts, num_mtp_layers) == layout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sharding": "none"}, []),
        ({"sharding": "zero1"}, ["--use-distributed-optimizer", "--overlap-param-gather"]),
        ({"sharding": "zero2"}, ["--use-megatron-fsdp", "optim_grads", "fsdp_dtensor"]),
        ({"sharding": "zero3"}, ["optim_grads_params", "--init-model-with-meta-device"]),
        ({"precision": "fp8"}, ["--bf16", "--fp8-format", "hybrid", "tensorwise"]),
        ({"precision": "fp8", "fp8_scaling": "blockwise"}, ["--fp8-format", "hybrid", "--fp8-recipe", "blockwise"]),
        ({"precision": "fp16"}, ["--fp16"]),
        ({"recompute": "selective"}, ["--recompute-granularity", "selective", "core_attn"]),
        ({"offload": "optimizer"}, ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]),
        ({"offload": "optimizer", "offload_percent": 57}, ["--optimizer-offload-fraction", "0.57"]),
    ],
)
def test_a_choice_of_the_plan_has_its_options(changes: dict[str, Any], expected: list[str]) -> None:
    written = words_of(plan_file_of(LLAMA_8B, dp_shard=8, **changes))
    assert set(expected) <= set(written)
    if changes.get("sharding") == "none":
        assert not {"--use-distributed-optimizer", "--overlap-param-gather"} & set(written)


def test_experts_that_drop_tokens_have_a_capacity_and_the_plain_dispatcher() -> None:
    file = plan_file_of(GPT_OSS, ep=8, dp_shard=8, token_dropping=True)
    written = words_of(file)
    assert written[written.index("--moe-token-dispatcher-type") + 1] == "alltoall"
    at = written.index("--moe-expert-capacity-factor")
    assert written[at : at + 3] == ["--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"]
    assert "--moe-flex-dispatcher-backend" not in written
    limited = words_of(replace(file, training=replace(file.training, capacity_factor=1.25, pads_experts=False)))
    assert limited[at : at + 2] == ["--moe-expert-capacity-factor", "1.25"]
    assert "--moe-pad-expert-input-to-capacity" not in limited


def test_a_fused_loss_is_named_and_that_of_transformer_engine_is_left_to_releases() -> None:
    option = "--cross-entropy-loss-fusion"
    assert option not in words_of(plan_file_of(LLAMA_8B, dp_shard=8))
    written = words_of(plan_file_of(LLAMA_8B, dp_shard=8, cross_entropy_fusion="native"))
    at = written.index(option)
    assert written[at : at + 3] == [option, "--cross-entropy-fusion-impl", "native"]
    in_place = plan_file_of(LLAMA_8B, dp_shard=8, cross_entropy_fusion="te")
    with pytest.raises(InputError, match="cross_entropy_fusion 'te': use native"):
        job_of(in_place, "megatron-lm")
    assert "te" in [
        word for group in job_of(in_place, "megatron-lm@0.17").groups for line in group.lines for word in line
    ]


def test_blackwell_needs_no_single_queue() -> None:
    for generation, exported in (("hopper", True), ("blackwell", False)):
        script = export_megatron_lm(plan_file_of(LLAMA_8B, cluster_of(1, generation), tp=8, sp=True), "torchrun")
        assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1" in script) is exported


REFUSED: dict[str, tuple[PlanFile, str]] = {
    "gpipe": (plan_file_of(LLAMA_8B, pp=8, schedule="gpipe"), "no schedule 'gpipe': plan and export for torchtitan"),
    "a broken rule": (plan_file_of(LLAMA_8B, dp_shard=8, global_batch=63), "must be divisible by micro_batch"),
    "alibi": (plan_file_of(replace(LLAMA_8B, position_embedding="alibi"), dp_shard=8), "positions by ALiBi"),
    "hybrid": (plan_file_of(replace(LLAMA_8B, layer_pattern="*-" * 16), dp_shard=8), "different kinds of layers"),
    "full norms": (plan_file_of(replace(LLAMA_8B, qk_norm="full"), dp_shard=8), "a norm over all queries and keys"),
    "two norms": (plan_file_of(replace(LLAMA_8B, norms_per_block=2), dp_shard=8), "a second norm, after every block"),
    "one bias": (plan_file_of(replace(LLAMA_8B, mlp_bias=True), dp_shard=8), "biases of some matrices"),
    "odd base": (plan_file_of(replace(LLAMA_8B, rope_base=1000.5), dp_shard=8), "rope_base"),
    "old attention": (plan_file_of(LLAMA_8B, attention="megatron-fused", dp_shard=8), "megatron-fused"),
    "old device": (plan_file_of(LLAMA_8B, cluster_of(1, "ampere"), dp_shard=8, precision="fp8"), "precision 'fp8'"),
    "too few nodes": (plan_file_of(LLAMA_8B, cluster_of(1), dp_shard=16), "needs 2 nodes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_in_one_line(case: str) -> None:
    plan_file, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        export_megatron_lm(plan_file, "torchrun")
    assert says in str(error.value)
    assert "\n" not in str(error.value)

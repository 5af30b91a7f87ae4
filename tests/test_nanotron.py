"""Does nanotron accept what is exported for it, refuse what the rules refuse, and is the plan read back?"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.nanotron.export import nanotron_config
from autoplan.frameworks.nanotron.read import read, recognises
from autoplan.frameworks.nanotron.rules import RULES, layers_per_stage
from autoplan.frameworks.presets import load_framework
from autoplan.launch.targets import job_of
from autoplan.spec.blocks import Experts
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.workload import Workload
from framework_parsers import ask
from test_megatron_lm_export import DEEPSEEK, GPT3, LLAMA_8B, plan_file_of

NANOTRON = load_framework("nanotron")
SMALL = ModelSpec(
    name="small",
    num_layers=24,
    hidden_size=1024,
    vocab_size=32000,
    num_heads=16,
    num_kv_heads=8,
    ffn_size=4096,
    tied_embeddings=True,
)
QWEN = replace(SMALL, name="qwen", qkv_bias=True, num_kv_heads=None, rope_base=1e6, tied_embeddings=False)
EXPERTS = Experts(num_experts=8, experts_per_token=2, expert_ffn_size=512)
MOE = replace(SMALL, name="moe", moe=EXPERTS)
SHARED = replace(EXPERTS, shared_expert_ffn_size=1024, shared_expert_gate=True, num_dense_layers=3)


def nanotron(model: ModelSpec = SMALL, seq_len: int = 4096, **plan: Any) -> PlanFile:
    layers = layers_per_stage(model, plan.get("pp", 1))
    split = {"layers_per_chunk": layers} if len(set(layers)) > 1 else {}
    sharding = plan.get("sharding", "zero1")
    file = plan_file_of(
        model, seq_len=seq_len, **{**split, "sharding": sharding, "param_gather_overlap": sharding != "none", **plan}
    )
    return replace(file, framework=NANOTRON)


PLANS: dict[str, PlanFile] = {
    "one device": nanotron(sharding="none"),
    "replicas": nanotron(dp_shard=8),
    "24 replicas": nanotron(dp_shard=24, global_batch=480, micro_batch=4, sharding="none"),
    "tensors": nanotron(tp=4, sp=True, dp_shard=2, tp_overlap=True),
    "whole sequences": nanotron(tp=2, dp_shard=4, sharding="none"),
    "two stages": nanotron(pp=2, dp_shard=4),
    "three stages": nanotron(pp=3, dp_shard=8, global_batch=240),
    "eight stages": nanotron(pp=8, tp=2, sp=True, dp_shard=2, recompute="full"),
    "all forward": nanotron(pp=4, dp_shard=2, schedule="gpipe"),
    "half precision": nanotron(dp_shard=2, precision="fp16"),
    "llama": nanotron(LLAMA_8B, 8192, tp=8, sp=True, pp=4, dp_shard=4, tp_overlap=True, global_batch=512),
    "llama on 512": nanotron(LLAMA_8B, 8192, tp=4, sp=True, pp=2, dp_shard=64, global_batch=1024),
    "qwen": nanotron(QWEN, tp=2, sp=True, dp_shard=4),
    "qwen in stages": nanotron(QWEN, pp=4, dp_shard=2, recompute="full"),
    "experts": nanotron(MOE, dp_shard=8),
    "shared experts": nanotron(replace(MOE, moe=SHARED), dp_shard=4, pp=2),
    "experts in every second layer": nanotron(replace(MOE, moe=replace(EXPERTS, interval=2)), tp=2, sp=True),
}
ENGINES = {"1f1b": "OneForwardOneBackwardPipelineEngine", "gpipe": "AllForwardAllBackwardPipelineEngine"}


def text_of(file: PlanFile) -> str:
    return job_of(file, "nanotron").files[0].text


def test_a_configuration_is_commented_and_holds_what_nanotron_runs() -> None:
    file = nanotron(tp=2, sp=True, pp=2, dp_shard=4, tp_overlap=True, global_batch=64, recompute="full")
    text = text_of(file)
    assert [line for line in text.splitlines() if line.startswith("# Predicted: 7.31 s")]
    config = yaml.safe_load(text)
    assert config["parallelism"] == {
        "dp": 4,
        "tp": 2,
        "pp": 2,
        "context_parallel_size": 1,
        "expert_parallel_size": 1,
        "pp_engine": "1f1b",
        "tp_mode": "REDUCE_SCATTER",
        "tp_linear_async_communication": True,
        "tp_recompute_allgather": True,
        "recompute_layer": True,
    }
    assert config["tokens"]["batch_accumulation_per_replica"] == 16
    assert config["optimizer"]["zero_stage"] == 1
    assert config["model"]["model_config"]["is_llama_config"]
    job = job_of(file, "nanotron")
    assert job.trailing == ('--config-file "$HERE/nanotron.yaml"',)
    assert [(variable.name, variable.value) for variable in job.environment] == [("CUDA_DEVICE_MAX_CONNECTIONS", "1")]


REFUSED: dict[str, tuple[PlanFile, str]] = {
    "latent attention": (nanotron(DEEPSEEK), "latent attention"),
    "learned positions": (nanotron(replace(GPT3, num_layers=4)), "learned positions"),
    "layer norms": (nanotron(replace(SMALL, norm="layernorm")), "a norm other than RMSNorm"),
    "no gate": (nanotron(replace(SMALL, gated_mlp=False)), "an MLP without gate"),
    "biases": (nanotron(replace(SMALL, mlp_bias=True)), "biases of the MLP"),
    "query norms": (nanotron(replace(SMALL, qk_norm="head")), "a norm of queries and keys"),
    "a window": (nanotron(replace(SMALL, window=512)), "a window"),
    "wide heads": (nanotron(replace(SMALL, head_dim=128)), "heads of 2048 in all beside hidden_size 1024"),
    "shared experts without gate": (
        nanotron(replace(MOE, moe=replace(SHARED, shared_expert_gate=False))),
        "shared experts without gate",
    ),
    "no overlap": (nanotron(dp_shard=2, grad_reduce_overlap=False), "grad_reduce_overlap off"),
    "another split": (nanotron(pp=2, layers_per_chunk=(20, 4)), "it splits by cost"),
    "interleaving": (nanotron(pp=2, vp=2, schedule="interleaved", layers_per_chunk=(6,) * 4), "no interleaving"),
    "expert parallelism": (nanotron(MOE, dp_shard=4, ep=4), "ep 4: runs with expert parallelism do not start"),
    "context parallelism": (nanotron(cp=2), "cp 2: runs with context parallelism do not start"),
    "zero3": (nanotron(dp_shard=4, sharding="zero3"), "sharding 'zero3' does not exist"),
    "overlap without sequence parallelism": (nanotron(tp=2, tp_overlap=True), "tp_overlap needs sp"),
    "another framework": (
        replace(nanotron(), framework=load_framework("torchtitan")),
        "made for torchtitan, not for nanotron",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nanotron_cannot_express_is_refused_in_one_line(case: str) -> None:
    file, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        text_of(file)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


# -- round trips ------------------------------------------------------------------------------------------------------

models = st.builds(
    lambda heads, share, width, layers, bias, moe, tied, base, name: replace(
        SMALL,
        name=name,
        num_layers=layers,
        num_heads=heads,
        hidden_size=heads * width,
        num_kv_heads=None if share == 1 else heads // share,
        qkv_bias=bias,
        moe=moe,
        tied_embeddings=tied,
        rope_base=base,
    ),
    st.sampled_from([4, 8, 12]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([64, 80]),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, EXPERTS, replace(SHARED, num_dense_layers=0)]),
    st.booleans(),
    st.sampled_from([1e4, 5e5, 1234.5]),
    st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1),
)
degrees = st.sampled_from([1, 1, 2, 4])


@st.composite
def plan_files(draw: st.DrawFn) -> PlanFile:
    model, tp, pp, dp = draw(models), draw(degrees), draw(degrees), draw(degrees)
    micro, sp = draw(st.integers(1, 4)), tp > 1 and draw(st.booleans())
    return nanotron(
        model,
        tp=tp,
        sp=sp,
        pp=pp,
        dp_shard=dp,
        micro_batch=micro,
        global_batch=micro * dp * draw(st.integers(1, 20)),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        sharding=draw(st.sampled_from(["none", "zero1"])),
        recompute=draw(st.sampled_from(["none", "full"])),
        precision=draw(st.sampled_from(["bf16", "fp16"])),
        tp_overlap=sp and draw(st.booleans()),
    )


def faults(launch: Launch) -> tuple[str, ...]:
    workload = Workload(model=launch.model, training=launch.training, num_devices=launch.plan.num_devices)
    return broken(RULES, workload, launch.plan)


@settings(max_examples=40)
@given(plan_files())
def test_what_is_exported_is_read_back(file: PlanFile) -> None:
    try:
        text = text_of(file)
    except InputError as error:
        assume("does not support" not in str(error))
        raise
    assert recognises("nanotron.yaml", text)
    launch = read(text, LaunchContext())
    assert (launch.plan, launch.model, launch.training) == (file.best.plan, file.model, file.training)
    assert launch.unread == ()


# -- reading ----------------------------------------------------------------------------------------------------------


def changed(changes: dict[str, Any], file: PlanFile | None = None) -> str:
    """A configuration with other values under dotted keys; None takes one out."""
    config = nanotron_config(file or nanotron(tp=2, sp=True, pp=2, dp_shard=2))
    for name, value in changes.items():
        *sections, key = name.split(".")
        table = functools.reduce(lambda inside, section: inside[section], sections, config)
        if value is None:
            del table[key]
        else:
            table[key] = value
    return yaml.safe_dump(config)


def test_the_person_wins_over_the_file() -> None:
    launch = read(changed({}), LaunchContext(model=LLAMA_8B, seq_len=8192))
    assert (launch.model, launch.training.seq_len) == (LLAMA_8B, 8192)
    assert launch.plan.layers_per_chunk == layers_per_stage(LLAMA_8B, 2)
    with pytest.raises(InputError, match="starts 8 devices, not 16"):
        read(changed({}), LaunchContext(num_devices=16))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"parallelism.zigzag": 3}, "parallelism.zigzag"),
        ({"optimizer.accumulate_grad_in_fp32": False}, "optimizer.accumulate_grad_in_fp32"),
        ({"parallelism.tp_recompute_allgather": False}, "parallelism.tp_recompute_allgather"),
        ({"model.model_config.z_loss_enabled": True}, "model.model_config.z_loss_enabled"),
        ({"model.model_config._attn_implementation": "flex_attention"}, "model.model_config._attn_implementation"),
        (
            {"model.model_config._attn_implementation": "llama3_ring_attention"},
            "model.model_config._attn_implementation",
        ),
        ({"optimizer.optimizer_factory.name": "sgd"}, "optimizer.optimizer_factory.name"),
        (
            {"optimizer.optimizer_factory.torch_adam_is_fused": False},
            "optimizer.optimizer_factory.torch_adam_is_fused",
        ),
        ({"model.model_config.attn_pdrop": 0.1}, "model.model_config.attn_pdrop"),
        ({"metrics_logging": {"log_level": 1, "log_detail_interval": 1}}, "metrics_logging.log_level"),
        ({"data_stages": [{"name": "long", "sequence_length": 16384}]}, "data_stages"),
    ],
)
def test_what_is_not_priced_is_listed(changes: dict[str, Any], option: str) -> None:
    (unread,) = read(changed(changes), LaunchContext()).unread
    assert (unread.option, unread.matters) == (option, True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallelism.dp": None}, "parallelism.dp is not in the file: add it"),
        ({"parallelism.dp": "two"}, "parallelism.dp must be a whole number of at least 1, got 'two'"),
        ({"parallelism.dp": True}, "parallelism.dp must be a whole number"),
        ({"parallelism.pp": 10**6}, "parallelism.pp 1000000 exceeds the 24 layers"),
        ({"parallelism.pp_engine": "zigzag"}, "parallelism.pp_engine must be 1f1b or afab, got 'zigzag'"),
        ({"optimizer.zero_stage": 3}, "optimizer.zero_stage must be 0 or 1"),
        ({"model.dtype": "float32"}, "model.dtype must be bfloat16 or float16"),
        ({"model.model_config.is_llama_config": False}, "pass --model"),
        ({"parallelism": [1]}, "parallelism must be a table"),
        ({"tokens.micro_batch_size": 10**11}, "micro_batch must be between"),
    ],
)
def test_what_is_missing_or_wrong_is_told_by_its_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        read(changed(changes), LaunchContext())
    assert says in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "a: [", "!!python/object/apply:os.system [id]", "1: 2", "a: &a [*a]\n? a"])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        read(text, LaunchContext())


# -- nanotron itself --------------------------------------------------------------------------------------------------

# Single defects that nanotron refuses: in its configuration, its groups, or the model that it builds.
DEFECTS: dict[str, dict[str, Any]] = {
    "heads that tp does not divide": {"parallelism.tp": 3, "parallelism.tp_mode": "ALL_REDUCE"},
    "fewer key heads than tp": {"model.model_config.num_key_value_heads": 1},
    "key heads that do not divide the heads": {"model.model_config.num_key_value_heads": 3},
    "key heads that tp does not divide": {
        "model.model_config.num_attention_heads": 15,
        "model.model_config.hidden_size": 960,
        "model.model_config.num_key_value_heads": 3,
    },
    "width that the heads do not divide": {"model.model_config.hidden_size": 1000},
    "mlp that tp does not divide": {"model.model_config.intermediate_size": 4097},
    "expert parallelism": {"parallelism.expert_parallel_size": 2},
    "a schedule that does not exist": {"parallelism.pp_engine": "zb-h1"},
    "a mode that does not exist": {"parallelism.tp_mode": "SEQUENCE"},
    "overlap without sequence parallelism": {
        "parallelism.tp_mode": "ALL_REDUCE",
        "parallelism.tp_linear_async_communication": True,
    },
    "a precision that does not exist": {"model.dtype": "float8"},
    "a number that is none": {"tokens.micro_batch_size": "two"},
    "no replicas": {"parallelism.dp": None},
    "more experts a token than there are": {"model.model_config.moe_config.top_k": 9},
}


def refusal(text: str) -> str:
    """Refusal of a configuration before anything is exported or priced; empty where nothing is wrong."""
    try:
        return "; ".join(faults(read(text, LaunchContext())))
    except InputError as error:
        return str(error)


def defective(name: str) -> str:
    model = MOE if name == "more experts a token than there are" else SMALL
    return changed(DEFECTS[name], nanotron(model, tp=2, sp=True, pp=2, dp_shard=2))


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_refused(name: str) -> None:
    assert refusal(changed({})) == ""
    assert refusal(defective(name)) != ""


def checkout() -> Path:
    folder = os.environ.get("NANOTRON_DIR", "")
    if not (Path(folder) / "src" / "nanotron" / "config").is_dir():
        pytest.skip("NANOTRON_DIR does not name a checkout of nanotron")
    return Path(folder)


def test_nanotron_accepts_what_is_exported_and_refuses_the_defects() -> None:
    folder = checkout()
    if missing := [name for name in ("torch", "dacite", "datasets") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"nanotron needs {', '.join(missing)}")
    queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    asked: list[Any] = [[file.best.plan.num_devices, queue, text_of(file)] for file in PLANS.values()]
    asked += [[8, queue, defective(name)] for name in DEFECTS]
    asked += [[16, queue, changed({})], [8, {}, changed({})]]  # another number of devices; many queues
    answers = ask("nanotron_parser.py", asked, environment={"NANOTRON_DIR": str(folder)})
    for name, answer in zip(PLANS, answers, strict=False):
        assert "error" not in answer, (name, answer)
        plan, model = PLANS[name].best.plan, PLANS[name].model
        assert answer["stages"] == list(layers_per_stage(model, plan.pp)), name
        assert answer["global_batch"] == plan.global_batch, name
        assert answer["engine"] == ENGINES[plan.schedule], name
        assert answer["tp_mode"] == ("REDUCE_SCATTER" if plan.sp else "ALL_REDUCE"), name
        assert answer["model"]["num_key_value_heads"] == model.kv_heads, name
        assert answer["model"]["tie_word_embeddings"] is model.tied_embeddings, name
    for name, answer in zip(DEFECTS, answers[len(PLANS) :], strict=False):
        assert "error" in answer, (name, answer)
    assert "WORLD_SIZE=16" in answers[-2]["error"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in answers[-1]["error"]


# What a person reads in the examples: fields of the model, of the plan, tokens of a sequence.
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "examples/config_tiny_llama.yaml": (
        {"num_layers": 28, "hidden_size": 2048, "ffn_size": 11008, "num_kv_heads": 2, "tied_embeddings": True},
        {"dp_shard": 4, "tp": 2, "sp": True, "tp_overlap": True, "micro_batch": 3, "global_batch": 12},
        4096,
    ),
    "examples/config_qwen.yaml": (
        {"num_layers": 36, "num_heads": 16, "num_kv_heads": 4, "vocab_size": 128256, "moe": None},
        {"dp_shard": 2, "tp": 2, "sharding": "none", "recompute": "none", "global_batch": 6},
        4096,
    ),
    "examples/config_qwen_with_moe.yaml": (
        {
            "num_layers": 12,
            "hidden_size": 256,
            "window": 20,
            "moe": Experts(
                num_experts=8,
                experts_per_token=1,
                expert_ffn_size=1408,
                shared_expert_ffn_size=5632,
                shared_expert_gate=True,
            ),
        },
        {"dp_shard": 2, "tp": 1, "sp": False, "global_batch": 6},
        4096,
    ),
    "examples/doremi/configs/config_2.8b_llama.yaml": (
        {"num_layers": 6, "hidden_size": 4096, "ffn_size": 24576, "num_kv_heads": 16},
        {"dp_shard": 8, "tp": 2, "micro_batch": 64, "global_batch": 512},
        1024,
    ),
    "examples/mup/configs/mup_350m_llama_config.yaml": (
        {"num_layers": 14, "hidden_size": 1024, "tied_embeddings": False},
        {"dp_shard": 4, "tp": 2, "micro_batch": 32},
        1024,
    ),
    "examples/config_resume_training.yaml": (
        {"num_layers": 30, "hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "rope_base": 1e5},
        {"dp_shard": 2, "tp": 1, "pp": 1, "micro_batch": 2},
        256,
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_read_as_a_person_reads_it(name: str) -> None:
    text = (checkout() / name).read_text()
    model, plan, seq_len = EXAMPLES[name]
    assert recognises(Path(name).name, text)
    launch = read(text, LaunchContext())
    assert {key: getattr(launch.model, key) for key in model} == model
    assert {key: getattr(launch.plan, key) for key in plan} == plan
    assert launch.training.seq_len == seq_len


@pytest.mark.parametrize("name", ["examples/mamba/config_mamba.yaml", "examples/moe/config_llamoe.yaml"])
def test_an_example_of_another_architecture_asks_for_the_model(name: str) -> None:
    text = (checkout() / name).read_text()
    with pytest.raises(InputError, match="pass --model"):
        read(text, LaunchContext())
    assert read(text, LaunchContext(model=LLAMA_8B)).model == LLAMA_8B


def test_plans_are_those_of_the_search() -> None:
    assert (
        ParallelPlan(global_batch=8, sharding="none", param_gather_overlap=False)
        == read(changed({"optimizer.zero_stage": 0}, nanotron(global_batch=8)), LaunchContext()).plan
    )


def test_an_encoder_beside_the_model_of_text_is_listed_where_the_person_gives_the_model() -> None:
    launch = read(
        changed({"model.model_config": {"text_config": {"hidden_size": 8}, "vision_config": {"hidden_size": 8}}}),
        LaunchContext(model=LLAMA_8B),
    )
    assert [item.option for item in launch.unread if item.matters] == ["model.model_config.vision_config"]

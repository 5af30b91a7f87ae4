"""Does DeepSpeed accept what is exported for it, refuse what the rules refuse, and is the plan read back?"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.api.problem import make_problem, make_space
from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.deepspeed.export import deepspeed_config
from autoplan.frameworks.deepspeed.read import read, recognises
from autoplan.frameworks.deepspeed.rules import RULES
from autoplan.frameworks.presets import load_framework
from autoplan.launch.targets import job_of
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Experts
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.workload import Workload
from framework_parsers import ask
from test_megatron_lm_export import DEEPSEEK, LLAMA_8B, LLAMA_70B, plan_file_of

ZERO = load_framework("deepspeed-zero")
NEWEST, WITH_MICS = "0.19.8", "0.19.6"
MOE = replace(LLAMA_8B, name="moe", moe=Experts(num_experts=64, experts_per_token=4, expert_ffn_size=1408))


def zero(model: ModelSpec = LLAMA_8B, seq_len: int = 4096, **plan: Any) -> PlanFile:
    sharding = plan.get("sharding", "zero2")
    usual = {"sharding": sharding, "param_gather_overlap": sharding != "none", "grad_dtype": "bf16"}
    file = plan_file_of(model, seq_len=seq_len, **usual | plan)
    return replace(file, framework=ZERO)


PLANS: dict[str, PlanFile] = {
    "one device": zero(sharding="none"),
    "replicas": zero(sharding="none", dp_shard=8, precision="fp16"),
    "zero1": zero(sharding="zero1", dp_shard=16, micro_batch=2),
    "zero2": zero(dp_shard=8, recompute="full"),
    "zero3": zero(LLAMA_70B, 8192, sharding="zero3", dp_shard=64, recompute="full", global_batch=512),
    "24 replicas": zero(sharding="zero3", dp_shard=24, global_batch=480, micro_batch=4),
    "on the host": zero(LLAMA_70B, sharding="zero3", dp_shard=16, offload="optimizer"),
    "zero1 on the host": zero(sharding="zero1", dp_shard=8, offload="optimizer"),
    "nothing overlapped": zero(sharding="zero3", dp_shard=8, grad_reduce_overlap=False, param_gather_overlap=False),
    "tensors": zero(tp=4, dp_shard=4, tp_overlap=True),
    "tensors in shards": zero(LLAMA_70B, sharding="zero3", tp=8, dp_shard=4),
    "ulysses": zero(sharding="zero3", cp=8, cp_kind="all_to_all", dp_shard=4, seq_len=65536, global_batch=64),
    "ulysses with copied keys": zero(sharding="zero3", cp=16, cp_kind="all_to_all", dp_shard=2),
    "wide accumulators": zero(sharding="zero1", dp_shard=8, grad_dtype="fp32"),
    "wide accumulators in shards": zero(sharding="zero3", dp_shard=8, grad_dtype="fp32"),
    "compressed": zero(
        sharding="zero3", dp_shard=16, quantized_gathers=True, quantized_reductions=True, secondary_shard=8
    ),
    "experts": zero(MOE, ep=8, dp_shard=16),
    "experts and tensors": zero(MOE, tp=2, ep=4, dp_shard=8),
    "experts in shards": zero(MOE, sharding="zero3", ep=16, dp_shard=32),
    "latent attention": zero(DEEPSEEK, ep=32, dp_shard=64, recompute="full"),
}


def text_of(file: PlanFile, version: str = NEWEST) -> str:
    return job_of(file, f"deepspeed@{version}").files[0].text


def given_for(file: PlanFile, **variables: str) -> LaunchContext:
    return LaunchContext(
        model=file.model,
        num_devices=file.best.plan.num_devices,
        seq_len=file.training.seq_len,
        variables=tuple(variables.items()),
    )


def test_a_configuration_says_what_deepspeed_reads() -> None:
    file = zero(sharding="zero3", dp_shard=16, micro_batch=2, recompute="full", offload="optimizer")
    assert json.loads(text_of(file)) == {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500000000,
            "allgather_bucket_size": 500000000,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "activation_checkpointing": {"number_checkpoints": 32},
    }
    job = job_of(file, "deepspeed")
    assert (job.program, job.trailing) == ('"$TRAIN_SCRIPT"', ('"$CONFIG_OPTION" "$HERE/deepspeed.json"',))
    script, option = job.variables
    assert script.default is None
    assert "takes DeepSpeedCPUAdam" in script.note
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --bf16" in option.note


def test_checkpoints_that_are_none_are_not_recomputed() -> None:
    table = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
    context = LaunchContext(model=load_model("llama3-8b"), seq_len=4096, num_devices=8)
    for number, recompute in ((0, "none"), (32, "full")):
        table["activation_checkpointing"] = {"number_checkpoints": number}
        assert read(json.dumps(table), context).plan.recompute == recompute


def test_states_over_a_part_of_the_replicas_need_mics() -> None:
    file = zero(sharding="zero3", dp_shard=8, dp_replicate=4)
    assert json.loads(text_of(file, WITH_MICS))["zero_optimization"]["mics_shard_size"] == 8
    with pytest.raises(InputError, match="zero3 over 8 of 32 replicas: MiCS was removed"):
        text_of(file)
    assert read(text_of(file, WITH_MICS), given_for(file)).plan == file.best.plan


REFUSED: dict[str, tuple[PlanFile, str]] = {
    "stages": (zero(pp=4, sharding="zero1"), "pp 4: the script gives the stages to PipelineModule"),
    "gradients in stages": (zero(pp=4), "zero2 needs pp 1"),
    "sequence parallelism": (zero(tp=4, sp=True), "AutoTP keeps whole sequences"),
    "ring attention": (zero(cp=2), "cp_kind 'ring' does not exist"),
    "ulysses with tensors": (zero(tp=2, cp=2, cp_kind="all_to_all"), "Ulysses knows no tensor parallelism"),
    "wide accumulators of copies": (zero(dp_shard=2, sharding="none", grad_dtype="fp32"), "gradients in fp32 without"),
    "offload without shards": (zero(dp_shard=2, sharding="none", offload="optimizer"), "needs ZeRO"),
    "fp8": (zero(dp_shard=2, precision="fp8"), "precision 'fp8' does not exist"),
    "gathering that waits": (zero(dp_shard=2, param_gather_overlap=False), "param_gather_overlap off with zero2"),
    "partial zero2": (zero(dp_shard=2, dp_replicate=2), "zero2 shards over all replicas"),
    "selective recomputation": (zero(recompute="selective"), "recompute 'selective' does not exist"),
    "order of ranks": (zero(rank_order="tp-cp-ep-pp-dp"), "rank_order"),
    "odd batch": (zero(dp_shard=8, global_batch=63), "must be divisible by micro_batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_deepspeed_cannot_express_is_refused_in_one_line(case: str) -> None:
    file, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        text_of(file)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


# -- round trips ------------------------------------------------------------------------------------------------------

degrees = st.sampled_from([1, 2, 4, 8])


@st.composite
def plan_files(draw: st.DrawFn) -> PlanFile:
    model, sharding = draw(st.sampled_from([LLAMA_8B, MOE])), draw(st.sampled_from(["none", "zero1", "zero2", "zero3"]))
    tp, cp, dp = draw(degrees), draw(degrees), draw(st.integers(1, 24))
    micro, replicas = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2])) if sharding == "zero3" else 1
    ep = draw(degrees)
    takes_zero_plus_plus = sharding == "zero3" and tp == cp == ep == replicas == 1
    return zero(
        model,
        tp=tp,
        cp=cp,
        cp_kind="all_to_all" if cp > 1 else "ring",
        ep=ep,
        dp_shard=dp,
        dp_replicate=replicas,
        micro_batch=micro,
        global_batch=micro * dp * replicas * draw(st.integers(1, 20)),
        sharding=sharding,
        recompute=draw(st.sampled_from(["none", "full"])),
        precision=(precision := draw(st.sampled_from(["bf16", "fp16"]))),
        grad_dtype=draw(st.sampled_from(["bf16", "fp32"])) if precision == "bf16" else "bf16",
        quantized_gathers=takes_zero_plus_plus and draw(st.booleans()),
        quantized_reductions=takes_zero_plus_plus and draw(st.booleans()),
        secondary_shard=draw(st.sampled_from([1, 1, 2])) if takes_zero_plus_plus else 1,
        offload=draw(st.sampled_from(["none", "optimizer"])),
        tp_overlap=tp > 1 and draw(st.booleans()),
        grad_reduce_overlap=draw(st.booleans()),
        param_gather_overlap=draw(st.booleans()) if sharding == "zero3" else sharding != "none",
    )


@settings(max_examples=60)
@given(plan_files())
def test_what_is_exported_is_read_back(file: PlanFile) -> None:
    try:
        text = text_of(file, WITH_MICS)
    except InputError:
        assume(False)
        raise
    assert recognises("deepspeed.json", text)
    launch = read(text, given_for(file))
    assert (launch.plan, launch.model, launch.training) == (file.best.plan, file.model, file.training)
    assert [option.option for option in launch.unread if option.matters] == (
        [] if file.best.plan.recompute == "full" else ["activation_checkpointing"]
    )


# -- reading ----------------------------------------------------------------------------------------------------------


def changed(changes: dict[str, Any], file: PlanFile | None = None) -> str:
    """A configuration with other values under dotted keys; None takes one out."""
    config = deepspeed_config(file or zero(dp_shard=8, micro_batch=2), NEWEST)
    for name, value in changes.items():
        *sections, key = name.split(".")
        table = functools.reduce(lambda inside, section: inside.setdefault(section, {}), sections, config)
        if value is None:
            del table[key]
        else:
            table[key] = value
    return json.dumps(config)


def launch_of(changes: dict[str, Any], **variables: str) -> Launch:
    return read(
        changed(changes), LaunchContext(model=LLAMA_8B, num_devices=8, seq_len=4096, variables=tuple(variables.items()))
    )


def test_the_type_of_the_reduction_is_read() -> None:
    assert launch_of({"communication_data_type": "fp32"}).plan.reduce_dtype == "fp32"
    assert launch_of({"communication_data_type": "bf16"}).plan.reduce_dtype == "usual"


@pytest.mark.parametrize(("stage", "ratio", "offload", "percent"), [(3, 0.3, "optimizer", 30), (3, 0, "none", 100)])
def test_stage_3_offloads_a_part_of_the_optimizer(stage: int, ratio: float, offload: str, percent: int) -> None:
    on_host = {"device": "cpu", "ratio": ratio}
    plan = launch_of({"zero_optimization.stage": stage, "zero_optimization.offload_optimizer": on_host}).plan
    assert (plan.offload, plan.offload_percent) == (offload, percent)


def test_earlier_stages_offload_the_whole_optimizer_whatever_the_ratio() -> None:
    on_host = {"device": "cpu", "ratio": 0.3}
    plan = launch_of({"zero_optimization.stage": 2, "zero_optimization.offload_optimizer": on_host}).plan
    assert (plan.offload, plan.offload_percent) == ("optimizer", 100)


def test_16_bit_weights_beside_wide_moments_are_not_priced() -> None:
    both = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    plan = launch_of({"bf16": {"enabled": True} | both}).plan
    assert (plan.main_weights, plan.moment_dtype) == ("bf16", "bf16")
    weights_alone = launch_of({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}})
    assert (weights_alone.plan.main_weights, weights_alone.plan.moment_dtype) == ("fp32", "fp32")
    assert "bf16.bf16_master_weights_and_grads" in {item.option for item in weights_alone.unread}


BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize("missing", BATCHES)
def test_two_batch_sizes_give_the_third(missing: str) -> None:
    plan = launch_of({missing: None}).plan
    assert (plan.global_batch, plan.micro_batch, plan.num_microbatches) == (256, 2, 16)


def test_three_batch_sizes_give_the_devices() -> None:
    assert read(changed({}), LaunchContext(model=LLAMA_8B, seq_len=4096)).plan.num_devices == 8
    with pytest.raises(InputError, match="pass --devices"):
        read(changed({"train_batch_size": None}), LaunchContext(model=LLAMA_8B, seq_len=4096))
    with pytest.raises(InputError, match="pass --model"):
        read(changed({}), LaunchContext())


def test_the_trainer_fills_in_what_is_auto() -> None:
    automatic = {
        **dict.fromkeys(BATCHES, "auto"),
        "bf16.enabled": "auto",
        "fp16.enabled": "auto",
        "zero_optimization.reduce_bucket_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    with pytest.raises(InputError, match="--set BF16=true"):
        launch_of(automatic)
    with pytest.raises(InputError, match="--set PER_DEVICE_TRAIN_BATCH_SIZE=N"):
        launch_of(automatic, BF16="true")
    arguments = {"PER_DEVICE_TRAIN_BATCH_SIZE": "4", "GRADIENT_ACCUMULATION_STEPS": "2"}
    launch = launch_of(automatic, FP16="True", GRADIENT_CHECKPOINTING="true", **arguments)
    assert (launch.plan.global_batch, launch.plan.micro_batch, launch.plan.precision) == (64, 4, "fp16")
    assert launch.plan.recompute == "full"
    assert [option.option for option in launch.unread] == ["zero_optimization.reduce_bucket_size"]


def test_autotp_counts_its_ranks_as_replicas() -> None:
    changes = {"tensor_parallel": {"autotp_size": 4}}
    launch = launch_of(changes)  # 2 x 16 x 8 = 256 in the file, of which 4 ranks each see the same
    assert (launch.plan.tp, launch.plan.dp, launch.plan.global_batch) == (4, 2, 64)
    assert "a step has 64 sequences" in next(
        option.why for option in launch.unread if option.option == "train_batch_size"
    )


def test_stage_3_alone_offloads_parameters() -> None:
    both = {f"zero_optimization.offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")}
    assert launch_of({**both, "zero_optimization.stage": 3}).plan.offload == "parameters"
    assert launch_of({**both, "zero_optimization.stage": 2}).plan.offload == "optimizer"


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"zigzag": 3}, "zigzag"),
        # Of stage 3 alone; the file has stage 2.
        ({"zero_optimization.zero_hpz_partition_size": 4}, "zero_optimization.zero_hpz_partition_size"),
        ({"zero_optimization.zero_quantized_weights": True}, "zero_optimization.zero_quantized_weights"),
        ({"zero_optimization.reduce_bucket_size": 5e7}, "zero_optimization.reduce_bucket_size"),
        (
            {"zero_optimization.stage": 3, "zero_optimization.offload_param": {"device": "cpu", "pin_memory": True}},
            "zero_optimization.offload_param.device",
        ),
        (
            {"zero_optimization.offload_optimizer": {"device": "nvme", "pin_memory": True}},
            "zero_optimization.offload_optimizer.device",
        ),
        (  # the default until August 2026
            {"zero_optimization.offload_optimizer": {"device": "cpu"}},
            "zero_optimization.offload_optimizer.pin_memory",
        ),
        ({"zero_optimization.sub_group_size": 1e7}, "zero_optimization.sub_group_size"),
        ({"optimizer.type": "Lamb"}, "optimizer.type"),
        ({"optimizer.params": {"torch_adam": True}}, "optimizer.params"),
        ({"zero_optimization.stage3_prefetch_bucket_size": 1e9}, "zero_optimization.stage3_prefetch_bucket_size"),
        ({"pipeline.stages": 4}, "pipeline.stages"),
        (
            {"bf16": None, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads",
        ),
        (
            {"data_types.grad_accum_dtype": "fp32", "bf16": None, "fp16": {"enabled": True}},
            "data_types.grad_accum_dtype",
        ),
    ],
)
def test_what_is_not_priced_is_listed(changes: dict[str, Any], option: str) -> None:
    launch = launch_of(changes, GRADIENT_CHECKPOINTING="false")
    assert [unread.option for unread in launch.unread if unread.matters] == [option]


def test_one_device_may_keep_optimizer_and_gradients_of_stage_three_on_the_host() -> None:
    problem = make_problem("llama3-8b", cluster="a6000:1x1", seq_len=4096, framework="deepspeed-zero")
    plans, _ = (space := make_space(problem, 4)).plans(space.cells())
    found = {(plan.sharding, plan.offload) for plan in map(plans.plan, range(len(plans)))}
    assert {("zero1", "optimizer"), ("zero3", "optimizer"), ("zero3", "parameters")} <= found


# -- DeepSpeed itself -------------------------------------------------------------------------------------------------

# Single defects that DeepSpeed refuses: in its configuration, or in what its engine makes of it.
DEFECTS: dict[str, tuple[PlanFile, dict[str, Any]]] = {
    "batches that are no product": (zero(dp_shard=8), {"train_batch_size": 200}),
    "a device for nothing": (zero(dp_shard=8), {"train_micro_batch_size_per_gpu": 0}),
    "a batch below zero": (zero(dp_shard=8), {"gradient_accumulation_steps": -2}),
    "no batch": (zero(tp=8), {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None}),
    "a fourth stage": (zero(dp_shard=8), {"zero_optimization.stage": 4}),
    "a stage that is no number": (zero(dp_shard=8), {"zero_optimization.stage": "three"}),
    "two precisions": (zero(dp_shard=8), {"fp16": {"enabled": True}}),
    "a host that does not exist": (zero(dp_shard=8), {"zero_optimization.offload_optimizer": {"device": "disk"}}),
    "an overlap that is no choice": (zero(dp_shard=8), {"zero_optimization.overlap_comm": "perhaps"}),
    "expert groups that do not fit": (zero(MOE, ep=4, dp_shard=8), {"expert_parallel.autoep_size": 3}),
    "experts that tensors split": (zero(MOE, ep=4, dp_shard=8), {"expert_parallel.expert_tensor_parallel_size": 2}),
    "experts and tensors on the host": (
        zero(MOE, tp=2, ep=4, dp_shard=4),
        {"zero_optimization.offload_optimizer": {"device": "cpu"}},
    ),
    "ranks that tensors do not divide": (
        zero(MOE, ep=4, dp_shard=8),
        {"tensor_parallel": {"autotp_size": 3}, "train_batch_size": None},
    ),
    "heads that ulysses does not divide": (
        zero(replace(LLAMA_8B, num_heads=24, num_kv_heads=8, head_dim=128), cp=4, cp_kind="all_to_all", dp_shard=4),
        {"sequence_parallel_size": 16, "train_batch_size": None},
    ),
    "key heads that ulysses does not divide": (
        zero(replace(LLAMA_8B, num_heads=24, num_kv_heads=6, head_dim=128), cp=2, cp_kind="all_to_all", dp_shard=4),
        {"sequence_parallel_size": 4, "train_batch_size": None},
    ),
}


def refusal(text: str, file: PlanFile) -> str:
    """Refusal of a configuration before anything is exported or priced; empty where nothing is wrong."""
    try:
        launch = read(text, given_for(file))
    except InputError as error:
        return str(error)
    workload = Workload(model=launch.model, training=launch.training, num_devices=launch.plan.num_devices)
    return "; ".join(broken(RULES, workload, launch.plan))


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_refused(name: str) -> None:
    file, changes = DEFECTS[name]
    assert refusal(changed({}, file), file) == ""
    assert refusal(changed(changes, file), file) != ""


def test_a_key_that_is_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'train_batch_size' is given twice"):
        read('{"train_batch_size": 1, "train_batch_size": 2}', LaunchContext(model=LLAMA_8B, seq_len=8))


def test_deepspeed_accepts_what_is_exported_and_refuses_the_defects() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")

    def question(file: PlanFile, text: str) -> list[Any]:
        return [file.best.plan.num_devices, file.model.num_heads, file.model.kv_heads, text]

    asked = [question(file, text_of(file)) for file in PLANS.values()]
    asked += [question(file, changed(changes, file)) for file, changes in DEFECTS.values()]
    partial = zero(sharding="zero3", dp_shard=8, dp_replicate=4)
    asked += [question(partial, text_of(partial, WITH_MICS)), question(zero(), '{"bf16": {}, "bf16": {}}')]
    answers = ask("deepspeed_parser.py", asked)
    for name, answer in zip(PLANS, answers, strict=False):
        plan = PLANS[name].best.plan
        assert answer == {
            "never_read": [],
            "train_batch_size": plan.global_batch * plan.tp,  # AutoTP: its ranks are counted
            "micro_batch": plan.micro_batch,
            "steps": plan.num_microbatches,
            "stage": int(plan.sharding.removeprefix("zero").replace("none", "0")),
            "overlap_comm": plan.grad_reduce_overlap,
            "prefetch": 0 if plan.sharding == "zero3" and not plan.param_gather_overlap else 50000000,
            "offload": "cpu" if plan.offload == "optimizer" else False,
            "bf16": plan.precision == "bf16",
            "fp16": plan.precision == "fp16",
            "tp": plan.tp if plan.tp > 1 else 0,
            "ep": plan.ep,
        }, name
    for name, answer in zip(DEFECTS, answers[len(PLANS) :], strict=False):
        assert "error" in answer, (name, answer)
    assert "MiCS ZeRO-3 sharding has been removed" in answers[-2]["error"]
    assert "uplicate key" in answers[-1]["error"]


# What a person reads in the examples for this many devices: fields of the plan, what is told.
EXAMPLES: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "DeepSpeedExamples/training/bing_bert/deepspeed_bsz64k_lamb_config_seq128.json": (
        64,
        {"global_batch": 65536, "micro_batch": 64, "sharding": "none", "precision": "fp16", "dp_shard": 64},
        {"optimizer.type", "sparse_attention"},
    ),
    "DeepSpeedExamples/training/imagenet/config/ds_fp16_z1_config.json": (
        4,
        {"global_batch": 256, "micro_batch": 64, "sharding": "zero1", "precision": "fp16"},
        {"cuda_visible_devices"},
    ),
    "DeepSpeedExamples/training/bf16_master_weight/configs/baseline.json": (
        8,
        {"micro_batch": 4, "global_batch": 32, "sharding": "zero3", "precision": "bf16", "offload": "none"},
        {"zero_optimization.reduce_bucket_size", "zero_optimization.stage3_param_persistence_threshold"},
    ),
    "DeepSpeedExamples/benchmarks/autosp/configs/autosp_config.json": (
        2,
        {"cp": 2, "cp_kind": "all_to_all", "dp_shard": 1, "global_batch": 1},
        set(),
    ),
    "DeepSpeed/tests/model/Megatron_GPT2/ds_config_func_bs8_zero2_gas3.json": (
        4,
        {"micro_batch": 8, "global_batch": 96, "sharding": "zero2", "recompute": "full"},
        {"activation_checkpointing.partition_activations", "zero_optimization.reduce_bucket_size"},
    ),
    "DeepSpeed/tests/model/Megatron_GPT2/ds_config_func_bs8_zero2_offload.json": (
        4,
        {"global_batch": 8, "micro_batch": 2, "sharding": "zero2", "offload": "optimizer"},
        set(),
    ),
    "DeepSpeed/examples/sdma_allgather/ds_config_zero3.json": (
        8,
        {"micro_batch": 1, "global_batch": 8, "sharding": "zero3", "grad_reduce_overlap": True},
        {"zero_optimization.allgather_bucket_size"},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_read_as_a_person_reads_it(name: str) -> None:
    repository, _, inside = name.partition("/")
    variable = {"DeepSpeedExamples": "DEEPSPEED_EXAMPLES_DIR", "DeepSpeed": "DEEPSPEED_DIR"}[repository]
    path = Path(os.environ.get(variable, "")) / inside
    if not os.environ.get(variable) or not path.is_file():
        pytest.skip(f"{variable} does not name a checkout of {repository}")
    num_devices, plan, expected_unread = EXAMPLES[name]
    text = path.read_text()
    assert recognises(path.name, text)
    launch = read(text, LaunchContext(model=LLAMA_8B, num_devices=num_devices, seq_len=2048))
    assert {key: getattr(launch.plan, key) for key in plan} == plan
    assert launch.plan.num_devices == num_devices
    assert expected_unread <= {option.option for option in launch.unread}


def test_all_that_is_auto_is_asked_for_at_once() -> None:
    table = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3},
    }
    with pytest.raises(InputError) as error:
        read(json.dumps(table), LaunchContext())
    assert (
        "pass --model, --seq-len, --devices, --set PER_DEVICE_TRAIN_BATCH_SIZE=N, --set GRADIENT_ACCUMULATION_STEPS=N, "
        "--set BF16=true or --set FP16=true" in str(error.value)
    )


def test_gpt_neox_is_no_configuration_of_deepspeed() -> None:
    assert not recognises("1-3B.yml", '{ "train_micro_batch_size_per_gpu": 4, # a comment')

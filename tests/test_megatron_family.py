"""Do Megatron-LM, Megatron-Bridge and Primus take the plans that are written for them, and no others?

Their own parsers run from checkouts that MEGATRON_LM_DIR, MEGATRON_BRIDGE_DIR and PRIMUS_DIR name; without one of them
its tests are skipped.  Each is started once.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import LaunchContext, Reader
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_bridge import export as megatron_bridge
from autoplan.frameworks.megatron_bridge import read as bridge_in
from autoplan.frameworks.megatron_lm import export as megatron_lm
from autoplan.frameworks.megatron_lm import read as lm_in
from autoplan.frameworks.megatron_lm.export import checked_parts
from autoplan.frameworks.megatron_lm.versions import RELEASES, lacked
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.primus import export as primus
from autoplan.frameworks.primus import read as primus_in
from autoplan.launch.launcher import launch_files
from autoplan.launch.names import Launcher
from autoplan.launch.start import Start
from autoplan.launch.targets import exported
from autoplan.readers.model import load_model
from autoplan.spec.enums import RankOrder
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import chunk_layers
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.workload import Workload
from framework_parsers import ask
from megatron_plans import DEFECTS, LATENT, MATRIX, ZERO_BUBBLE, plan_files
from test_megatron_lm_export import LLAMA_8B, plan_file_of, words_of

NEEDS = {
    "megatron-lm": {"MEGATRON_LM_DIR": "megatron/training/arguments.py"},
    "megatron-bridge": {
        "MEGATRON_LM_DIR": "megatron/training/arguments.py",
        "MEGATRON_BRIDGE_DIR": "src/megatron/bridge/training/config.py",
    },
    "primus": {
        "MEGATRON_LM_DIR": "megatron/training/arguments.py",
        "PRIMUS_DIR": "primus/core/launcher/parser.py",
    },
    "schedule": {"PRIMUS_DIR": "primus/core/launcher/parser.py"},
}
PACKAGES = {"megatron-bridge": ("torch", "transformers", "hydra", "omegaconf", "einops")}
DATA = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "100", "--lr", "1e-4"]


def needs(kind: str) -> None:
    """Skip what a framework is asked that is not here."""
    for variable, place in NEEDS[kind].items():
        if not (Path(os.environ.get(variable, "/nowhere")) / place).is_file():
            pytest.skip(f"{variable} names no checkout")
    for package in PACKAGES.get(kind, ("torch",)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def ask_megatron(kind: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of a framework; skipped where it is not here."""
    needs(kind)
    return ask("megatron_parser.py", asked, kind)


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_is_given_no_option_that_it_lacks(release: str) -> None:
    """Plans within the limits of a release are exported, as far as it has the model; others are refused."""
    of_models = ("--rope-type", "--moe-shared-expert-gate", "--moe-router-padding-for-quantization", "--window-size")
    for name, plan_file in MATRIX.items():
        plan = plan_file.best.plan
        workload = Workload(model=plan_file.model, training=plan_file.training, num_devices=plan.num_devices)
        refusal = ""
        try:
            megatron_lm.job(plan_file, release)
        except InputError as error:
            refusal = str(error)
        if broken(lacked(release), workload, plan):
            assert f"Megatron-LM {release} has no --" in refusal, name
        else:
            assert not refusal or any(option in refusal for option in of_models), name
    uneven = MATRIX["dense, uneven stages"]
    if release == "0.12":
        with pytest.raises(InputError, match=r"0\.12 has no --pipeline-model-parallel-layout, which is of 0\.13"):
            exported(uneven, "megatron-lm@0.12", "torchrun")
    else:
        assert exported(uneven, f"megatron-lm@{release}", "torchrun")


def question(plan_file: PlanFile, **said: Any) -> dict[str, Any]:
    environment = {
        variable.name: variable.value for variable in megatron_lm.environment(plan_file) if variable.value is not None
    }
    return {"world": plan_file.best.plan.num_devices, "environment": environment, **said}


def lm_question(plan_file: PlanFile) -> dict[str, Any]:
    return question(plan_file, words=words_of(plan_file, rules=()) + DATA)


def bridge_question(plan_file: PlanFile) -> dict[str, Any]:
    return question(plan_file, text=megatron_bridge.recipe(plan_file))


def primus_question(plan_file: PlanFile) -> dict[str, Any]:
    return question(plan_file, text=primus.experiment(plan_file))


QUESTIONS: dict[str, Callable[[PlanFile], dict[str, Any]]] = {
    "megatron-lm": lm_question,
    "megatron-bridge": bridge_question,
    "primus": primus_question,
}


@cache
def answers_of(kind: str) -> dict[str, dict[str, Any]]:
    """What a framework makes of the whole matrix and of every defect, its rules left out."""
    needs(kind)
    files = MATRIX | (ZERO_BUBBLE if kind == "primus" else {}) | {name: file for name, (file, _) in DEFECTS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_bridge, "RULES", ())
        patch.setattr(primus, "RULES", ())
        asked = [QUESTIONS[kind](file) for file in files.values()]
    return dict(zip(files, ask_megatron(kind, asked), strict=True))


@pytest.mark.parametrize("name", MATRIX | ZERO_BUBBLE)
@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_plan_is_written_and_the_framework_takes_it(kind: str, name: str) -> None:
    if name in ZERO_BUBBLE and kind != "primus":
        with pytest.raises(InputError, match="plan and export for primus"):
            QUESTIONS_WITH_RULES[kind](ZERO_BUBBLE[name])
        return
    file = (MATRIX | ZERO_BUBBLE)[name]
    QUESTIONS_WITH_RULES[kind](file)
    answer = answers_of(kind)[name]
    assert "error" not in answer, answer["error"]
    plan, model = file.best.plan, file.model
    assert tuple(answer["stages"]) == chunk_layers(plan, model.num_layers)
    values_by_name = {key.rpartition(".")[2]: value for key, value in answer.items()}
    expected: dict[str, Any] = {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "context_parallel_size": plan.cp,
        "virtual_pipeline_model_parallel_size": plan.vp if plan.vp > 1 else None,
        "sequence_parallel": plan.sp,
        "data_parallel_size": plan.dp,
        "global_batch_size": plan.global_batch,
        "micro_batch_size": plan.micro_batch,
        "use_distributed_optimizer": plan.sharding != "none",
        "overlap_grad_reduce": plan.grad_reduce_overlap,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "recompute_granularity": None if plan.recompute == "none" else plan.recompute,
    }
    if model.moe:
        expected |= {"expert_model_parallel_size": plan.ep, "expert_tensor_parallel_size": plan.etp}
    if kind != "megatron-bridge":
        expected |= {
            "swiglu": model.gated_mlp and not model.clamped_activation,  # else quick_geglu
            "add_bias_linear": model.mlp_bias,
            "untie_embeddings_and_output_weights": not model.tied_embeddings,
            "vocab_size": model.vocab_size,
            "num_distributed_optimizer_instances": 1 if plan.sharding == "none" else plan.dp_replicate,
            "use_tp_pp_dp_mapping": plan.rank_order == RankOrder.PP_BEFORE_DP,
            "multi_latent_attention": model.mla is not None,
            "use_megatron_fsdp": plan.sharding in ("zero2", "zero3"),
            "optimizer_cpu_offload": plan.offload == "optimizer",
        }
    if plan.schedule in primus.ALGORITHMS:
        expected |= {"pp_algorithm": primus.ALGORITHMS[plan.schedule], "patch_primus_pipeline": True}
    assert {key: values_by_name.get(key) for key in expected} == expected


QUESTIONS_WITH_RULES: dict[str, Callable[[PlanFile], Any]] = {
    "megatron-lm": checked_parts,
    "megatron-bridge": megatron_bridge.recipe,
    "primus": primus.experiment,
}


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.parametrize("kind", QUESTIONS)
def test_one_defect_is_refused_before_the_framework_refuses_it(kind: str, name: str) -> None:
    file, refuses_early = DEFECTS[name]
    with pytest.raises(InputError, match="does not support the plan") as error:
        QUESTIONS_WITH_RULES[kind](file)
    assert "\n" not in str(error.value)
    if kind == "megatron-bridge":
        # It warns and turns the overlap off (training/comm_overlap.py), and lets the gathers pass, of which only the
        # arguments of Megatron-LM know that they wait for the reductions, and the experts until the layer is built
        # (core/transformer/moe/moe_layer.py).
        refuses_early &= name not in ("overlap without sp", "gather without reduce", "number of experts")
    assert ("error" in answers_of(kind)[name]) is refuses_early, answers_of(kind)[name].get("error")


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_primus_runs_every_pass_of_a_split_schedule(name: str) -> None:
    """Forward, input gradient and weight gradient of every micro-batch and chunk, on every rank."""
    shapes = [(pp, m) for pp in (2, 4) for m in (2 * pp - 1, 2 * pp, 2 * pp + 3)]
    if name == "zb-h1":
        shapes += [(2, 1), (4, 2)]
    chunks = 2 if name == "zb-v" else 1
    algorithm = primus.ALGORITHMS[name]
    asked = [{"algorithm": algorithm, "pp": pp, "vp": chunks, "num_microbatches": m} for pp, m in shapes]
    for (pp, m), answer in zip(shapes, ask_megatron("schedule", asked), strict=True):
        assert answer.get("passes") == [[m * chunks] * 3] * pp, (pp, m, answer)


def test_primus_fills_the_table_of_zb_v_with_micro_batches_that_do_not_exist() -> None:
    (answer,) = ask_megatron("schedule", [{"algorithm": "zbv-formatted", "pp": 4, "vp": 2, "num_microbatches": 4}])
    assert answer["passes"] == [[14] * 3] * 4  # of 7, which is why fewer are refused
    few = replace(ZERO_BUBBLE["zb-v"], best=replace(ZERO_BUBBLE["zb-v"].best, plan=FEW_MICRO_BATCHES))
    with pytest.raises(InputError, match="zb-v needs 2 pp - 1 = 7 micro-batches, there are 4"):
        primus.experiment(few)


FEW_MICRO_BATCHES = replace(ZERO_BUBBLE["zb-v"].best.plan, global_batch=4)


# -- there and back ---------------------------------------------------------------------------------------------------


def without_name(model: ModelSpec) -> ModelSpec:
    return ModelSpec(**{**{name: getattr(model, name) for name in model.__dataclass_fields__}, **UNNAMED})


UNNAMED: dict[str, Any] = {"name": "any", "aliases": (), "sources": ()}


def assert_comes_back(reader: Reader, name: str, text: str, file: PlanFile) -> None:
    assert [
        candidate.target
        for candidate in (lm_in.READER, bridge_in.READER, primus_in.READER)
        if candidate.recognises(name, text)
    ] == [reader.target]
    devices = file.best.plan.num_devices
    launch = reader.read(text, LaunchContext(num_devices=None if reader is lm_in.READER else devices))
    assert launch.plan == file.best.plan
    assert without_name(launch.model) == without_name(file.model)
    assert launch.training == file.training
    # Of what is priced, all is read.
    assert [option for option in launch.unread if option.matters] == []


FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@FEW
@given(plan_files())
def test_what_is_written_for_megatron_lm_is_read_back(file: PlanFile) -> None:
    launchers: tuple[Launcher, ...] = ("torchrun", "slurm")
    for launcher in launchers:
        text = next(
            launch_file.text
            for launch_file in launch_files(Start.of(file, megatron_lm.job(file), launcher))
            if launch_file.name == "launch.sh"
        )
        assert_comes_back(lm_in.READER, "launch.sh", text, file)
    words = shlex.join(words_of(file))
    launch = lm_in.READER.read(words, LaunchContext(num_devices=file.best.plan.num_devices))
    assert launch.plan == file.best.plan


def test_megatron_bridge_is_told_of_attention_in_8_bits_where_it_is_priced() -> None:
    line = "cfg.mixed_precision.fp8_dot_product_attention = True"
    cluster = plan_file_of(LLAMA_8B).cluster
    cluster = replace(cluster, device=replace(cluster.device, generation="blackwell"))
    for narrow in (False, True):
        file = plan_file_of(LLAMA_8B, cluster, dp_shard=8, precision="mxfp8", fp8_attention=narrow)
        text = megatron_bridge.recipe(file)
        assert (line in text) == narrow
        assert bridge_in.READER.read(text, LaunchContext(num_devices=8)).plan.fp8_attention == narrow


def test_weights_in_4_bits_are_refused_for_the_release_of_megatron_bridge_that_ignores_them() -> None:
    cluster = plan_file_of(LLAMA_8B).cluster
    cluster = replace(cluster, device=replace(cluster.device, generation="blackwell"))
    narrow = plan_file_of(LLAMA_8B, cluster, dp_shard=8, precision="nvfp4", narrow_params=True)
    assert "cfg.mixed_precision.fp4_param_gather = True" in megatron_bridge.job(narrow, "main").files[0].text
    with pytest.raises(InputError, match=r"keeps 16-bit weights: leave it out or export for main$"):
        megatron_bridge.job(narrow, "0.3")
    for precision, is_narrow in (("mxfp8", True), ("nvfp4", False)):
        file = plan_file_of(LLAMA_8B, cluster, dp_shard=8, precision=precision, narrow_params=is_narrow)
        assert megatron_bridge.job(file, "0.3").files


def test_recipes_of_megatron_bridge_fuse_what_plans_say() -> None:
    """Providers leave the rotation of MLA and of others alone, which is priced as fused."""
    for fuses in (False, True):
        file = plan_file_of(LATENT, tp=2, sp=True, ep=8, dp_shard=8, rope_fusion=fuses, router_fusion=fuses)
        text = megatron_bridge.recipe(file)
        assert f"cfg.model.apply_rope_fusion = {fuses}\n" in text
        assert f"cfg.model.moe_router_fusion = {fuses}\n" in text
    assert "cfg.model.apply_rope_fusion = True" in megatron_bridge.recipe(plan_file_of(LLAMA_8B, dp_shard=8))


@FEW
@given(plan_files())
def test_what_is_written_for_megatron_bridge_is_read_back(file: PlanFile) -> None:
    assert_comes_back(bridge_in.READER, "recipe.py", megatron_bridge.recipe(file), file)


@FEW
@given(plan_files(zero_bubble=True))
def test_what_is_written_for_primus_is_read_back(file: PlanFile) -> None:
    assert_comes_back(primus_in.READER, "primus.yaml", primus.experiment(file), file)


def test_squared_relu_stays_what_it_is() -> None:
    """Nemotron-4 was exported with GELU."""
    nemotron = load_model("nemotron4-15b")
    assert nemotron.squared_relu
    file = replace(plan_file_of(nemotron, tp=2, dp_shard=4), framework=load_framework("megatron-core"))
    (group,) = (group for group in exported(file, "megatron-lm", "torchrun") if group.name == "launch.sh")
    assert "--squared-relu" in group.text
    recipe = megatron_bridge.recipe(file)
    assert "cfg.model.activation_func = squared_relu" in recipe
    assert "from megatron.core.activations import squared_relu" in recipe
    assert primus.overrides(file)["squared_relu"] is True
    for reader, text in ((lm_in.READER, group.text), (bridge_in.READER, recipe)):
        assert reader.read(text, LaunchContext(num_devices=8)).model.squared_relu


def test_a_base_that_is_no_whole_number_goes_to_bridge_alone() -> None:
    """Megatron-LM parses --rotary-base as a whole number (training/arguments.py)."""
    odd = plan_file_of(replace(LLAMA_8B, rope_base=999999.44), dp_shard=8)
    recipe = megatron_bridge.recipe(odd)
    assert "rotary_base = 999999.44" in recipe or "rotary_base=999999.44" in recipe
    context = LaunchContext(num_devices=8, seq_len=odd.training.seq_len)
    assert bridge_in.READER.read(recipe, context).model.rope_base == 999999.44
    for write in (checked_parts, primus.experiment):
        with pytest.raises(InputError, match=r"rope_base 999999.44 \(Bridge takes it\)"):
            write(odd)

"""Does torchtitan accept what is exported for it, refuse what the rules refuse, and is the plan read back?"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.kernels.arithmetic import count_parameters, count_trained_parameters
from autoplan.frameworks.common.job import Job
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.launch_files import read_launch
from autoplan.frameworks.torchtitan.export import module_text
from autoplan.frameworks.torchtitan.options import spread, stages
from autoplan.frameworks.torchtitan.read import _facts, read, recognises
from autoplan.frameworks.torchtitan.rules import RULES
from autoplan.launch.targets import exported, job_of
from autoplan.readers.model import load_model
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, chunk_layers
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.workload import Workload
from damage import damaged
from framework_parsers import ask
from read_back import matters
from test_megatron_lm_export import DEEPSEEK, GPT_OSS, LLAMA_8B, cluster_of, plan_file_of

TITAN = Framework(name="torchtitan", rules="torchtitan")
QWEN = load_model("qwen3-0.6b")
QWEN_MOE = replace(load_model("qwen3-30b-a3b"), num_layers=6, ffn_size=0)
SINKS = replace(GPT_OSS, num_layers=4)
DEEP = replace(DEEPSEEK, num_layers=8, num_mtp_layers=0)
LLAMA = replace(LLAMA_8B, num_layers=10, hidden_size=1024, num_heads=16, ffn_size=2816)


def bare(model: ModelSpec) -> ModelSpec:
    return replace(model, aliases=(), sources=())


def titan(model: ModelSpec = LLAMA, **plan: Any) -> PlanFile:
    """A plan for Blackwell devices; like those of a search, it spells out its layers where they are not even."""
    plan = ({"fp8_scaling": "rowwise"} if plan.get("precision") == "fp8" else {}) | plan
    counts = chunk_layers(ParallelPlan(**{"global_batch": 256, **plan}), model.num_layers)
    plan["layers_per_chunk"] = counts if len(set(counts)) > 1 else None
    cluster = cluster_of(-(-ParallelPlan(**{"global_batch": 256, **plan}).num_devices // 8), "blackwell")
    has_shards = plan.get("dp_shard", 1) * plan.get("cp", 1) > 1
    plan_file = plan_file_of(bare(model), cluster, **{"sharding": "zero3" if has_shards else "none", **plan})
    return replace(plan_file, framework=TITAN)


def tuned(finetuning: FineTuning, model: ModelSpec = LLAMA, **plan: Any) -> PlanFile:
    plan_file = titan(model, main_weights="bf16", **plan)
    return replace(plan_file, training=replace(plan_file.training, finetuning=finetuning))


COMMAND = "torchrun --nproc_per_node=8 --nnodes 2 -m torchtitan.train --module llama3 --config llama3_8b"
SEVEN = (1, 2, 2, 2, 1, 1, 0, 1)
PLANS: dict[str, PlanFile] = {
    "one device": titan(sharding="none"),
    "fsdp": titan(dp_shard=8, recompute="selective"),
    "zero2 in copies": titan(dp_replicate=2, dp_shard=8, sharding="zero2", micro_batch=2, recompute="full"),
    "unsharded": titan(dp_shard=24, sharding="none", global_batch=48),
    "tensors": titan(tp=4, sp=True, dp_shard=2, tp_overlap=True),
    "tensors without sequence": titan(tp=2, dp_shard=2),
    "context": titan(tp=2, sp=True, cp=4, dp_shard=2),
    "pipeline": titan(pp=3, dp_shard=4, micro_batch=2, global_batch=48),
    "gpipe": titan(pp=2, dp_replicate=2, dp_shard=2, schedule="gpipe", global_batch=4),
    "uneven": titan(pp=8, layers_per_chunk=SEVEN, sharding="none", global_batch=16),
    "interleaved": titan(tp=2, sp=True, pp=2, vp=3, schedule="interleaved", dp_shard=8, precision="mxfp8"),
    "zero bubble": titan(pp=4, schedule="zb-h1", dp_shard=2),
    "zb-v": titan(pp=2, vp=2, schedule="zb-v", dp_shard=2),
    "dualpipe-v": titan(pp=2, vp=2, schedule="dualpipe-v", dp_shard=2, precision="nvfp4"),
    "tied": titan(QWEN, tp=8, sp=True, dp_shard=4),
    "experts": titan(QWEN_MOE, tp=2, sp=True, ep=8, dp_shard=8, dp_replicate=2, precision="fp8"),
    "experts of tensors": titan(QWEN_MOE, tp=2, sp=True, etp=2, dp_shard=8),
    "latent": titan(DEEP, tp=2, sp=True, pp=2, vp=2, schedule="interleaved", ep=16, dp_shard=16, precision="fp8"),
    "prediction": titan(replace(DEEP, num_mtp_layers=1), ep=8, dp_shard=8),
    "loss in pieces": titan(tp=2, sp=True, dp_shard=4, chunked_loss="chunks"),
    "kernel of torch": titan(dp_shard=8, attention="flash2"),
    "sinks": titan(SINKS, ep=4, cp=2, dp_shard=4),
    "adapters": tuned(FineTuning(rank=8, targets=("all-linear",)), tp=2, sp=True, dp_shard=4),
    "adapters of some": tuned(FineTuning(rank=4, alpha=4, targets=("q_proj", "k_proj", "v_proj")), QWEN, dp_shard=8),
}


def read_back(job: Job, **given: Any) -> Launch:
    (file,) = job.files
    assert recognises(file.name, file.text)
    return read(file.text, LaunchContext(**given))


GOLDEN = {"module.py": ("latent", "0.3"), "main.py": ("uneven", "main"), "old.toml": ("old", "0.2")}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_file_is_the_golden_one(name: str) -> None:
    plan, version = GOLDEN[name]
    plan_file = PLANS[plan] if plan in PLANS else titan(load_model("llama3.1-8b"), tp=2, sp=True, pp=3, dp_shard=4)
    text = job_of(plan_file, f"torchtitan@{version}").files[0].text
    golden = Path(__file__).parent / "golden" / "torchtitan" / f"{name}.txt"
    if not golden.exists():
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
        pytest.fail(f"{golden.name} was missing and is written now: read it before it is kept")
    assert text == golden.read_text()


@pytest.mark.parametrize("version", ["0.3", "main"])
@pytest.mark.parametrize("name", PLANS)
def test_a_module_is_read_back_to_its_plan(name: str, version: str) -> None:
    plan_file = PLANS[name]
    launch = read_back(job_of(plan_file, f"torchtitan@{version}"))
    assert (launch.model, launch.training, launch.plan) == (plan_file.model, plan_file.training, plan_file.best.plan)
    assert launch.unread == ()


@pytest.mark.parametrize(
    ("finetuning", "says"),
    [
        (FineTuning(rank=8, quantization="nf4"), "torchtitan cannot express frozen weights in nf4"),
        (FineTuning(rank=8, targets=("k_proj",)), r"adapters on k_proj .it takes q_proj, .* keys with values"),
        (FineTuning(rank=8, dropout=0.1), "dropout of adapters, 0.1"),
        (FineTuning(frozen=("embed_tokens",)), "full fine-tuning, embed_tokens frozen"),
    ],
)
def test_what_torchtitan_trains_otherwise_is_refused(finetuning: FineTuning, says: str) -> None:
    with pytest.raises(InputError, match=says):
        job_of(tuned(finetuning, dp_shard=8), "torchtitan")


def test_adapters_need_weights_in_16_bits_and_version_3() -> None:
    tuning = FineTuning(rank=8, targets=("all-linear",))
    wide = titan(dp_shard=8)
    with pytest.raises(InputError, match="adapters beside frozen weights in fp32: plan with main_weights=bf16"):
        job_of(replace(wide, training=replace(wide.training, finetuning=tuning)), "torchtitan")
    with pytest.raises(InputError, match=r"adapters in version 0\.2: export for 0\.3"):
        job_of(tuned(tuning, load_model("llama3.1-8b"), dp_shard=8), "torchtitan@0.2")
    module = job_of(tuned(tuning, dp_shard=8), "torchtitan").files[0].text
    for listed, why in (('"w1", "w3", "w2"', "on w9 are not priced"), ("target_modules=", "adapts the head too")):
        changed = module.replace(listed, '"w9"' if why.startswith("on") else "others=")
        with pytest.raises(InputError, match=why):
            read(changed, LaunchContext())


@st.composite
def plans(draw: st.DrawFn) -> PlanFile:
    model = draw(st.sampled_from((LLAMA, QWEN, QWEN_MOE, DEEP, SINKS)))
    schedule, vp = draw(
        st.sampled_from(
            (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 3), ("zb-v", 2), ("dualpipe-v", 2), ("1f1b", 1))
        )
    )
    pp = draw(st.sampled_from((2, 3, 4))) if (schedule, vp) != ("1f1b", 1) else draw(st.sampled_from((1, 1, 2, 5)))
    tp, cp, shard = (draw(st.sampled_from((1, 2, 4))) for _ in range(3))
    is_sharded = shard * cp > 1 and draw(st.booleans())
    replicate = draw(st.sampled_from((1, 3))) if is_sharded else 1
    ep = draw(st.sampled_from((1, 2, 4))) if model.moe else 1
    micro = draw(st.sampled_from((1, 2)))
    layers = None
    if pp * vp > 1 and draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, model.num_layers), min_size=pp * vp - 1, max_size=pp * vp - 1)))
        layers = tuple(b - a for a, b in zip((0, *cuts), (*cuts, model.num_layers), strict=True))
    try:
        return titan(
            model,
            tp=tp,
            sp=tp > 1 and draw(st.booleans()),
            cp=cp,
            pp=pp,
            vp=vp,
            schedule=schedule,
            layers_per_chunk=layers,
            ep=ep,
            etp=tp if model.moe and ep == 1 else 1,
            dp_replicate=replicate,
            dp_shard=shard,
            sharding=("zero3" if pp > 1 else draw(st.sampled_from(("zero2", "zero3")))) if is_sharded else "none",
            micro_batch=micro,
            global_batch=micro * shard * replicate * pp * draw(st.integers(1, 6)),
            recompute=draw(st.sampled_from(("none", "selective", "full"))),
            precision=draw(st.sampled_from(("bf16", "fp8", "mxfp8"))),
        )
    except InputError:
        assume(False)
        raise


@settings(max_examples=60, deadline=None)
@given(plans())
def test_whatever_it_runs_is_read_back(plan_file: PlanFile) -> None:
    try:
        job = job_of(plan_file, "torchtitan")
    except InputError:
        assume(False)
        raise
    launch = read_back(job)
    assert (launch.model, launch.training, launch.plan) == (plan_file.model, plan_file.training, plan_file.best.plan)


# -- what people run -------------------------------------------------------------------------------------------------


def checkout_of(variable: str) -> Path:
    place = os.environ.get(variable)
    if not place or not (Path(place) / "torchtitan").is_dir():
        pytest.skip(f"{variable} does not name a folder with torchtitan")
    return Path(place)


def public(variable: str, path: str, **given: Any) -> Launch:
    text = (checkout_of(variable) / path).read_text()
    assert recognises(Path(path).name, text)
    return read(text, LaunchContext(**given))


def test_run_train_sh_starts_the_config_that_is_named() -> None:
    launch = public("TORCHTITAN_DIR", "run_train.sh", variables=(("MODULE", "llama3"), ("CONFIG", "llama3_8b")))
    assert launch.model == replace(load_model("llama3.1-8b"))
    assert launch.training.seq_len == 8192
    assert launch.training.fused_norm is False
    assert launch.plan == ParallelPlan(
        dp_shard=8, sharding="zero3", recompute="selective", global_batch=8, chunked_loss="chunks"
    )


def test_the_slurm_script_starts_four_nodes() -> None:
    launch = public("TORCHTITAN_DIR", "multinode_trainer.slurm", variables=(("CONFIG", "llama3_70b"),))
    assert launch.plan == ParallelPlan(
        tp=8,
        sp=True,
        dp_shard=4,
        sharding="zero3",
        recompute="full",
        micro_batch=8,
        global_batch=32,
        chunked_loss="chunks",
    )
    assert launch.model == load_model("llama3.1-70b")


def test_a_function_of_a_registry_is_followed_to_the_one_that_it_changes() -> None:
    path = "torchtitan/models/deepseek_v3/config_registry.py"
    given: dict[str, Any] = {"num_devices": 256, "variables": (("CONFIG", "deepseek_v3_671b_float8"),)}
    launch = public("TORCHTITAN_DIR", path, **given)
    assert launch.model == replace(load_model("deepseek-v3"), num_mtp_layers=0)
    assert (launch.plan.ep, launch.plan.dp_shard, launch.plan.precision) == (2, 256, "fp8")
    assert (launch.plan.micro_batch, launch.training.seq_len, launch.plan.recompute) == (4, 4096, "selective")
    assert launch.plan.chunked_loss == "chunks"


def test_several_functions_of_a_registry_ask_for_a_name() -> None:
    with pytest.raises(InputError, match="name one with --set CONFIG=NAME"):
        public("TORCHTITAN_DIR", "torchtitan/models/llama3/config_registry.py")


def test_a_toml_of_llama_405b_is_its_plan() -> None:
    launch = public("TORCHTITAN_02_DIR", "torchtitan/models/llama3/train_configs/llama3_405b.toml", num_devices=512)
    assert launch.model == load_model("llama3.1-405b")
    assert launch.plan == ParallelPlan(
        tp=8,
        sp=True,
        tp_overlap=True,
        dp_shard=64,
        sharding="zero3",
        recompute="full",
        precision="fp8",
        fp8_scaling="tensorwise",  # its default: no version of the file names a recipe
        micro_batch=2,
        global_batch=128,
    )
    assert [item.option for item in launch.unread] == ["quantize.linear.float8.enable_fsdp_float8_all_gather"]


@pytest.mark.parametrize(
    ("recipe", "scaling", "unread"),
    [
        ("", "tensorwise", 0),
        ('recipe_name = "tensorwise"', "tensorwise", 0),
        ('recipe_name = "rowwise"', "rowwise", 0),
        ('recipe_name = "rowwise_with_gw_hp"', "rowwise", 1),
    ],
)
def test_a_toml_says_what_its_products_have_a_scale_for(recipe: str, scaling: str, unread: int) -> None:
    text = f"""
[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
[quantize.linear.float8]
{recipe}
"""
    launch = read(text, LaunchContext(num_devices=8))
    assert (launch.plan.precision, launch.plan.fp8_scaling) == ("fp8", scaling)
    assert len([item for item in launch.unread if "recipe_name" in item.option]) == unread


def test_names_of_versions_before_02_are_read() -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
implementation = "foreach"
[training]
batch_size = 4
seq_len = 4096
compile = true
data_parallel_shard_degree = 2
tensor_parallel_degree = 2
[experimental]
pipeline_parallel_degree = 2
enable_async_tensor_parallel = true
"""
    launch = read(text, LaunchContext())
    plan = launch.plan
    assert (plan.tp, plan.pp, plan.dp_shard, plan.global_batch, plan.tp_overlap) == (2, 2, 2, 8, True)
    assert launch.training.fused_norm is None  # compiled
    assert matters(launch) - {"activation_checkpoint.selective_ac_option"} == {"optimizer.implementation"}
    with pytest.raises(InputError, match="makes images"):
        read(text.replace("llama3", "flux"), LaunchContext())


@pytest.mark.parametrize(("switch", "precision"), [("true", "fp8"), ("false", "bf16")])
def test_products_in_8_bits_have_a_switch_of_their_own_before_02(switch: str, precision: str) -> None:
    text = f"""
[model]
flavor = "8B"
[training]
batch_size = 2
warmup_steps = 200
data_parallel_shard_degree = 8
[float8]
enable_float8_linear = {switch}
"""
    launch = read(text, LaunchContext(num_devices=8, seq_len=2048))
    assert launch.plan.precision == precision
    assert not {"float8", "training.warmup_steps"} & matters(launch)


def test_options_of_a_section_in_a_section_are_read_from_a_command_line(tmp_path: Path) -> None:
    text = '[model]\nflavor = "8B"\nconverters = ["float8"]\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n'
    (tmp_path / "llama.toml").write_text(text)
    command = "CONFIG_FILE=llama.toml NGPU=8 ./run_train.sh --quantize.linear.float8.recipe_name rowwise"
    launch = read(command, LaunchContext(folder=tmp_path))
    assert launch.plan.fp8_scaling == "rowwise"
    assert not {"module", "config", "quantize.linear.float8"} & matters(launch)


@pytest.mark.parametrize(("norm", "unread"), [("rmsnorm", 0), ("layernorm", 1)])
def test_keys_of_a_model_that_torchtitan_does_not_have_are_listed(norm: str, unread: int) -> None:
    text = f"""
[model]
norm_type = "{norm}"
backbone = "dinov3_vitl16"
num_classes = 9
rope_kind = "own"
[training]
batch_size = 2
data_parallel_shard_degree = -1
"""
    launch = read(text, LaunchContext(num_devices=8, model=load_model("llama3-8b")))
    listed = {item.option for item in launch.unread if item.matters}
    assert {"model.backbone", "model.num_classes", "model.rope_kind"} <= listed
    assert len([item for item in launch.unread if item.option == "model.norm_type"]) == unread


def test_a_toml_of_deepseek_is_its_plan() -> None:
    path = "torchtitan/models/deepseek_v3/train_configs/deepseek_v3_16b.toml"
    launch = public("TORCHTITAN_02_DIR", path, num_devices=64)
    assert launch.model == replace(load_model("deepseek-v2-lite"), num_mtp_layers=0)
    assert (launch.plan.ep, launch.plan.etp, launch.plan.dp_shard, launch.plan.micro_batch) == (8, 1, 64, 4)
    assert {option.option for option in launch.unread} == {"compile.enable"}


WRONG: dict[str, tuple[str, str]] = {
    "devices": (f"{COMMAND} --parallelism.tensor_parallel_degree 3", "16 devices do not divide"),
    "a schedule": (
        f"{COMMAND} --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule X",
        "'x'",
    ),
    "a variable": (f"{COMMAND} --training.seq_len $SEQ_LEN", "give it with --set NAME=VALUE"),
    "a config": (COMMAND.replace("llama3_8b", "mine"), "read the Python file that has it"),
    "a number": (f"{COMMAND} --training.seq_len long", "training.seq_len must be a whole number"),
    "a batch": (f"{COMMAND} --training.global_batch_size 20", "must be a multiple of 1 on 16 replicas"),
    "an old file": ("torchrun -m torchtitan.train --job.config_file my.toml", "read that file"),
    "an older one": ("srun torchrun ./train.py --job.config_file my.toml", "starts 'my.toml' of torchtitan 0.2: read"),
    "a value": (
        "from torchtitan.models.llama3 import model_registry\ndef plan():\n    return Trainer.Config("
        "model_spec=model_registry('8B'), training=TrainingConfig(seq_len=int(open('x').read())), "
        "parallelism=ParallelismConfig(data_parallel_shard_degree=8))\n",
        "training.seq_len = int cannot be read",
    ),
    "python": ("from torchtitan.trainer import Trainer.Config\n", "not valid Python"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_said_in_one_line(case: str) -> None:
    text, says = WRONG[case]
    with pytest.raises(InputError) as error:
        read(text, LaunchContext())
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_policy_is_read_as_an_option_too() -> None:
    """Before policies were subcommands, they were values of an option."""
    launch = read(f"{COMMAND} --activation_checkpoint.mode none", LaunchContext())
    assert launch.plan.recompute == "none"
    launch = read(f"{COMMAND} --activation_checkpoint.memory_budget 0.5", LaunchContext())
    assert "activation_checkpoint.memory_budget" in matters(launch)


def test_a_command_line_changes_its_config() -> None:
    words = (
        "--parallelism.tensor-parallel-degree=4 --parallelism.no-enable-sequence-parallel --compile.enable "
        "--training.global_batch_size 32 --training.local_batch_size 4 --training.enable_cpu_offload "
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule Interleaved1F1B "
        "--parallelism.pipeline_parallel_microbatch_size 2 --parallelism.wonder 1 activation_checkpoint:full"
    )
    launch = read(f"{COMMAND} {words}", LaunchContext())
    assert launch.plan == ParallelPlan(
        tp=4,
        dp_shard=2,
        pp=2,
        vp=2,
        schedule="interleaved",
        layers_per_chunk=(8, 9, 8, 7),
        sharding="zero3",
        recompute="full",
        micro_batch=2,
        global_batch=32,
        chunked_loss="chunks",
    )
    options = {"training.local_batch_size", "training.enable_cpu_offload", "parallelism.wonder"}
    assert {option.option for option in launch.unread} == options


WHOLE = [
    job_of(PLANS["latent"], "torchtitan").files[0].text,
    job_of(PLANS["sinks"], "torchtitan@main").files[0].text,
    job_of(titan(load_model("llama3.1-8b"), tp=2, sp=True, pp=2, dp_shard=2), "torchtitan@0.2").files[0].text,
    f"X=${{Y:-4}}\n{COMMAND} --parallelism.tensor_parallel_degree $X --compile.enable activation_checkpoint:full",
]


@settings(max_examples=120, deadline=None)
@given(damaged(WHOLE))
def test_a_damaged_file_is_read_or_refused(text: str) -> None:
    with suppress(InputError):
        assert read(text, LaunchContext(num_devices=16)).plan.num_devices == 16


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--debug.deterministic", "debug.deterministic"),
        ("--debug.detect_anomaly", "debug.detect_anomaly"),
        ("--debug.seed 1 --debug.no_deterministic", ""),
        ("--override.imports mine.fused_experts", "override.imports"),
        ("--compile.enable --compile.backend aot_eager", "compile.backend"),
        ("--parallelism.context_parallel_load_balancer None", ""),  # of one rank
        ("--parallelism.context_parallel_degree 2", ""),
        ("--parallelism.context_parallel_degree 2 --parallelism.context_parallel_load_balancer None", "balancer"),
        ("--parallelism.context_parallel_degree 2 --parallelism.context_parallel_load_balancer ptrr", ""),
        ("--parallelism.spmd_backend partial_dtensor", "parallelism.spmd_backend"),
    ],
)
def test_what_changes_kernels_and_hosts_is_listed(words: str, option: str) -> None:
    name = "parallelism.context_parallel_load_balancer" if option == "balancer" else option
    launch, plain = (read(line, LaunchContext()) for line in (f"{COMMAND} {words}", COMMAND))
    assert matters(launch) - matters(plain) == {name} - {""}


def test_settings_of_a_table_that_is_not_known_are_listed() -> None:
    text = (
        "from torchtitan.models.llama3 import model_registry\ndef plan(base):\n"
        "    return Trainer.Config(model_spec=model_registry('8B'), **of_fields(base))\n"
    )
    unread = read(text, LaunchContext(num_devices=8)).unread
    assert ("**", "of_fields") in [(item.option, item.value) for item in unread]


def test_settings_of_a_module_that_a_file_names_are_listed() -> None:
    text = '[job]\ncustom_config_module = "mine"\n[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n'
    listed = {item.option for item in read(text, LaunchContext(num_devices=8)).unread}
    assert "job.custom_config_module" in listed


def test_a_file_whose_functions_call_one_another_again_and_again_is_refused() -> None:
    calls = "\n".join(f"def f{at}():\n    x = f{at + 1}()\n    return f{at + 1}()" for at in range(40))
    with pytest.raises(InputError, match="more than 100,000 steps"):
        read(f"from torchtitan import trainer  # Trainer.Config\n{calls}\n", LaunchContext())


def test_a_script_that_was_exported_names_the_file_with_the_plan() -> None:
    script = 'exec torchrun --nnodes 1 --nproc-per-node 8 "$HERE/plan_cfg.py" --module plan_cfg --config plan "$@"\n'
    assert recognises("launch.sh", script)
    with pytest.raises(InputError, match="read the Python file that has it"):
        read(script, LaunchContext())


def written(folder: Path, plan_file: PlanFile, version: str) -> tuple[Path, Path]:
    """The script that starts a plan, and the file beside it that holds the plan."""
    script, beside = exported(plan_file, f"torchtitan@{version}", "torchrun")
    for file in (script, beside):
        (folder / file.name).write_text(file.text)
    return folder / script.name, folder / beside.name


@pytest.mark.parametrize(("name", "version"), [("latent", "0.3"), ("uneven", "main"), ("dense", "0.2")])
def test_a_script_is_read_with_the_file_beside_it_and_what_it_changes_of_that(
    tmp_path: Path, name: str, version: str
) -> None:
    plan_file = OLD[name] if version == "0.2" else PLANS[name]
    script, beside = written(tmp_path, plan_file, version)
    assert read_launch(script, LaunchContext()).plan == read_launch(beside, LaunchContext()).plan == plan_file.best.plan
    assert not any(option.matters for option in read_launch(script, LaunchContext()).unread)
    changed = "max_context_length" if version == "main" else "seq_len"
    script.write_text(script.read_text().replace("--metrics.log_freq 1", f"--training.{changed} 1024"))
    assert read_launch(script, LaunchContext()).training == replace(plan_file.training, seq_len=1024)
    beside.unlink()
    with pytest.raises(InputError, match=r"read the Python file that has it|of torchtitan 0\.2: read that file"):
        read_launch(script, LaunchContext())


def test_the_registry_of_a_module_comes_before_the_module(tmp_path: Path) -> None:
    script, beside = written(tmp_path, PLANS["fsdp"], "0.3")
    (tmp_path / "plan_cfg").mkdir()
    beside.rename(tmp_path / "plan_cfg" / "config_registry.py")
    beside.write_text("def plan():\n    return 1\n")
    assert read_launch(script, LaunchContext()).plan == PLANS["fsdp"].best.plan
    with pytest.raises(InputError, match=r"no function 'other' gives a Trainer\.Config: known are plan"):
        read(script.read_text().replace("--config plan", "--config other"), LaunchContext(folder=tmp_path))


# -- version 0.2 ------------------------------------------------------------------------------------------------------

OLD: dict[str, PlanFile] = {
    "dense": titan(load_model("llama3.1-8b"), tp=2, sp=True, pp=2, dp_shard=2, tp_overlap=True),
    "uneven": titan(
        load_model("llama3.1-405b"),
        tp=8,
        sp=True,
        pp=16,
        dp_shard=4,
        layers_per_chunk=(7, *(8,) * 14, 7),
        precision="fp8",
        fp8_scaling="tensorwise",
    ),
    "experts": titan(QWEN_MOE, ep=8, dp_shard=8, dp_replicate=2, recompute="full", precision="mxfp8"),
    "latent": titan(
        replace(DEEPSEEK, num_mtp_layers=0), tp=2, sp=True, pp=8, vp=2, schedule="interleaved", ep=16, dp_shard=16
    ),
    "context": titan(load_model("qwen3-8b"), cp=2, dp_shard=4, sharding="zero2", recompute="selective"),
}
OLD["experts"] = replace(OLD["experts"], model=bare(load_model("qwen3-30b-a3b")))


@pytest.mark.parametrize("name", OLD)
def test_a_toml_of_version_02_is_read_back_to_its_plan(name: str) -> None:
    plan_file = OLD[name]
    launch = read_back(job_of(plan_file, "torchtitan@0.2"))
    assert (launch.training, launch.plan) == (plan_file.training, plan_file.best.plan)
    assert bare(launch.model) == replace(plan_file.model, name=launch.model.name)
    assert launch.unread == ()


REFUSED: dict[str, tuple[PlanFile, str, str]] = {
    "sizes without a name": (titan(dp_shard=8), "0.2", "none of the sizes of 'llama3-8b'"),
    "a pipeline of qwen": (titan(load_model("qwen3-8b"), pp=2), "0.2", "a pipeline of qwen3"),
    "no sequence parallelism": (titan(load_model("llama3.1-8b"), tp=2), "0.2", "tp without sp"),
    "nvfp4 of old": (titan(load_model("llama3.1-8b"), dp_shard=8, precision="nvfp4"), "0.2", "'nvfp4' in version 0.2"),
    "scales of tensors": (
        titan(dp_shard=8, precision="fp8", fp8_scaling="tensorwise"),
        "0.3",
        "fp8_scaling tensorwise",
    ),
    "four bits of experts": (titan(QWEN_MOE, dp_shard=8, precision="nvfp4"), "0.3", "'nvfp4' of experts"),
    "biases": (titan(replace(LLAMA, qkv_bias=True), dp_shard=8), "0.3", "no model with the blocks of 'llama3-8b'"),
    "windows": (titan(replace(LLAMA, window=4096), dp_shard=8), "0.3", "no model with the blocks"),
    "shared experts": (
        titan(replace(QWEN_MOE, moe=replace(QWEN_MOE.moe, shared_expert_ffn_size=768)), dp_shard=8),  # type: ignore[type-var]
        "0.3",
        "no model with the blocks",
    ),
    "odd heads": (titan(replace(LLAMA, head_dim=128), dp_shard=8), "0.3", "no model with the blocks"),
    "another order": (titan(pp=2, dp_shard=4, rank_order="tp-cp-ep-pp-dp"), "0.3", "numbers stages last"),
    "overlapped experts": (titan(DEEP, ep=8, dp_shard=8, ep_overlap=True), "0.3", "ep_overlap"),
    "no overlap": (titan(dp_shard=8, grad_reduce_overlap=False), "0.3", "grad_reduce_overlap"),
    "a broken rule": (titan(dp_shard=8, sharding="zero1"), "0.3", "use 'none' or 'zero2' or 'zero3'"),
    "an old device": (
        replace(titan(dp_shard=8, precision="mxfp8"), cluster=cluster_of(1, "hopper")),
        "0.3",
        "'mxfp8' on hopper-80g",
    ),
    "a version": (titan(dp_shard=8), "0.1", "known are torchtitan@0.3, torchtitan@0.2, torchtitan@main"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_in_one_line(case: str) -> None:
    plan_file, version, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        job_of(plan_file, f"torchtitan@{version}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


HOSTILE = 'x\'"; import os\n"""\nos.abort()\u2028 \\'


def test_hostile_names_stay_inert() -> None:
    tame = titan(dp_shard=8)
    hostile = replace(
        tame,
        command=HOSTILE,
        versions={HOSTILE: HOSTILE},
        model=replace(tame.model, name=HOSTILE.replace("\n", "").replace("\u2028", "")),
        cluster=replace(tame.cluster, name=HOSTILE.replace("\n", "").replace("\u2028", "")),
    )
    text, plain = module_text(hostile, "0.3"), module_text(tame, "0.3")
    assert len(text.splitlines()) == len(plain.splitlines())
    assert read(text, LaunchContext()).model == hostile.model


# -- torchtitan itself ------------------------------------------------------------------------------------------------

# One defect each: the model, a plan that is accepted, and what makes it wrong.
MUTATIONS: dict[str, tuple[ModelSpec, dict[str, Any], dict[str, Any]]] = {
    "kv heads": (LLAMA, {"tp": 8, "sp": True}, {"tp": 16}),
    "heads": (replace(LLAMA, num_kv_heads=None), {"tp": 4}, {"tp": 3}),
    "batch": (LLAMA, {"dp_shard": 8}, {"global_batch": 252}),
    "micro-batch": (LLAMA, {"dp_shard": 8, "micro_batch": 4}, {"micro_batch": 24}),
    "tied stages": (QWEN, {"pp": 1, "dp_shard": 2}, {"pp": 2, "dp_shard": 1, "sharding": "none"}),
    "sequence of context": (LLAMA, {"cp": 4}, {"cp": 3}),
    "sequence of tensors": (
        replace(LLAMA, num_heads=12, num_kv_heads=6, head_dim=None, hidden_size=768),
        {"tp": 2, "sp": True},
        {"tp": 3},
    ),
    "expert ranks": (QWEN_MOE, {"ep": 4, "dp_shard": 4, "dp_replicate": 2}, {"ep": 8}),
    "prediction in stages": (
        replace(DEEP, num_mtp_layers=1),
        {"dp_shard": 2},
        {"pp": 2, "dp_shard": 1, "sharding": "none"},
    ),
    "prediction of parts": (replace(DEEP, num_mtp_layers=1), {"dp_shard": 2}, {"cp": 2, "dp_shard": 1}),
}
# The command line of version 0.3, with what makes it wrong, on 8 devices.
WORDS: dict[str, list[str]] = {
    "a name": ["--parallelism.tensor_parallel_size", "2"],
    "a word": ["--parallelism.pipeline_parallel_schedule", "2F2B", "--parallelism.pipeline_parallel_degree", "2"],
    "graphs in stages": ["--parallelism.pipeline_parallel_degree", "2", "--training.no-disable-cuda-graphs"],
    "devices": ["--parallelism.tensor_parallel_degree", "3"],
    "two stages of a single schedule": ["--parallelism.pipeline_parallel_layers_per_stage", "2"],
}
SPREADS = [(2, 32, 1, 1), (8, 61, 1, 1), (4, 10, 0, 2), (16, 126, 1, 1), (5, 7, 1, 1)]


def asked(plan_file: PlanFile, version: str, *, build: bool = False) -> dict[str, Any]:
    job = job_of(plan_file, f"torchtitan@{version}")
    words = shlex.split(" ".join(job.trailing).replace('"$STEPS"', "100"))
    files = {file.name: file.text for file in job.files}
    return {"files": files, "words": words, "world": plan_file.best.plan.num_devices, "build": build}


def mutated(name: str) -> tuple[PlanFile, PlanFile]:
    model, plan, change = MUTATIONS[name]
    return titan(model, **plan), titan(model, **(plan | change))


def as_written(plan_file: PlanFile) -> dict[str, Any]:
    """Questions to the parser on a plan that export refuses."""
    files, words = {"plan_cfg.py": module_text(plan_file, "0.3")}, ["--module", "plan_cfg", "--config", "plan"]
    return {"files": files, "words": words, "world": plan_file.best.plan.num_devices}


@pytest.fixture(scope="module")
def answered() -> dict[str, Any]:
    """Answers of the installed torchtitan 0.3, by question."""
    if find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    questions: dict[str, Any] = {
        f"plan {name}": asked(plan_file, "0.3", build=True) for name, plan_file in PLANS.items()
    }
    for name in MUTATIONS:
        good, bad = mutated(name)
        questions |= {f"good {name}": as_written(good), f"bad {name}": as_written(bad)}
    usual = asked(PLANS["pipeline"], "0.3")
    for name, words in WORDS.items():
        questions[f"words {name}"] = {**usual, "words": [*usual["words"], *words]}
    questions |= {"registry": "registry", "flavors": "flavors", "spread": {"spread": SPREADS}}
    return dict(zip(questions, ask("torchtitan_parser.py", list(questions.values())), strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_torchtitan_accepts_the_plan_and_means_the_same(name: str, answered: dict[str, Any]) -> None:
    answer, plan, model = answered[f"plan {name}"], PLANS[name].best.plan, PLANS[name].model
    assert "error" not in answer, answer["error"]
    parallelism, training = answer["values"]["parallelism"], answer["values"]["training"]
    assert answer["dp_shard"] * answer["dp_replicate"] == plan.dp
    assert answer["dp_shard"] == (plan.dp_shard if plan.sharding != "none" else 1)
    assert parallelism["expert_parallel_degree"] == plan.ep
    assert training["global_batch_size"] == plan.global_batch
    steps = plan.global_batch // (training["local_batch_size"] * plan.dp)
    pieces = training["local_batch_size"] // parallelism["pipeline_parallel_microbatch_size"] if plan.pp > 1 else 1
    assert steps * pieces == plan.num_microbatches
    if plan.pp > 1:
        layers = [sum(name.startswith("layers.") for name in stage) for stage in answer["stages"]]
        assert tuple(layers) == chunk_layers(plan, model.num_layers)
    finetuning = PLANS[name].training.finetuning
    adapters = count_trained_parameters(model, finetuning) if finetuning else 0
    assert answer["parameters"] == count_parameters(model, with_mtp=True) + adapters


@pytest.mark.parametrize("name", MUTATIONS)
def test_rules_and_torchtitan_refuse_the_same_defect(name: str, answered: dict[str, Any]) -> None:
    good, bad = mutated(name)
    for plan_file in (good, bad):
        plan = plan_file.best.plan
        workload = Workload(model=plan_file.model, training=plan_file.training, num_devices=plan.num_devices)
        assert bool(broken(RULES, workload, plan)) is (plan_file is bad)
    assert "error" not in answered[f"good {name}"]
    assert "error" in answered[f"bad {name}"]


@pytest.mark.parametrize("name", WORDS)
def test_torchtitan_refuses_a_wrong_command_line(name: str, answered: dict[str, Any]) -> None:
    assert "error" in answered[f"words {name}"]


def test_layers_are_spread_as_torchtitan_spreads_them(answered: dict[str, Any]) -> None:
    assert [stages(spread(*case), "lm_head") for case in SPREADS] == answered["spread"]


def test_known_configs_are_those_of_the_registry(answered: dict[str, Any]) -> None:
    policies = {"FullAC.Config": "full", "SelectiveAC.Config": "selective", "NoneType": "none"}
    registry, known = answered["registry"], _facts()
    for family, configs in known["configs"].items():
        for name, row in configs.items():
            real, mine = registry[f"{family} {name}"], known["defaults"] | row
            assert mine["activation_checkpoint"] == policies[real["policy"]], name
            assert known["flavors"][family][real["flavor"]] == mine["model"], name
            kept = {key: value for key, value in mine.items() if key in real}
            assert kept == {key: real[key] for key in kept}, name
            unnamed = {"pipeline_parallel_degree": 1, "context_parallel_degree": 1, "global_batch_size": -1}
            assert unnamed.items() <= real.items(), name


def test_known_flavors_have_the_parameters_of_their_presets(answered: dict[str, Any]) -> None:
    for family, flavors in _facts()["flavors"].items():
        for flavor, name in flavors.items():
            assert answered["flavors"][f"{family} {flavor}"] == count_parameters(load_model(name)), name


@pytest.mark.parametrize(("variable", "version"), [("TORCHTITAN_02_DIR", "0.2"), ("TORCHTITAN_DIR", "main")])
def test_other_versions_accept_what_is_exported_for_them(variable: str, version: str) -> None:
    checkout = checkout_of(variable)
    pytest.importorskip("torch")
    plan_files = OLD if version == "0.2" else PLANS
    questions = [asked(plan_file, version) for plan_file in plan_files.values()]
    found = ask("torchtitan_parser.py", questions, environment={"TORCHTITAN_FIRST": str(checkout)})
    assert {name: answer.get("error") for name, answer in zip(plan_files, found, strict=True)} == dict.fromkeys(
        plan_files
    )

"""Do the readers of what starts Megatron-Core say what is missing or wrong, and list what they do not understand?"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.megatron_bridge import read as megatron_bridge
from autoplan.frameworks.megatron_lm import read as megatron_lm
from autoplan.frameworks.megatron_lm.notation import layout_counts, moe_places
from autoplan.frameworks.primus import read as primus
from autoplan.readers.model import load_model
from read_back import matters

OPTIONS = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope"
    " --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 128256"
    " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1"
    " --global-batch-size 64 --bf16 --transformer-impl transformer_engine"
)
SCRIPT = "OPTIONS=({options})\ntorchrun --nproc_per_node=8 --nnodes $NNODES pretrain_gpt.py ${{OPTIONS[@]}} $EXTRA\n"


def read(options: str = "", **given: Any) -> Launch:
    return megatron_lm.READER.read(f"{OPTIONS} {options}", LaunchContext(**{"num_devices": 16, **given}))


@pytest.mark.parametrize(
    ("options", "attention"),
    [
        ("", "flash"),
        ("--transformer-impl transformer_engine", "flash"),
        ("--transformer-impl local", "unfused"),
        ("--transformer-impl local --use-flash-attn", "flash2"),
        ("--transformer-impl local --attention-backend flash", "flash2"),
        ("--attention-backend fused", "cudnn"),
        ("--attention-backend AttnBackend.unfused", "unfused"),
    ],
)
def test_attention_of_local_layers_is_not_fused(options: str, attention: str) -> None:
    launch = read(options)
    assert launch.plan.attention == attention
    assert matters(launch) == set()


def test_gradients_are_added_up_in_products_unless_told_otherwise() -> None:
    assert read().plan.gradient_accumulation_fusion
    assert not read("--no-gradient-accumulation-fusion").plan.gradient_accumulation_fusion


def test_an_option_that_disables_a_thing_keeps_its_name_where_megatron_keeps_it() -> None:
    assert matters(read("--disable-parameter-transpose-cache")) == {"--disable-parameter-transpose-cache"}
    assert matters(read("--disable-bias-linear")) == set()


@pytest.mark.parametrize(
    ("options", "is_listed"),
    [
        ("", True),
        ("--no-create-attention-mask-in-dataloader", False),
        ("--micro-batch-size 1 --context-parallel-size 8", True),  # all ranks get masks of whole samples
        ("--dataloader-inter-document-masking", False),
        ("--seq-length 8192", False),  # 64 MiB
    ],
)
def test_large_masks_of_scores_are_listed(options: str, *, is_listed: bool) -> None:
    launch = read(f"--seq-length 32768 --max-position-embeddings 32768 {options}")
    why = {item.option: item.why for item in launch.unread if item.matters}.get("create_attention_mask_in_dataloader")
    assert (why or "").startswith("masks of 1.0 GiB a micro-batch") == is_listed


def test_documents_inside_samples_and_steps_that_run_again_are_listed() -> None:
    assert matters(read("--dataloader-inter-document-masking")) == {"--dataloader-inter-document-masking"}
    assert matters(read("--rerun-mode report_stats")) == {"--rerun-mode"}
    assert matters(read("--rerun-mode validate_results")) == set()


def test_a_model_of_a_shipped_architecture_is_that_model() -> None:
    assert read().model == load_model("llama3-8b")
    assert read("--num-query-groups 4").model.num_kv_heads == 4
    assert read("--num-layers 16", model=load_model("llama3-70b")).model == load_model("llama3-70b")


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2, "sp": True, "dp_replicate": 8}),
        ("--sequence-parallel", {"sp": False}),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", {"dp_replicate": 2, "dp_shard": 8}),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", {"pp": 4, "vp": 4}),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7"
            " --decoder-last-pipeline-num-layers 5",
            {"layers_per_chunk": (7, 10, 10, 5)},
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 31 --account-for-embedding-in-pipeline-split",
            {"layers_per_chunk": (15, 16)},
        ),
        ("--recompute-activations", {"recompute": "selective"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", {"recompute_num_layers": 3}),
        ("--context-parallel-size 4 --cp-comm-type a2a", {"cp": 4, "cp_kind": "all_to_all"}),
        (
            "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2",
            {"cp": 8, "cp_kind": "a2a+p2p:4"},
        ),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4",
            {"cp": 4, "cp_kind": "ring"},
        ),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1",
            {"cp": 4, "cp_kind": "all_to_all"},
        ),
        ("--context-parallel-size 4 --hybrid-context-parallel", {"cp": 4, "dynamic_cp": True}),
        ("--context-parallel-size 4 --dynamic-context-parallel", {"cp": 4, "dynamic_cp": True}),
        ("--hybrid-context-parallel", {"dynamic_cp": False}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"sharding": "zero2"}),
        ("--no-overlap-p2p-communication --tensor-model-parallel-size=4", {"tp": 4}),
    ],
)
def test_options_mean_what_megatron_makes_of_them(options: str, changes: dict[str, Any]) -> None:
    plan = read(options).plan
    assert {name: getattr(plan, name) for name in changes} == changes


def test_dropout_is_that_of_scores_or_hidden_states() -> None:
    assert not read("").plan.dropout
    both = read("--hidden-dropout 0.1 --attention-dropout 0.1")
    assert (both.plan.dropout, both.unread) == (True, read("").unread)
    hidden = read("--hidden-dropout 0.1")
    assert hidden.plan.dropout
    # The rate that stays 0 is no option that changes: both are exported as 0.1.
    assert "--attention-dropout" in {item.option for item in hidden.unread}
    assert matters(hidden) == set()


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ("--lr 1e-4 --save here --train-iters 7", set()),
        ("--a-new-option 3 --another", {"--a-new-option", "--another"}),
        ("--num-experts 8 --moe-permute-fusion", {"moe_grouped_gemm"}),
        ("--cp-comm-type allgather --context-parallel-size 2", {"--cp-comm-type"}),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            {"--recompute-num-layers"},
        ),
        ("--optimizer sgd", {"--optimizer"}),
        ("--bf16 $MORE --swiglu ${MORE}", {"$MORE", "${MORE}"}),
        ("--make-vocab-size-divisible-by 64", {"--make-vocab-size-divisible-by"}),
    ],
)
def test_what_is_not_in_the_plan_is_listed(options: str, unread: set[str]) -> None:
    launch = read(options)
    assert matters(launch) == unread
    known = {option for option, _ in launch.options} | {option.option for option in launch.unread}
    assert {word for word in options.split() if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("options", "is_listed"),
    [
        ("", True),  # as in examples/pretrain_gpt.sh of 2023, whose layers keep the scores
        ("--data-impl mmap", True),
        ("--ckpt-format torch_dist", False),
        ("--ckpt-format torch_dist --an-option-of-a-fork 3", True),
        ("--an-option-of-a-fork 3 --use-flash-attn", False),
    ],
)
def test_attention_is_listed_where_its_kernel_depends_on_the_release(options: str, *, is_listed: bool) -> None:
    silent = OPTIONS.replace("--transformer-impl transformer_engine", "")
    launch = megatron_lm.READER.read(f"{silent} {options}", LaunchContext(num_devices=16))
    assert ("--attention-backend" in matters(launch)) == is_listed


def test_a_program_in_a_folder_that_a_command_prints_is_found() -> None:
    options = OPTIONS.replace("--transformer-impl transformer_engine", "--tensor-model-parallel-size 2")
    script = f"""HERE=$( dirname $( dirname $CURRENT ))
APP="python -u $HERE/pretrain_gpt.py {options}"
[[ "$LAUNCHER" == "mpirun" ]] || $PREFIX $LOCAL_RANK $APP
"""
    launch = megatron_lm.READER.read(script, LaunchContext(num_devices=16))
    assert launch.plan.tp == 2
    assert "a script that sources this one" not in matters(launch)
    with pytest.raises(InputError, match=r"\(vlm\) trains no plain language model"):
        megatron_lm.READER.read(script.replace("pretrain_gpt", "pretrain_vlm"), LaunchContext(num_devices=16))
    with pytest.raises(InputError, match=r"\(multimodal\) trains no plain language model"):
        megatron_lm.READER.read(
            script.replace("$HERE/pretrain_gpt.py", "examples/multimodal/train.py"), LaunchContext(num_devices=16)
        )


def test_conditions_ask_only_for_what_the_script_does_not_set() -> None:
    script = """MAIN=pretrain_gpt.py
if [ ! -f $MAIN/$FOLDER ]; then exit 1; fi
torchrun --nproc_per_node 8 $MAIN --num-layers 2
"""
    with pytest.raises(InputError) as caught:
        megatron_lm.READER.read(script, LaunchContext())
    assert "--set FOLDER=VALUE" in str(caught.value)
    assert "--set MAIN" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "given_", "says"),
    [
        (OPTIONS, {}, "pass --devices"),
        (OPTIONS.replace("--vocab-size 128256", ""), {"num_devices": 8}, "pass --model"),
        (OPTIONS.replace("--seq-length 4096", ""), {"num_devices": 8}, "pass --seq-len"),
        (OPTIONS.replace("--bf16", ""), {"num_devices": 8}, "neither bf16 nor fp16"),
        (OPTIONS + " --tensor-model-parallel-size 3", {"num_devices": 8}, "does not divide the 8 devices"),
        (OPTIONS + " --micro-batch-size $MBS", {"num_devices": 8}, "pass --set MBS=VALUE"),
        (OPTIONS + " --micro-batch-size many", {"num_devices": 8}, "must be a whole number"),
        (OPTIONS + " --pipeline-model-parallel-size 5", {"num_devices": 5}, "do not spread evenly"),
        (SCRIPT.format(options=OPTIONS), {}, "pass --devices"),
        ("torchrun train.py # pretrain_gpt.py", {}, "no command of the script starts"),
    ],
)
def test_what_is_missing_is_said_in_one_line(text: str, given_: dict[str, Any], says: str) -> None:
    assert megatron_lm.recognises("launch.sh", text)
    with pytest.raises(InputError) as error:
        megatron_lm.READER.read(text, LaunchContext(**given_))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_options_that_another_script_sources_are_read_and_say_so() -> None:
    text = "PARAMS=()\nPARAMS+=( " + OPTIONS + " --tensor-model-parallel-size 2 )\n"
    launch = megatron_lm.READER.read(text, LaunchContext(num_devices=8))
    assert (launch.plan.tp, launch.plan.dp) == (2, 4)
    assert "a script that sources this one" in matters(launch)


EXPERTS = (
    " --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion"
)
CAPACITY = "--moe-expert-capacity-factor"


@pytest.mark.parametrize(
    ("options", "drops", "factor", "pads"),
    [
        (f"{EXPERTS} {CAPACITY} 1.0 --moe-pad-expert-input-to-capacity", True, 1.0, True),
        (f"{EXPERTS} {CAPACITY} 1.5 --moe-pad-expert-input-to-capacity", True, 1.5, True),
        (f"{EXPERTS} {CAPACITY} 2", True, 2.0, False),
        (f"{EXPERTS} {CAPACITY} -1", False, 1.0, True),
        (EXPERTS, False, 1.0, True),
        (f"{CAPACITY} 1.0 --moe-pad-expert-input-to-capacity", False, 1.0, True),
    ],
)
def test_experts_drop_tokens_beyond_a_capacity_that_they_may_be_padded_to(
    options: str, drops: bool, factor: float, pads: bool
) -> None:
    launch = read(options)
    assert launch.plan.token_dropping == drops
    assert (launch.training.capacity_factor, launch.training.pads_experts) == (factor, pads)
    assert not matters(launch)


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"capacity_factor must be between .* got 0"):
        read(f"{EXPERTS} {CAPACITY} 0")


@pytest.mark.parametrize(
    ("recipe", "scaling", "unread"),
    [("delayed", "delayed", set()), ("blockwise", "blockwise", set()), ("custom", "tensorwise", {"--fp8-recipe"})],
)
def test_the_scales_of_8_bit_products_are_those_of_the_recipe(recipe: str, scaling: str, unread: set[str]) -> None:
    launch = read(f"--fp8-format e4m3 --fp8-recipe {recipe}")
    assert (launch.plan.precision, launch.plan.fp8_scaling) == ("fp8", scaling)
    assert matters(launch) == unread


@pytest.mark.parametrize(
    ("fraction", "offload", "percent", "unread"),
    [
        ("", "optimizer", 100, set()),
        ("--optimizer-offload-fraction 0.57", "optimizer", 57, set()),
        ("--optimizer-offload-fraction 0.333", "optimizer", 33, {"--optimizer-offload-fraction"}),
        ("--optimizer-offload-fraction 0", "none", 100, set()),
    ],
)
def test_a_fraction_of_the_optimizer_is_on_the_host(
    fraction: str, offload: str, percent: int, unread: set[str]
) -> None:
    launch = read(f"--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-distributed-optimizer {fraction}")
    assert (launch.plan.offload, launch.plan.offload_percent) == (offload, percent)
    assert matters(launch) == unread


def test_a_fraction_of_the_optimizer_is_at_most_all_of_it() -> None:
    with pytest.raises(InputError, match="--optimizer-offload-fraction must be between 0 and 1, got 57"):
        read("--optimizer-cpu-offload --optimizer-offload-fraction 57")


def test_fused_kernels_of_router_and_rotation_are_read() -> None:
    latent = f"{EXPERTS} --multi-latent-attention"
    for options, router, rope in (
        (f"{latent} --moe-router-fusion", True, True),
        (f"{latent} --no-rope-fusion", False, False),
        ("--moe-router-fusion", False, False),
    ):
        plan = read(options).plan
        assert (plan.router_fusion, plan.rope_fusion) == (router, rope)
    assert matters(read("--no-rope-fusion")) == {"--no-rope-fusion"}


def test_variables_of_the_shell_are_given_by_name() -> None:
    variables = (("NNODES", "2"), ("EXTRA", "--tensor-model-parallel-size 4"))
    launch = megatron_lm.READER.read(SCRIPT.format(options=OPTIONS), LaunchContext(variables=variables))
    assert (launch.plan.num_devices, launch.plan.tp) == (16, 4)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("Et*3|(t*4|)*2t*2L", [3, 4, 4, 2]),
        ("E||t*2,|tmL", [0, 0, 2, 1]),
        ([["embedding", "decoder"], ["decoder", "decoder", "loss"]], [1, 2]),
    ],
)
def test_layouts_are_counted(layout: Any, counts: list[int]) -> None:
    assert layout_counts(layout) == counts


@pytest.mark.parametrize("layout", ["", "Et*x", "(t*9999)*9999", "((t", "hello"])
def test_other_layouts_are_refused(layout: str) -> None:
    with pytest.raises(InputError, match="pipeline layout"):
        layout_counts(layout)


@pytest.mark.parametrize(
    ("pattern", "num_layers", "places"),
    [("1", 4, (0, 1)), ("([0]*3+[1]*58)", 61, (3, 1)), ([0, 1] * 3, 6, (0, 2)), ("[0,0,1]*2", 6, (0, 3))],
)
def test_patterns_of_experts_are_told(pattern: Any, num_layers: int, places: tuple[int, int]) -> None:
    assert moe_places(pattern, num_layers) == places


@pytest.mark.parametrize("pattern", ["([1]*9**9)", "[1]*3", "__import__('os')", "[1,0,0,1]", 2])
def test_other_patterns_are_refused(pattern: Any) -> None:
    with pytest.raises(InputError, match="moe_layer_freq"):
        moe_places(pattern, 4)


def test_sizes_of_a_checkpoint_are_listed() -> None:
    """Their arguments win over those of the script (rioyokotalab/Megatron-Llama2, scripts/abci)."""
    words = "mpirun -np 16 python pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --bf16 "
    words += "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 "
    words += "--vocab-size 32000 --use-flash-attn --transformer-impl transformer_engine --load x"
    for option, listed in (
        ("--use-checkpoint-args", {"--use-checkpoint-args"}),
        ("--use-checkpoint-lr-scheduler", set()),
    ):
        assert matters(megatron_lm.READER.read(f"{words} {option}", LaunchContext())) == listed


def test_options_of_an_unset_array_and_a_file_of_words_written_are_no_values() -> None:
    words = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    words += "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    words += "--vocab-size 32000 --use-flash-attn --transformer-impl transformer_engine"
    launch = megatron_lm.READER.read(f"{words} --swiglu ${{EXTRA[@]}} &>> log.txt", LaunchContext())
    assert matters(launch) == {"${EXTRA[@]}"}
    assert launch.model.gated_mlp


# -- Megatron-Bridge and Primus ---------------------------------------------------------------------------------------

RECIPE = """
from megatron.bridge.recipes.common import _pretrain_common
TOKENS: int = 8 * 1024
def base(tp=1):
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider()
    cfg.model.tensor_model_parallel_size = tp
    cfg.dataset.seq_length = TOKENS
    return cfg
def mine():
    cfg = base(tp=2)
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 4 * 16
    cfg.model.recompute_granularity = pick()
    if late:
        cfg.model.context_parallel_size = 2
    return cfg
"""


def test_samples_packed_into_a_sequence_are_listed() -> None:
    lines = {
        "cfg.dataset.enable_offline_packing = True": {"dataset.enable_offline_packing"},
        "cfg.dataset.packed_sequence_size = 4096": {"dataset.packed_sequence_size"},
        "cfg.dataset.packed_sequence_size = -1": set(),
        "cfg.dataset.num_workers = 8": set(),
    }
    for line, listed in lines.items():
        text = RECIPE.replace("    return cfg", f"    {line}\n    return cfg")
        assert line in text
        launches = (megatron_bridge.READER.read(item, LaunchContext(num_devices=8)) for item in (text, RECIPE))
        changed, plain = map(matters, launches)
        assert changed - plain == listed


def test_a_recipe_is_followed_through_its_functions() -> None:
    launch = megatron_bridge.READER.read(RECIPE, LaunchContext(num_devices=8))
    assert launch.model == load_model("llama3-8b")
    plan = launch.plan
    assert (plan.tp, plan.sp, plan.dp_shard, plan.global_batch, plan.micro_batch) == (2, True, 4, 64, 2)
    assert launch.training.seq_len == 8192
    assert matters(launch) == {"model.recompute_granularity", "if late:"}


def test_a_recipe_that_only_calls_helpers_is_one() -> None:
    helpers = """
def _degrees(cfg, tp):
    cfg.model.tensor_model_parallel_size = tp
def _more(cfg):
    _degrees(cfg, tp=4)
def small():
    cfg = base(tp=1)
    _degrees(cfg, tp=2)
    return cfg
def large():
    cfg = base(tp=1)
    _more(cfg)
    return cfg
"""
    text = RECIPE.partition("def mine")[0] + helpers
    with pytest.raises(InputError, match=r"RECIPE=NAME, one of small, large$"):
        megatron_bridge.READER.read(text, LaunchContext(num_devices=8))
    launch = megatron_bridge.READER.read(text, LaunchContext(num_devices=8, variables=(("RECIPE", "large"),)))
    assert launch.plan.tp == 4


def test_the_length_of_the_model_is_that_of_the_data() -> None:
    context = LaunchContext(num_devices=8)
    text = "run_recipe.py --recipe llama3_8b_pretrain_config model.seq_length=16384"
    assert megatron_bridge.READER.read(text, context).training.seq_len == 16384
    assert megatron_bridge.READER.read(f"{text} dataset.seq_length=2048", context).training.seq_len == 2048


def test_settings_of_a_table_that_is_not_known_are_listed() -> None:
    text = RECIPE.replace("to_megatron_provider()", "to_megatron_provider()\n    cfg.ddp = Ddp(**of_a_file())")
    assert "ddp.**" in matters(megatron_bridge.READER.read(text, LaunchContext(num_devices=8)))


@pytest.mark.parametrize(
    ("call", "precision", "listed"),
    [
        ('_perf_precision("fp8_cs")', "fp8", set()),
        ('_perf_precision("fp8_mx")', "mxfp8", set()),
        ('get_precision_config("bf16")', "bf16", set()),
        ('"bf16_with_fp8_current_scaling_mixed"', "fp8", set()),
        ("bf16_mixed()", "bf16", set()),
        ("MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)", "bf16", set()),
        ("ours()", "bf16", {"mixed_precision"}),
        ("get_precision_config(precision)", "bf16", {"mixed_precision"}),
    ],
)
def test_precisions_of_a_benchmark_are_read_and_other_functions_listed(
    call: str, precision: str, listed: set[str]
) -> None:
    text = RECIPE.replace("pick()", '"full"').replace("    if late:\n        cfg.model.context_parallel_size = 2\n", "")
    text = text.replace("    return cfg\ndef mine", f"    cfg.mixed_precision = {call}\n    return cfg\ndef mine")
    launch = megatron_bridge.READER.read(text, LaunchContext(num_devices=8))
    assert (launch.training.precision, matters(launch)) == (precision, listed)


@pytest.mark.parametrize(
    ("line", "grads", "fusion"),
    [
        ("", "fp32", "native"),
        ('cfg.mixed_precision = "bf16_mixed"', "fp32", "native"),
        ('cfg.mixed_precision = _perf_precision("bf16")', "bf16", "native"),
        ("cfg.mixed_precision = bf16_mixed()\n    _benchmark_common(cfg)", "bf16", "te"),
    ],
)
def test_gradients_of_recipes_are_wide_and_those_of_benchmarks_are_not(line: str, grads: str, fusion: str) -> None:
    text = RECIPE.replace("pick()", '"full"').replace("    if late:\n        cfg.model.context_parallel_size = 2\n", "")
    text = text.replace("    return cfg\ndef mine", f"    {line}\n    return cfg\ndef mine")
    plan = megatron_bridge.READER.read(text, LaunchContext(num_devices=8)).plan
    assert (plan.grad_dtype, plan.cross_entropy_fusion) == (grads, fusion)


def test_overrides_of_a_command_line_win_over_its_short_options() -> None:
    text = "torchrun --nproc-per-node 8 run_recipe.py --recipe llama3_8b_pretrain_config -tp 2 "
    text += "model.tensor_model_parallel_size=4 model.transformer.sequence_parallel=true dataset.seq_length=8192"
    launch = megatron_bridge.READER.read(text, LaunchContext())
    assert (launch.plan.tp, launch.plan.sp, launch.model.name) == (4, True, "llama3-8b")
    assert matters(launch) == {"--recipe"}


EXPERIMENT = """
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${MODEL:llama3_8B}.yaml
    overrides:
      micro_batch_size: ${MBS:4}
      global_batch_size: 64
      seq_length: ${LENGTH}
      tensor_model_parallel_size: 2
"""


def test_an_experiment_takes_its_variables_and_the_defaults_of_its_presets() -> None:
    launch = primus.READER.read(EXPERIMENT, LaunchContext(num_devices=8, variables=(("LENGTH", "2048"),)))
    assert launch.model == load_model("llama3-8b")
    plan = launch.plan
    assert (plan.tp, plan.sp, plan.sharding, plan.micro_batch) == (2, True, "zero1", 4)
    with pytest.raises(InputError, match="pass --set LENGTH=VALUE"):
        primus.READER.read(EXPERIMENT, LaunchContext(num_devices=8))
    with pytest.raises(InputError, match="not a known model: pass --model"):
        primus.READER.read(EXPERIMENT, LaunchContext(num_devices=8, variables=(("LENGTH", "1"), ("MODEL", "mine"))))


def test_models_of_primus_with_other_layers_or_images_are_refused(tmp_path: Path) -> None:
    models = tmp_path / "primus" / "configs" / "models" / "megatron"
    models.mkdir(parents=True)
    (models / "mamba_base.yaml").write_text("model_type: mamba\nmtp_num_layers: null\nis_hybrid_model: false\n")
    sizes = "num_layers: 32\nhidden_size: 2048\nffn_hidden_size: 8192\nnum_attention_heads: 32\n"
    (models / "zebra_llama_1B.yaml").write_text(f"extends:\n  - mamba_base.yaml\nis_hybrid_model: true\n{sizes}")
    (models / "mamba_370M.yaml").write_text(f"extends:\n  - mamba_base.yaml\n{sizes}")
    for model, says in (
        (
            "zebra_llama_1B",
            "model_type 'hybrid' of 'zebra_llama_1B.yaml' has layers of its own, not read: pass --model",
        ),
        ("mamba_370M", "model_type 'mamba' of"),
        ("diffusion/flux_12b", "makes images"),
    ):
        variables = (("LENGTH", "2048"), ("MODEL", model), ("PRIMUS_DIR", str(tmp_path)))
        with pytest.raises(InputError, match=says):
            primus.READER.read(EXPERIMENT, LaunchContext(num_devices=8, variables=variables))


@given(st.sampled_from(["lm", "bridge", "primus"]), st.integers(0, 10**6), st.text(max_size=6))
def test_a_damaged_file_is_read_or_refused_by_our_own_error(kind: str, at: int, text: str) -> None:
    whole, reader = {
        "lm": (SCRIPT.format(options=OPTIONS).replace("$NNODES", "2"), megatron_lm.READER),
        "bridge": (RECIPE, megatron_bridge.READER),
        "primus": (EXPERIMENT.replace("${LENGTH}", "2048"), primus.READER),
    }[kind]
    at %= len(whole)
    with contextlib.suppress(InputError):
        reader.read(whole[:at] + text + whole[at + len(text) :], LaunchContext(num_devices=16))


# -- recipes that hand their configuration to helpers -----------------------------------------------------------------

# The forms of recipes/kimi/h100/kimi_k2.py, recipes/deepseek/gb300/deepseek_v4.py and perf_recipes of Megatron-Bridge.
HELPED = """
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.recipes.utils import apply_determinism_overrides, set_deepseek_v3_pipeline_model_parallel_layout
from megatron.bridge.recipes.utils.optimizer_utils import distributed_muon_with_cosine_annealing

def _optimizer(cfg, kind):
    if kind == "adam":
        cfg.ddp.use_distributed_optimizer = True
    elif kind == "muon":
        opt_cfg, scheduler_cfg = distributed_muon_with_cosine_annealing(max_lr=3e-4)
        opt_cfg.use_precision_aware_optimizer = False
        cfg.optimizer = opt_cfg
        cfg.ddp.use_distributed_optimizer = False

def _layout(pp, vp):
    layouts = {(2, 1): [["embedding"] + ["decoder"] * 15, ["decoder"] * 17 + ["loss"]]}
    layout = layouts[(pp, 1 if vp is None else vp)]
    if layout is not None:
        layout = list([list(chunk) for chunk in layout])
    return layout

def llama3_8b_pretrain_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider(load_weights=False)
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.pipeline_model_parallel_layout = _layout(2, cfg.model.virtual_pipeline_model_parallel_size)
    cfg.tokenizer.vocab_size = cfg.model.vocab_size
    _optimizer(cfg, "muon")
    return cfg
"""


def helped(change: str = "return cfg\n") -> Launch:
    return megatron_bridge.READER.read(HELPED.replace("return cfg\n", change), LaunchContext(num_devices=8))


def test_helpers_of_a_recipe_are_followed() -> None:
    launch = helped()
    assert launch.model == load_model("llama3-8b")
    assert (launch.plan.pp, launch.plan.layers_per_chunk) == (2, (15, 17))
    assert launch.plan.sharding == "none"  # as Muon's helper has it, where the common settings say zero1
    assert matters(launch) == set()


@pytest.mark.parametrize(
    ("change", "unread"),
    [
        ("apply_determinism_overrides(cfg)", "apply_determinism_overrides(cfg)"),
        (
            "set_deepseek_v3_pipeline_model_parallel_layout(cfg.model)",
            "set_deepseek_v3_pipeline_model_parallel_layout(cfg.model)",
        ),
        ("cfg = apply_determinism_overrides(cfg=cfg)", "apply_determinism_overrides(cfg=cfg)"),
        ("cfg.model.recompute_modules.append('mlp')", "cfg.model.recompute_modules.append('mlp')"),
        ("if args.deterministic:\n        apply_determinism_overrides(cfg)", "if args.deterministic:"),
        (
            "tp = 1\n    if args.wide:\n        tp = 8\n    cfg.model.tensor_model_parallel_size = tp",
            "model.tensor_mode",
        ),
        ("cfg.model.tensor_model_parallel_size = chosen()", "model.tensor_model_parallel_size"),
    ],
)
def test_what_a_helper_of_another_file_may_change_is_listed(change: str, unread: str) -> None:
    launch = helped(f"{change}\n    return cfg\n")
    assert {option for option in matters(launch) if option.startswith(unread)} == matters(launch) != set()


@pytest.mark.parametrize("change", ["print(cfg)", "logger.info(cfg.model)", "cfg.logger.update(x)", "pretrain(cfg)"])
def test_what_changes_nothing_of_a_recipe_is_not_listed(change: str) -> None:
    assert matters(helped(f"{change}\n    return cfg\n")) == set()


# -- what public files say that was read otherwise --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "recompute", "num_layers"), [("0", "none", None), ("3", "full", 3), (None, "full", None)]
)
def test_no_layer_of_a_block_is_recomputed_where_it_says_so(
    count: str | None, recompute: str, num_layers: int | None
) -> None:
    """Primus' examples/megatron/configs/MI355X/deepseek_v3-FP8-pretrain.yaml; core/recompute.py."""
    options = "--recompute-granularity full --recompute-method block"
    plan = read(options + (f" --recompute-num-layers {count}" if count else "")).plan
    assert (plan.recompute, plan.recompute_num_layers) == (recompute, num_layers)


def test_null_in_an_experiment_overrides_the_preset() -> None:
    """The line of examples/megatron/configs/MI300X/deepseek_v3-BF16-pretrain.yaml."""
    text = EXPERIMENT.replace("llama3_8B", "deepseek_v3").replace("${LENGTH}", "4096")
    assert primus.READER.read(text, LaunchContext(num_devices=8)).model.num_mtp_layers == 1
    without = primus.READER.read(f"{text}      mtp_num_layers: null\n", LaunchContext(num_devices=8))
    assert without.model.num_mtp_layers == 0


# Of primus/configs/models/megatron, shortened: biases and norms of heads are not those of the published models.
PRESETS = {
    "models/megatron/language_model.yaml": "add_bias_linear: false\nswiglu: true\nhidden_dropout: 0.0\n"
    "attention_dropout: 0.0\nqk_layernorm: false\nuntie_embeddings_and_output_weights: true\nnum_query_groups: null\n",
    "models/megatron/qwen2.5_base.yaml": "extends:\n  - language_model.yaml\nnormalization: RMSNorm\n"
    "group_query_attention: true\nposition_embedding_type: rope\nrotary_base: 1000000\n",
    "models/megatron/qwen3_4B.yaml": "extends:\n  - qwen2.5_base.yaml\ntokenizer_type: HuggingFaceTokenizer\n"
    "tokenizer_model: Qwen/Qwen3-4B\nhidden_size: 2560\nffn_hidden_size: 9728\nnum_layers: 36\n"
    "num_attention_heads: 32\nnum_query_groups: 8\n",
    "modules/megatron/pre_trainer.yaml": "extends:\n  - trainer_base.yaml\nuse_distributed_optimizer: true\n",
    "modules/megatron/trainer_base.yaml": "bf16: true\nuse_distributed_optimizer: false\n",
}


@pytest.mark.parametrize("extends", ["extends", "bases"])  # the word of the releases of 2025
def test_a_preset_of_primus_is_what_its_files_say(extends: str, tmp_path: Path) -> None:
    text = EXPERIMENT.replace("llama3_8B", "qwen3_4B").replace("${LENGTH}", "4096")
    for name, preset in PRESETS.items():
        path = tmp_path / "primus" / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(preset.replace("extends:", f"{extends}:"))
    (examples := tmp_path / "examples" / "megatron").mkdir(parents=True)
    published = load_model("qwen3-4b")
    guessed = primus.READER.read(text, LaunchContext(num_devices=8))
    assert guessed.model == published
    assert "model" in matters(guessed)  # it may be another one
    for given_ in (
        LaunchContext(num_devices=8, folder=examples),
        LaunchContext(num_devices=8, variables=(("PRIMUS_DIR", str(tmp_path)),)),
    ):
        launch = primus.READER.read(text, given_)
        assert (published.qk_norm, published.tied_embeddings, published.head_dim) == ("head", True, 128)
        assert (launch.model.qk_norm, launch.model.tied_embeddings, launch.model.head_dim) == ("none", False, None)
        assert (launch.model.num_layers, launch.model.vocab_size) == (36, published.vocab_size)
        assert launch.plan.sharding == "zero1"
        assert matters(launch) == set()


# The form of examples_deepspeed/run_deepspeed_example.sh of Megatron-DeepSpeed.
WITH_DEEPSPEED = """
ds_args=""
ds_args=" --deepspeed ${ds_args}"
ds_args=" --no-pipeline-parallel ${ds_args}"
ds_args=" --deepspeed_config=ds_config.json ${ds_args}"
ds_args=" --zero-stage=2 ${ds_args}"
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \\
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 128 --bf16 \\
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --checkpoint-activations $ds_args
"""


def test_scripts_of_megatron_deepspeed_are_its_own() -> None:
    launch = megatron_lm.READER.read(WITH_DEEPSPEED, LaunchContext())
    assert launch.framework == "megatron-deepspeed"
    assert (launch.plan.sharding, launch.plan.recompute, launch.plan.num_devices) == ("zero2", "full", 16)
    assert "--deepspeed_config" in matters(launch)
    assert launch.plan.attention == "unfused"  # its own, unless an option takes a flash kernel
    flash = WITH_DEEPSPEED.replace("--bf16", "--bf16 --use-flash-attn-v2")
    assert megatron_lm.READER.read(flash, LaunchContext()).plan.attention == "flash2"
    ulysses = WITH_DEEPSPEED.replace("--zero-stage=2", "--zero-stage=3 --ds-sequence-parallel-size 4")
    plan = megatron_lm.READER.read(ulysses, LaunchContext()).plan
    assert (plan.cp, plan.cp_kind, plan.dp, plan.sharding) == (4, "all_to_all", 4, "zero3")


# The form of train/tr3-1B3-baseline/tr3b-760M.slurm of bigscience: what is echoed first is started from two variables.
ECHOED = """
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
export LAUNCHER="python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes 16 --master_addr $ADDR"
export CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 24 \\
    --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \\
    --micro-batch-size 1 --global-batch-size 512 --bf16 --position-embedding-type alibi \\
    --pad-vocab-size-to 250880 --glu-activation swiglu --deepspeed --zero-stage 1"
echo $CMD
srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee main.log
"""


def test_a_command_that_is_echoed_is_not_the_one_that_starts() -> None:
    launch = megatron_lm.READER.read(ECHOED, LaunchContext())
    assert (launch.plan.num_devices, launch.plan.dp) == (64, 8)  # not the 16 tasks of Slurm
    model = launch.model
    assert (model.vocab_size, model.position_embedding, model.gated_mlp) == (250880, "alibi", True)


def test_options_of_forks_that_need_no_pricing_are_no_open_question() -> None:
    """Options of TurkuNLP/Megatron-DeepSpeed, as its scripts on LUMI have them."""
    splits = "--train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path valid.txt"
    text = ECHOED.replace("--zero-stage 1", f"--zero-stage 1 --embed-layernorm {splits} --valid-num-workers 0")
    others = "--train-tokens 300000000000 --calculate-per-token-loss --stderr-sink-level DEBUG --override-lr-scheduler"
    text = text.replace("--bf16", f"--bf16 {others}")
    launch = megatron_lm.READER.read(text, LaunchContext())
    assert [item.why for item in launch.unread if item.option == "--embed-layernorm"] == ["not priced"]
    assert not matters(launch) & {"--train-weighted-split-paths-path", "--valid-weighted-split-paths-path"}
    assert not matters(launch) & {"--valid-num-workers", *(word for word in others.split() if word[:2] == "--")}


def test_a_command_that_trains_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="--skip-train: nothing is trained: leave it out"):
        megatron_lm.READER.read(ECHOED.replace("--bf16", "--bf16 --skip-train"), LaunchContext())


def test_one_head_of_keys_and_values_of_bigcode_is_read() -> None:
    """--attention-head-type of bigcode-project/Megatron-LM."""
    text = ECHOED.replace("--bf16", "--bf16 --attention-head-type multiquery")
    assert megatron_lm.READER.read(text, LaunchContext()).model.kv_heads == 1


def test_states_of_bf16_in_a_pipeline_of_deepspeed_are_sharded_in_stage_0_too() -> None:
    """As train/tr11-176B-ml/tr11-176B-ml.slurm of bigscience says beside its ZERO_STAGE."""
    for changes, sharding in (("", "zero1"), ("--no-pipeline-parallel", "none"), ("--fp16", "none")):
        text = ECHOED.replace("--zero-stage 1", f"--zero-stage 0 {changes}")
        text = text.replace("--bf16", "") if changes == "--fp16" else text
        assert megatron_lm.READER.read(text, LaunchContext()).plan.sharding == sharding


def test_experts_of_megatron_deepspeed_are_not_taken_for_those_of_megatron() -> None:
    with pytest.raises(InputError, match="the experts of Megatron-DeepSpeed are not read"):
        megatron_lm.READER.read(WITH_DEEPSPEED.replace("--bf16", "--bf16 --num-experts 64"), LaunchContext())
    of_experts = "--num-experts 1 --moe-expert-parallel-size 1 --moe-loss-coeff 0.1 --create-moe-param-group"
    dense = megatron_lm.READER.read(WITH_DEEPSPEED.replace("--bf16", f"--bf16 {of_experts}"), LaunchContext())
    assert dense.model.moe is None
    assert not [option for option in matters(dense) if "moe" in option]


def test_a_program_that_starts_recipes_is_none() -> None:
    """scripts/performance/bootstrap.py of Megatron-Bridge."""
    text = 'import os\nENTRYPOINT_RECIPE = "run_recipe.py"\ndef main():\n    os.execv("python", [ENTRYPOINT_RECIPE])\n'
    with pytest.raises(InputError, match="no function of the file sets a configuration"):
        megatron_bridge.READER.read(text, LaunchContext(model=load_model("llama3-8b"), seq_len=4096, num_devices=8))


def test_a_recipe_that_another_file_makes_is_not_one_of_defaults() -> None:
    """scripts/performance/run_script.py of Megatron-Bridge."""
    text = """from megatron.bridge.training.pretrain import pretrain
def main():
    recipe = get_perf_optimized_recipe(gpu="h100")
    recipe.dist.distributed_timeout_minutes = 60
    recipe.logger.log_interval = 1
    {setting}
    pretrain(config=recipe)
"""
    context = LaunchContext(model=load_model("llama3-8b"), num_devices=8)
    with pytest.raises(InputError, match="no function of the file sets a configuration"):
        megatron_bridge.READER.read(text.format(setting=""), context)
    launch = megatron_bridge.READER.read(text.format(setting="recipe.train.global_batch_size = 64"), context)
    assert "get_perf_optimized_recipe" in matters(launch)


# As in examples/qwen2_5/run_mcore_qwen.sh of Pai-Megatron-Patch: arguments by place, and a program of its own.
PAI = """
BATCH_SIZE=$1
PR=$2
if [ $PR = fp16 ]; then
    pr_options="--fp16"
elif [ $PR = bf16 ]; then
    pr_options="--bf16"
fi
megatron_options=" \\
    --micro-batch-size ${BATCH_SIZE} --global-batch-size 64 --train-iters 10 --seq-length 4096 \\
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --disable-bias-linear \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
run_cmd="torchrun --nproc_per_node 8 ../qwen2/pretrain_qwen.py ${megatron_options} ${pr_options}"
echo ${run_cmd}
eval ${run_cmd}
"""


def test_a_program_that_takes_the_options_of_megatron_is_read_and_named() -> None:
    assert megatron_lm.recognises("run_mcore_qwen.sh", PAI)
    launch = megatron_lm.read(PAI, LaunchContext(variables=(("1", "2"), ("2", "bf16"))))
    assert (launch.plan.tp, launch.plan.pp, launch.plan.micro_batch, launch.plan.num_devices) == (2, 2, 2, 8)
    assert [item.option for item in launch.unread if "another program" in item.why] == ["pretrain_qwen.py"]


def test_what_a_condition_hangs_on_is_asked_for_by_name() -> None:
    with pytest.raises(InputError, match=r"pass --set PR=VALUE"):
        megatron_lm.read(PAI, LaunchContext(variables=(("1", "2"),)))


def test_programs_of_other_models_are_refused() -> None:
    with pytest.raises(InputError, match=r"pretrain_bert.py \(bert\) trains no plain language model"):
        megatron_lm.read(PAI.replace("pretrain_qwen.py", "pretrain_bert.py"), LaunchContext())
    with pytest.raises(InputError, match=r"tasks/main.py \(a task\) trains no plain language model"):
        megatron_lm.read(PAI.replace("qwen2/pretrain_qwen.py", "tasks/main.py"), LaunchContext())


# As in scripts/run-qwen3-4B.sh of slime, whose model is in a file that it sources.
SLIME = """
source "scripts/models/qwen3-4B.sh"
ROLLOUT_ARGS=(--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform
   --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 \\
   --colocate ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]}
"""


def test_the_training_half_of_slime_is_read_with_what_slime_sets() -> None:
    assert megatron_lm.recognises("run-qwen3-4B.sh", SLIME)
    launch = megatron_lm.read(SLIME, LaunchContext(model=load_model("llama3-8b"), seq_len=4096))
    plan = launch.plan
    assert (plan.tp, plan.sp, plan.num_devices, plan.sharding, plan.precision) == (2, True, 16, "zero1", "bf16")
    assert (plan.recompute, plan.global_batch) == ("full", 256)
    assert {"--rollout-batch-size", "--use-dynamic-batch-size", "train.py"} <= matters(launch)
    assert "source scripts/models/qwen3-4B.sh" in matters(launch)


def test_options_of_the_other_half_of_slime_are_no_open_question() -> None:
    context = LaunchContext(model=load_model("llama3-8b"), seq_len=4096)
    half = "--rollout-max-response-len 8192 --sglang-mem-fraction-static 0.7 --eps-clip 0.2 --rm-type x"
    plain, more, entropy = (
        matters(megatron_lm.read(SLIME.replace("--colocate", f"{options} --colocate"), context))
        for options in ("", half, "--entropy-coef 0.01")
    )
    assert more == plain
    assert not {"--n-samples-per-prompt", "--max-tokens-per-gpu", "--colocate"} & plain
    assert entropy - plain == {"--entropy-coef"}


def test_the_model_of_slime_is_in_the_script_that_its_launch_sources(tmp_path: Path) -> None:
    models = tmp_path / "scripts" / "models"
    models.mkdir(parents=True)
    (models / "qwen3-4B.sh").write_text(f"MODEL_ARGS=(\n{OPTIONS}\n)\n")
    launch = megatron_lm.read(SLIME, LaunchContext(folder=tmp_path / "scripts"))
    assert (launch.model, launch.plan.global_batch) == (load_model("llama3-8b"), 256)
    assert not any(option.startswith("source") for option in matters(launch))


def test_a_batch_of_nothing_is_refused() -> None:
    """A script may count its replicas from fewer devices than --devices, which leaves its own batch at 0."""
    script = f"GPUS=4\nGBS=$((GPUS / 8 * 2))\ntorchrun --nproc_per_node $GPUS pretrain_gpt.py {OPTIONS}"
    script = re.sub(r"--global-batch-size \d+", "", script) + " --global-batch-size $GBS --bf16"
    with pytest.raises(InputError, match="global-batch-size must be a whole number of at least 1, got 0"):
        megatron_lm.read(script, LaunchContext(model=load_model("llama3-8b"), num_devices=16))


def test_the_batch_of_slime_follows_from_its_rollouts() -> None:
    script = SLIME.replace("--global-batch-size 256", "--num-steps-per-rollout 2")
    assert "--rollout-batch-size 32" in script
    samples = 32 * int(script.partition("--n-samples-per-prompt ")[2].split()[0])
    assert megatron_lm.recognises("run.sh", script)
    launch = megatron_lm.read(script, LaunchContext(model=load_model("llama3-8b"), seq_len=4096))
    assert launch.plan.global_batch == samples // 2
    alone = SLIME.replace("--n-samples-per-prompt 8 --global-batch-size 256", "--num-steps-per-rollout 1")
    context = LaunchContext(model=load_model("llama3-8b"), seq_len=4096)
    assert megatron_lm.read(alone, context).plan.global_batch == 32  # one sample a prompt unless it says more


def test_layers_that_another_file_may_place_are_spread_and_listed() -> None:
    uneven = PAI.replace("--num-layers 32", "--num-layers 33")
    launch = megatron_lm.read(uneven, LaunchContext(variables=(("1", "2"), ("2", "bf16"))))
    assert "--pipeline-model-parallel-size" in matters(launch)
    with pytest.raises(InputError, match="33 layers do not spread evenly over 2 chunks, which Megatron refuses"):
        megatron_lm.read(
            uneven.replace("pretrain_qwen.py", "pretrain_gpt.py"), LaunchContext(variables=(("1", "2"), ("2", "bf16")))
        )

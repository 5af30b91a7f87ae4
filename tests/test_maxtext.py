"""Are files of MaxText read as they start, what is not priced listed, and a plan read back as written?"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import autoplan
from autoplan.base.errors import AutoplanError, InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.maxtext.options import per_device_batch
from autoplan.frameworks.maxtext.read import read, recognises
from autoplan.launch.targets import exported
from autoplan.readers.model import find_preset
from autoplan.spec.plan_file import PlanFile
from framework_parsers import ask
from read_back import check_price, matters

PLACE = {"cluster": "h100-sxm:2x8", "global_batch": 64, "seq_len": 4096, "framework": "maxtext"}
DENSE, EXPERTS = "llama3-8b", "qwen3-30b-a3b"
EXPORTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"sharding": "zero3", "recompute": "full", "micro_batch": 2}, {}),
    (DENSE, {"sharding": "zero3", "dp_replicate": 2, "recompute": "core_attn+mlp"}, {}),
    (DENSE, {"sharding": "zero3", "tp": 2, "sp": False, "cp": 2, "recompute": "core_attn+layernorm+mlp"}, {}),
    (DENSE, {"sharding": "zero1", "tp": 8, "sp": True, "recompute": "mlp"}, {}),
    (DENSE, {"sharding": "none", "tp": 8, "recompute": "selective"}, {"attention": "unfused"}),
    (DENSE, {"sharding": "zero3", "pp": 2, "schedule": "gpipe", "micro_batch": 2}, {}),
    (DENSE, {"sharding": "zero3", "micro_batch": 4, "fp8_scaling": "delayed"}, {"precision": "fp8"}),
    (DENSE, {"sharding": "zero3", "fp8_scaling": "tensorwise"}, {"precision": "fp8"}),
    (DENSE, {"sharding": "zero3"}, {"precision": "mxfp8", "cluster": "b200:2x8"}),
    (EXPERTS, {"sharding": "zero3", "ep": 8, "recompute": "full"}, {}),
    (EXPERTS, {"sharding": "zero3", "tp": 4, "etp": 4, "dp_replicate": 2}, {}),
    ("deepseek-v2-lite", {"sharding": "zero3", "ep": 4}, {}),
    ("yi-34b", {"sharding": "zero3", "tp": 4, "recompute": "full"}, {}),
    ("qwen2.5-3b", {"sharding": "zero3"}, {}),
]


def plan_file(model: str, plan: dict[str, Any], **about: Any) -> PlanFile:
    return autoplan.estimate(model, **PLACE | about, plan={"micro_batch": 1} | plan).file


def yaml_of(file: PlanFile) -> str:
    return next(written.text for written in exported(file, "maxtext", "torchrun") if written.name == "maxtext.yml")


def of(devices: int | None = 16, per_node: int | None = None, **options: Any) -> Launch:
    text = yaml.safe_dump({"model_name": DENSE, "per_device_batch_size": 2, "max_target_length": 4096} | options)
    assert recognises("run.yml", text)
    return read(text, LaunchContext(num_devices=devices, devices_per_node=per_node))


@pytest.mark.parametrize(("model", "plan", "about"), EXPORTED, ids=str)
def test_a_plan_is_read_back_with_its_price(model: str, plan: dict[str, Any], about: dict[str, Any]) -> None:
    file = plan_file(model, plan, **about)
    launch = read(yaml_of(file), LaunchContext())
    assert launch.plan == file.best.plan
    assert matters(launch) == set()
    # A model that MaxText does not ship comes back by its sizes, without what is written about it here.
    check_price(replace(file, model=launch.model), launch, PLACE | about)


def test_slices_are_as_many_as_the_devices_make() -> None:
    within = {"ici_fsdp_parallelism": 8}
    with pytest.raises(InputError, match="whose number is not in the file: pass --devices"):
        of(devices=None, **within, dcn_data_parallelism=-1)
    for options in (within, within | {"dcn_data_parallelism": -1}):
        plan = of(devices=32, **options).plan
        assert (plan.dp_replicate, plan.dp_shard, plan.sharding) == (4, 8, "zero3")
    assert of(devices=None, **within).plan.num_devices == 8


def test_its_own_class_takes_the_files_as_they_are_meant() -> None:
    folder = Path(os.environ.get("MAXTEXT_DIR", "/nowhere"))
    if not (folder / "src" / "maxtext" / "configs" / "types.py").is_file():
        pytest.skip("MAXTEXT_DIR does not name a checkout of MaxText")
    files = [plan_file(model, plan, **about) for model, plan, about in EXPORTED]
    files.append(with_plan(files[3], sp=True))
    texts = [yaml_of(file) for file in files]
    texts.append(texts[6].replace("gradient_accumulation_steps: 1", "gradient_accumulation_steps: 2"))
    *answers, refused = ask("maxtext_parser.py", [{"text": text, "world": 16} for text in texts])
    assert "not compatible with gradient accumulation" in refused["error"]
    for file, answer in zip(files, answers, strict=True):
        plan = file.best.plan
        assert "error" not in answer, answer
        mesh = {axis: size for axis, size in answer["mesh"].items() if size > 1}
        is_sharded = plan.sharding == "zero3"
        degrees = {
            "stage": plan.pp,
            "data": plan.dp_replicate if is_sharded else plan.dp,
            "fsdp": plan.dp_shard // plan.ep if is_sharded else 1,
            "context": plan.cp,
            "tensor_sequence" if plan.sp else "tensor": plan.tp,
            "expert": plan.ep,
        }
        degrees = {axis: size for axis, size in degrees.items() if size > 1}
        assert list(mesh.items()) == list(degrees.items())  # in the order of the ranks too
        assert (answer["batch"], answer["layers"]) == (64, file.model.num_layers)
        assert answer["pass"] == plan.micro_batch * plan.dp * (plan.num_microbatches if plan.pp > 1 else 1)
        assert answer["micro_batches"] == (plan.num_microbatches if plan.pp > 1 else 1)
        assert answer["repeats"] == 1


def with_plan(file: PlanFile, **changes: Any) -> PlanFile:
    return replace(file, best=replace(file.best, plan=replace(file.best.plan, **changes)))


def test_sequence_parallelism_has_an_axis_of_its_own() -> None:
    file = with_plan(plan_file(DENSE, {"tp": 8, "sharding": "zero1"}), sp=True)
    assert read(yaml_of(file), LaunchContext()).plan == file.best.plan


@given(devices=st.integers(1, 4096), sequences=st.integers(1, 4096))
def test_a_pass_has_as_many_sequences_as_the_plan(devices: int, sequences: int) -> None:
    assert int(devices * per_device_batch(sequences, devices)) == sequences


def test_processes_are_joined_before_it_starts() -> None:
    files = {file.name: file.text for file in exported(plan_file(*EXPORTED[0][:2]), "maxtext", "slurm")}
    assert '"$HERE/maxtext_start.py" \\\n    "$HERE/maxtext.yml" steps="$STEPS"' in files["launch.sh"]
    compile(files["maxtext_start.py"], "maxtext_start.py", "exec")


# -- files in ---------------------------------------------------------------------------------------------------------


def test_axes_within_and_across_slices_multiply() -> None:
    plan = of(per_node=8, dcn_data_parallelism=2, ici_fsdp_parallelism=8).plan
    assert (plan.dp_replicate, plan.dp_shard, plan.sharding, plan.micro_batch) == (2, 8, "zero3", 2)
    assert (plan.global_batch, plan.recompute) == (32, "full")
    assert of(dcn_fsdp_parallelism=2, per_node=8).plan.dp_shard == 16  # the rest of "ici" is fsdp's
    assert of(devices=None, ici_fsdp_parallelism=4, ici_tensor_parallelism=2).plan.num_devices == 8


@pytest.mark.parametrize(
    ("options", "recompute", "modules", "is_listed"),
    [
        ({"remat_policy": "minimal_flash"}, "none", ("core_attn",), False),
        ({"remat_policy": "save_dot_except_mlpwi"}, "selective", ("core_attn", "mlp"), False),
        ({"remat_policy": "save_out_proj"}, "full", ("core_attn",), True),
        ({"remat_policy": "custom"}, "full", ("core_attn",), False),
        (
            {"remat_policy": "custom", **dict.fromkeys(("query_proj", "key_proj", "value_proj", "out_proj"), "device")},
            "selective",
            ("core_attn", "mlp"),
            False,
        ),
        (
            {"remat_policy": "custom", **dict.fromkeys(("query_proj", "key_proj", "value_proj"), "offload")},
            "selective",
            ("core_attn", "layernorm", "mlp"),
            True,
        ),
        ({"remat_policy": "minimal_with_context", "model_name": "mixtral-8x7b"}, "selective", ("moe",), False),
    ],
)
def test_policies_repeat_what_they_do_not_keep(
    options: dict[str, Any], recompute: str, modules: tuple[str, ...], is_listed: bool
) -> None:
    launch = of(**options)
    assert (launch.plan.recompute, launch.plan.recompute_modules) == (recompute, modules)
    assert ("remat_policy" in matters(launch)) == is_listed


@pytest.mark.parametrize(
    ("scale", "sizes"),
    [(1, (16, 2048, 16, 7168)), (2, (16, 2048, 32, 14336)), (4, (16, 4096, 32, 14336)), (64, (64, 8192, 64, 28672))],
)
def test_a_scale_of_all_parameters_is_read(scale: int, sizes: tuple[int, ...]) -> None:
    """Every third doubling adds layers (pyconfig.py, get_individual_scales)."""
    command = (
        f"python3 MaxText/train.py MaxText/configs/base.yml global_parameter_scale={scale} per_device_batch_size=4"
    )
    model = read(command, LaunchContext(num_devices=64)).model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.ffn_size) == sizes
    assert (model.kv_heads, model.qk_head_dim) == (model.num_heads, 128)


def test_what_costs_and_is_not_priced_is_listed() -> None:
    launch = of(
        weight_dtype="bfloat16", optimizer_memory_host_offload=True, num_vocab_tiling=4, ici_context_parallelism=2
    )
    assert matters(launch) == {
        *("weight_dtype", "optimizer_memory_host_offload", "num_vocab_tiling"),
        "context_parallel_strategy",
    }


def test_sizes_of_the_file_are_listed_where_another_model_is_given() -> None:
    given = find_preset("llama3-8b")
    file = "model_name: unheard-of\nbase_num_decoder_layers: 4\nper_device_batch_size: 1\nmax_target_length: 4096\n"
    launch = read(file, LaunchContext(num_devices=8, model=given))
    assert launch.model == given
    assert {row.option for row in launch.unread} == {"model_name", "base_num_decoder_layers", "packing"}


def test_a_pipeline_has_as_many_micro_batches_as_stages_where_it_is_silent() -> None:
    launch = of(ici_pipeline_parallelism=4, num_layers_per_pipeline_stage=8)
    assert (launch.plan.schedule, launch.plan.num_microbatches, launch.plan.dp_shard) == ("gpipe", 4, 4)
    assert matters(launch) == set()
    assert matters(of(ici_pipeline_parallelism=4)) == {"num_layers_per_pipeline_stage"}  # 8 rounds of one layer


@pytest.mark.parametrize(("activations", "is_gated"), [('["relu"]', False), ('["silu","linear"]', True)])
def test_an_mlp_has_a_gate_where_it_has_two_activations(activations: str, is_gated: bool) -> None:
    """configs/base.yml of 2023 has one."""
    sizes = "base_emb_dim: 2560\nbase_mlp_dim: 8192\nbase_num_decoder_layers: 16\nvocab_size: 32768\n"
    text = f"{sizes}mlp_activations: {activations}\nper_device_batch_size: 12\nici_fsdp_parallelism: 8\n"
    launch = read(text, LaunchContext())
    assert launch.model.gated_mlp == is_gated
    assert "mlp_activations" not in matters(launch)
    with pytest.raises(InputError, match=r"mlp_activations .* must be one or two activations"):
        read(text.replace(activations, "[]"), LaunchContext())


def test_words_of_a_command_win_over_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "llama.yml").write_text("base_config: base.yml\nmodel_name: llama3-70b\nper_device_batch_size: 4\n")
    script = (
        "export NODES=16\npython3 -m maxtext.trainers.pre_train.train configs/llama.yml run_name=$RUN \\\n"
        "  dcn_data_parallelism=$NODES ici_fsdp_parallelism=8 per_device_batch_size=2 max_target_length=8192\n"
    )
    (tmp_path / "configs").mkdir()
    (tmp_path / "llama.yml").rename(tmp_path / "configs" / "llama.yml")
    assert recognises("run.sh", script)
    launch = read(script, LaunchContext(folder=tmp_path))
    assert (launch.model.name, launch.training.seq_len) == ("llama3-70b", 8192)
    assert (launch.plan.dp_replicate, launch.plan.dp_shard, launch.plan.micro_batch) == (16, 8, 2)
    other = read(script, LaunchContext(folder=tmp_path, seq_len=4096))
    assert other.training.seq_len == 4096
    assert "max_target_length" not in {item.option for item in other.unread if item.matters}


def test_the_name_of_a_run_may_contain_the_date() -> None:
    """end_to_end/test_checkpoint_resharding.sh."""
    sizes = (
        "base_emb_dim=4096 base_num_query_heads=32 base_num_kv_heads=32 base_mlp_dim=11008 base_num_decoder_layers=8"
    )
    script = (
        "python3 -m MaxText.train MaxText/configs/base.yml run_name=llama-$(date +%Y-%m-%d-%H) head_dim=128 \\\n"
        f"  vocab_size=32000 {sizes} per_device_batch_size=2 max_target_length=2048 dataset_type=synthetic\n"
    )
    launch = read(script, LaunchContext(num_devices=8))
    assert (launch.model.name, launch.model.num_layers) == ("maxtext-model", 8)


def test_a_command_in_the_text_of_another_program_is_read() -> None:
    script = (
        'ARGS="model_name=llama2-7b per_device_batch_size=4 remat_policy=custom decoder_layer_input=offload"\n'
        "queue submit --command=\"set -e && export A='b c' && python3 -m src.maxtext.trainers.{} base.yml ${{ARGS}}\"\n"
    )
    launch = read(script.format("pre_train.train"), LaunchContext(num_devices=8))
    assert (launch.model.name, launch.plan.micro_batch) == ("llama2-7b", 4)
    assert matters(launch) == {"remat_policy"}
    with pytest.raises(InputError, match="pass --set BATCH=VALUE"):
        read(script.format("pre_train.train").replace("size=4", "size=\\$BATCH"), LaunchContext(num_devices=8))
    with pytest.raises(InputError, match="only training on the next token is priced"):
        read(script.format("post_train.rl.train_rl"), LaunchContext(num_devices=8))


def test_a_file_that_is_not_at_hand_is_listed_and_no_model_is_guessed() -> None:
    script = "python3 -m maxtext.trainers.pre_train.train $CONFIGS/gpu/llama2_7b.yml ici_fsdp_parallelism=8 {}"
    with pytest.raises(InputError, match="neither model_name nor sizes of a model"):
        read(script.format(""), LaunchContext())
    launch = read(script.format("model_name=llama2-7b per_device_batch_size=1"), LaunchContext())
    assert matters(launch) == {"$CONFIGS/gpu/llama2_7b.yml"}
    assert matters(of(base_config="others/more.yml")) == {"base_config"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_name": "gemma9-1t"}, "pass --model"),
        ({"model_name": "default", "decoder_block": "gemma2", "base_emb_dim": 2304}, "decoder_block 'gemma2'"),
        ({"quantization": "int8"}, "quantization 'int8' is not priced"),
        ({"ici_fsdp_parallelism": 3}, "axes are of 15 devices, there are 16"),
        ({"ici_fsdp_transpose_parallelism": 2}, "this axis is not priced"),
        ({"ici_tensor_parallelism": 2, "ici_tensor_sequence_parallelism": 2}, "two kinds"),
        ({"per_device_batch_size": 0.5}, "makes passes of 8 sequences"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_in_a_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        of(**options)


@pytest.mark.parametrize(
    ("model", "plan", "about", "says"),
    [
        (DENSE, {"sharding": "zero2"}, {}, "sharding 'zero2' does not exist"),
        (DENSE, {"sharding": "zero3", "pp": 2}, {}, "pipelines run gpipe"),
        (DENSE, {"sharding": "zero3", "pp": 4, "schedule": "gpipe", "micro_batch": 8}, {}, "divisible by pp 4"),
        (DENSE, {"sharding": "zero3", "offload": "optimizer"}, {}, "offload 'optimizer'"),
        (DENSE, {"sharding": "none", "cp": 2}, {}, "weights are sharded over its ranks"),
        (DENSE, {"sharding": "zero3", "recompute": "layernorm"}, {}, "no policy repeats these alone"),
        (DENSE, {"sharding": "zero3", "fp8_scaling": "delayed"}, {"precision": "fp8"}, "does not add up gradients"),
        (EXPERTS, {"sharding": "zero3", "recompute": "mlp"}, {}, "of qwen3-30b-a3b: no policy"),
        (EXPERTS, {"sharding": "zero3", "tp": 2, "etp": 2, "ep": 2}, {}, "ep 2 needs zero3"),
        ("gemma2-9b", {"sharding": "zero3"}, {}, "a second norm"),
        ("gpt3-175b", {"sharding": "zero3", "tp": 8}, {"seq_len": 2048}, "learned positions"),
        (
            DENSE,
            {"sharding": "zero3"},
            {"cluster": "mi300x:2x8"},
            "cannot express mi300x: its launch files are for NVIDIA's GPUs",
        ),
        (DENSE, {"sharding": "zero3"}, {"finetune": "lora:r=8"}, "LoRA of rank 8"),
    ],
    ids=str,
)
def test_what_it_cannot_be_told_is_named(model: str, plan: dict[str, Any], about: dict[str, Any], says: str) -> None:
    with pytest.raises(AutoplanError, match=says):
        yaml_of(plan_file(model, plan, **about))

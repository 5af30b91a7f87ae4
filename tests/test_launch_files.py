"""Are launch files known by their content, and is what runs today compared with the best plan, change by change?"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoplan.api.launch_files import _needed, differing
from autoplan.base.errors import InputError
from autoplan.base.files import decode, read_table
from autoplan.frameworks.common.job import File
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.launch_files import MAX_BYTES, READERS, read_launch
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import TARGETS, book_of, facts_of
from autoplan.launch.targets import exported
from autoplan.readers.model import load_model
from autoplan.report.launch_file import gap_line
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from commands import run
from test_megatron_lm_export import LLAMA_8B, plan_file_of

PLACE = ("--cluster", "h100-sxm:1x8")
PROBLEM = ("llama3-8b", *PLACE, "--global-batch", "16", "--seq-len", "2048")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that is not the best, as a plan file and as a script of Megatron-LM, and what a search from it found."""
    folder = tmp_path_factory.mktemp("launches")
    slow = ("--fix", "tp=8", "--fix", "recompute=full", "--fix", "micro_batch=1", "--out", "old.json", "-q")
    for arguments in (
        ("search", *PROBLEM, *slow),
        ("export", "old.json", "--to", "megatron-lm", "--out", "launch"),
        ("search", "--from", "launch/launch.sh", *PLACE, "-q"),
    ):
        done = run(folder, *arguments)
        assert done.returncode == 0, done.stderr
        (folder / "printed.txt").write_text(done.stdout)
    return folder


def plan_file(path: Path) -> PlanFile:
    return decode(PlanFile, read_table(path), str(path))


@pytest.fixture(scope="module")
def found(folder: Path) -> PlanFile:
    return plan_file(folder / "plan.json")


# -- files in ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "target"), [("old.json", "plan.json"), ("launch/launch.sh", "megatron-lm")])
def test_a_launch_file_is_known_by_its_content(folder: Path, name: str, target: str) -> None:
    launch = read_launch(folder / name, LaunchContext())
    assert launch == read_launch(folder / name, LaunchContext(), target)
    assert (launch.target, launch.plan) == (target, plan_file(folder / "old.json").best.plan)


COMPLETE = LaunchContext(model=load_model("llama3-8b"), num_devices=8, devices_per_node=8, seq_len=64)


@cache
def files_of(folder: Path, target: str) -> tuple[File, ...]:
    """A plan without tensor and pipeline parallelism, exported."""
    file = plan_file(folder / "old.json")
    framework = load_framework(facts_of(target))
    sharding = "zero1" if "zero1" in book_of(framework).words("sharding") else "zero2"
    plan = ParallelPlan.derived(global_batch=16, dp_shard=8, sharding=sharding)
    file = replace(file, framework=framework, best=replace(file.best, plan=plan))
    return exported(file, target, "torchrun")


@pytest.mark.parametrize("target", TARGETS)
def test_no_reader_takes_the_files_of_another_target(folder: Path, target: str) -> None:
    files = files_of(folder, target)
    known = {reader.target for file in files for reader in READERS if reader.recognises(file.name, file.text)}
    assert known == {"plan.json" if target == "autoplan" else target}  # the trainer reads the plan itself


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(folder: Path, data: st.DataObject) -> None:
    reader = data.draw(st.sampled_from([item for item in READERS if item.target in TARGETS]))
    texts = [item.text for item in files_of(folder, reader.target) if reader.recognises(item.name, item.text)]
    text = data.draw(st.sampled_from(texts))
    start, end = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    damage = data.draw(
        st.one_of(st.text(max_size=20), st.sampled_from(["$(rm -rf x)", "${A:-", "[" * 300, "1e999", "-1"]))
    )
    given_ = data.draw(st.sampled_from([LaunchContext(), COMPLETE]))
    path = folder / "damaged"
    path.write_text(text[:start] + damage + text[min(end, start + 40) :], encoding="utf-8", errors="replace")
    for target in (None, reader.target):
        with contextlib.suppress(InputError):
            assert read_launch(path, given_, target).plan.num_devices >= 1


def test_of_a_script_that_starts_what_another_file_describes_that_file_is_named(folder: Path, tmp_path: Path) -> None:
    file = plan_file(folder / "old.json")
    plan = ParallelPlan(global_batch=16, dp_shard=8, sharding="zero1")
    file = replace(file, framework=load_framework("nanotron"), best=replace(file.best, plan=plan))
    for written in exported(file, "nanotron", "slurm"):
        (tmp_path / written.name).write_text(written.text)
    described, inner, script = (tmp_path / name for name in ("nanotron.yaml", "launch.sh", "launch.sbatch"))
    assert read_launch(described, COMPLETE).plan == plan
    with pytest.raises(
        InputError, match=r"launch.sh: does not contain the plan: read .*nanotron.yaml, which it starts"
    ):
        read_launch(inner, COMPLETE)
    with pytest.raises(InputError, match=r"launch.sbatch: does not contain the plan: read .*nanotron.yaml, which it"):
        read_launch(script, COMPLETE)
    inner.write_text("torchrun pretrain_gpt.py\n")
    with pytest.raises(
        InputError, match=r"launch.sbatch: does not contain the plan: read .*launch.sh, which it starts"
    ):
        read_launch(script, COMPLETE)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "srun torchrun --nproc_per_node=4 $HOME/scripts/run.py --config-file $HOME/conf/stage2.yaml",
            r"run.py with \$HOME/conf/stage2.yaml: read that file",
        ),
        (
            "deepspeed --num_gpus 8 main.py --deepspeed --deepspeed_config=ds.json",
            "main.py with ds.json: read that file",
        ),
        ("/env/bin/torchrun --nnodes=2 -m axolotl.cli.train /data/fft.yaml", "axolotl.cli.train with /data/fft.yaml"),
        ("srun python -u src/train.py --hidden_width 4096", "it starts src/train.py, which is not known here"),
        ("python src/train.py --config x.yaml", "is not a known launch file: name its format"),
    ],
)
def test_a_script_of_another_program_says_what_it_starts(tmp_path: Path, command: str, says: str) -> None:
    (path := tmp_path / "job.sh").write_text(f"#!/bin/bash\n{command}\n")
    with pytest.raises(InputError, match=says):
        read_launch(path, LaunchContext())


BAD: dict[str, tuple[bytes, str | None, str]] = {
    "nothing known": (b"pip install torch\n", None, "is not a known launch file: name its format with --as"),
    "nothing": (b"", None, "is not a known launch file"),
    "another target": (b"pip install torch\n", "fortran", "no files of 'fortran' are read: known are "),
    "no text": (b"\xff\xfe\x00", None, "not UTF-8 text"),
    "too large": (b"#" * (MAX_BYTES + 1), None, "too large"),
    "no plan file": (b'{"schema_version": 13}', None, "missing versions"),
    "half a file": (b'{"schema_version": 2', None, "not valid JSON"),
    "deep": (b'{"schema_version": ' + b"[" * 10**5, None, "nested too deeply"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path, case: str) -> None:
    content, target, says = BAD[case]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_launch(path, LaunchContext(), target)
    done = run(tmp_path, "read", "file", *(("--as", target) if target else ()))
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("read", "absent.sh"), "absent.sh: cannot be read"),
        (("read", "old.json", "--devices", "64"), "its plan is for 8 devices, not for 64"),
        (("read", "old.json", "--devices", "0"), "--devices must be between 1"),
        (("read", "old.json", "--set", "1X=2"), "write NAME=VALUE"),
        (("read", "old.json", "--model", "no-such"), "unknown model"),
        (("search", *PROBLEM, "--set", "X=2"), "give --from FILE"),
        (("search", "--from", "old.json", *PLACE, "--robust", "0.9"), "leave objectives, runs and --robust out"),
        (("search", "--from", "old.json", *PLACE, "--tokens", "1T"), "leave objectives, runs and --robust out"),
        (("search", "--from", "old.json", "--cluster", "h100-sxm:2x8"), "starts 8 devices, cluster 'h100-sxm' has 16"),
    ],
)
def test_what_does_not_go_together_is_refused(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    done = run(folder, *arguments, *(("--out", "never.json") if arguments[0] == "search" else ()))
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "never.json").exists()


def test_what_was_read_is_printed_and_what_was_not(folder: Path) -> None:
    done = run(folder, "read", "launch/launch.sh")
    assert "plan      tp 8, micro-batch 1, full recompute" in done.stdout
    assert "8.03B parameters" in done.stdout
    assert done.stdout.index("devices") < done.stdout.index("not read") < done.stdout.index("--weight-decay")
    table = json.loads(run(folder, "read", "launch/launch.sh", "--json").stdout)
    assert (table["target"], table["plan"]["tp"], table["model"]["num_layers"]) == ("megatron-lm", 8, 32)
    assert {"--weight-decay"} <= {option["option"] for option in table["unread"]}


def test_the_plan_of_a_launch_file_is_priced_as_it_is(folder: Path) -> None:
    done = run(folder, "estimate", "--from", "launch/launch.sh", *PLACE, "--json", "-q")
    table, old = json.loads(done.stdout), plan_file(folder / "old.json")
    assert table["best"]["step_s"] == pytest.approx(old.best.step_s)
    for arguments, says in (((*PLACE, "--tp", "2"), "without --tp"), ((), "estimate --from needs --cluster")):
        done = run(folder, "estimate", "--from", "launch/launch.sh", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
    assert run(folder, "estimate", *PLACE).returncode == 2


# -- how good is it ---------------------------------------------------------------------------------------------------


def test_the_plan_of_the_file_is_priced_beside_the_best(folder: Path, found: PlanFile) -> None:
    today, old = found.today, plan_file(folder / "old.json")
    assert today is not None
    assert today.priced is not None
    assert today.gap is not None
    assert (today.path, today.target, today.broken) == ("launch/launch.sh", "megatron-lm", ())
    assert today.priced.step_s == pytest.approx(old.best.step_s)
    assert today.gap.ratio == pytest.approx(old.best.step_s / found.best.step_s)
    assert today.num_faster > 0
    assert found.best.plan == plan_file_of_search(folder).best.plan


def plan_file_of_search(folder: Path) -> PlanFile:
    """Plan file of a search that knows nothing of the launch file."""
    if not (folder / "alone.json").exists():
        assert run(folder, "search", *PROBLEM, "--out", "alone.json", "-q").returncode == 0
    return plan_file(folder / "alone.json")


def test_the_walk_ends_at_the_best_plan_and_options_are_the_targets_own(folder: Path, found: PlanFile) -> None:
    today = found.today
    assert today is not None
    assert today.walk[-1].plan == found.best
    changes = {change.axis: change for change in today.changes}
    assert (changes["recompute"].before, changes["recompute"].after) == ("full", "none")
    dropped = {option.option: (option.before, option.after) for option in changes["recompute"].options}
    assert dropped["--recompute-granularity"] == ("full", None)
    assert set(dropped) == {"--recompute-granularity", "--recompute-method", "--recompute-num-layers"}
    options = {option.option: (option.before, option.after) for option in today.options}
    assert options["--tensor-model-parallel-size"] == ("8", str(found.best.plan.tp))
    assert "--weight-decay" not in options
    assert "--num-layers" not in options


def test_a_number_that_is_written_otherwise_is_no_change() -> None:
    before = {"--hidden-dropout": "0", "--norm-epsilon": "1e-5", "--rotary-base": "10000", "--bf16": "", "--data": "a"}
    before, after_words = before | {"--tf32": "True"}, {"--tf32": "true"}
    after = {
        "--hidden-dropout": "0.0",
        "--norm-epsilon": "0.00001",
        "--rotary-base": "500000",
        "--data": "b",
    } | after_words
    changed = [option.option for option in differing(before, after)]
    assert changed == ["--rotary-base", "--bf16", "--data"]


def test_what_the_plan_does_not_change_is_no_change_of_an_option(folder: Path) -> None:
    """The exported file has a tokenizer and figures of its own, and says defaults; the person's file stays theirs."""
    script = (folder / "launch" / "launch.sh").read_text()
    own = {
        "NullTokenizer": "HuggingFaceTokenizer --tokenizer-model /models/own",
        "--attention-dropout 0.0": "--attention-dropout 0",
        "--optimizer adam ": "",
        "--max-position-embeddings 2048": "--max-position-embeddings 131072",
    }
    for exported_, mine in own.items():
        assert exported_ in script
        script = script.replace(exported_, mine)
    (folder / "own.sh").write_text(script)
    options = {option["option"] for option in search_from(folder, "own.sh")["today"]["options"]}
    assert options == {option["option"] for option in search_from(folder, "launch/launch.sh")["today"]["options"]}
    assert "--tensor-model-parallel-size" in options


def test_what_the_file_says_in_other_words_goes_where_it_changes_alone() -> None:
    """--recompute-activations is what is exported as a granularity and its modules."""
    in_file = {"--recompute-activations": "", "--tensor-model-parallel-size": "8"}
    granularity = {"--recompute-granularity": "selective"}
    today = granularity | {"--tensor-model-parallel-size": "8"}

    def needed(after: dict[str, str]) -> set[str]:
        return {change.option for change in _needed(differing(in_file, after), in_file, today, after)}

    tp = "--tensor-model-parallel-size"
    assert needed(granularity | {tp: "4"}) == {tp}
    assert needed({tp: "4"}) == {tp, "--recompute-activations"}
    assert needed({"--recompute-granularity": "full", tp: "8"}) == {*granularity, "--recompute-activations"}


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"micro_batch": 2},
    {"tp": 2, "dp_shard": 4},
    {"cp": 2, "dp_shard": 4},
    {"pp": 2, "dp_shard": 4},
    {"sharding": "zero1"},
    {"sharding": "zero3"},
    {"offload": "optimizer"},
    {"precision": "fp8"},
    {"moment_dtype": "bf16"},
)


@pytest.mark.parametrize("to", sorted({to for name in TARGETS if name != "autoplan" for to in TARGETS[name].spellings}))
def test_plans_that_differ_are_files_whose_options_differ(tmp_path: Path, to: str) -> None:
    """Otherwise a change of the plan would be missing in the list of changed options."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], ParallelPlan] = {}
    for sharding, change in product(("zero1", "zero2"), CHANGES):
        plan = {"global_batch": 32, "dp_shard": 8, "sharding": sharding} | change
        file = replace(plan_file_of(LLAMA_8B, **plan), framework=load_framework(facts_of(to.partition("@")[0])))
        with contextlib.suppress(InputError):  # not every target can express every plan
            files = exported(file, to, "torchrun")
            for written in files:
                (tmp_path / written.name).write_text(written.text)
            for written in files:
                with contextlib.suppress(InputError):  # such as of a script that starts another file
                    read = read_launch(tmp_path / written.name, replace(COMPLETE, model=file.model, seq_len=4096))
                    assert found.setdefault((written.name, tuple(sorted(read.options))), read.plan) == read.plan
    assert len(found) > 1


def test_the_terminal_says_gap_changes_and_options(folder: Path, found: PlanFile) -> None:
    printed = (folder / "printed.txt").read_text()
    assert found.today is not None
    assert "% slower than the best plan, a clear gap (over " in " ".join(printed.split())
    assert "recompute full -> none" in printed
    assert "--recompute-granularity" in printed
    assert printed.index("today ") < printed.index("gap ") < printed.index("change ") < printed.index("options, from")


def test_a_verdict_is_no_firmer_than_what_was_read(found: PlanFile) -> None:
    assert found.today is not None
    assert "if the parts of the file that were not read" not in gap_line(found.today)
    partly = replace(found.today, unread={"--fp8-recipe blockwise": "priced with one scale a tensor"})
    assert gap_line(partly) == gap_line(found.today) + ", if the parts of the file that were not read do not matter"
    assert partly.gap is not None
    level = replace(partly, gap=replace(partly.gap, ratio=1.0, low=0.9, high=1.1))
    assert gap_line(level) == "none: no plan is 0.1 % faster, if the parts of the file that were not read do not matter"


def search_from(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    done = run(folder, "search", "--from", name, *PLACE, "--out", "other.json", "--force", "--json", "-q", *arguments)
    assert done.returncode == 0, done.stderr
    table: dict[str, Any] = json.loads(done.stdout)
    return table


def test_flags_win_over_the_file(folder: Path) -> None:
    table = search_from(folder, "old.json", "--seq-len", "1024", "--global-batch", "32", "--framework", "nemo")
    assert (table["training"]["seq_len"], table["framework"]["name"]) == (1024, "nemo")
    assert table["today"]["plan"]["global_batch"] == table["best"]["plan"]["global_batch"] == 32


def test_a_plan_that_the_framework_refuses_is_told_with_the_rule(folder: Path) -> None:
    """Seven sequences on one replica are no whole number of micro-batches of two."""
    script = (folder / "launch" / "launch.sh").read_text()
    (folder / "odd.sh").write_text(script.replace("--micro-batch-size 1 ", "--micro-batch-size 5 "))
    today = search_from(folder, "odd.sh")["today"]
    assert "must be divisible by micro_batch 5" in today["broken"][0]
    assert today["priced"] is None
    assert today["gap"] is None
    assert today["walk"][-1]["plan"]["verdict"] == "fits"


def test_a_plan_that_uses_what_a_search_leaves_out_is_no_worse_than_the_answer(folder: Path) -> None:
    table = json.loads((folder / "old.json").read_text())
    table["best"]["plan"] |= {"tp_overlap": True, "sharding": "zero1", "rank_order": "tp-cp-ep-dp-pp"}
    table["framework"]["name"] = "nemo"
    (folder / "overlap.json").write_text(json.dumps(table))
    found = search_from(folder, "overlap.json")
    assert found["best"]["plan"]["tp"] == 1 or found["best"]["plan"]["tp_overlap"]
    assert found["today"]["gap"]["ratio"] >= 1.0


def test_from_the_best_plan_there_is_nothing_to_change(folder: Path) -> None:
    plan_file_of_search(folder)
    found = search_from(folder, "alone.json")
    assert found["today"]["changes"] == found["today"]["walk"] == []
    assert found["today"]["gap"]["ratio"] == 1.0


def test_of_a_range_of_batches_rates_are_compared(folder: Path) -> None:
    arguments = ("search", "--from", "old.json", *PLACE, "--out", "range.json", "-q", "--global-batch", "16:64")
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert "global batch 16 -> " in done.stdout
    assert "(tokens/s per device)" in done.stdout
    today = plan_file(folder / "range.json").today
    assert today is not None
    assert today.plan.global_batch == 16


def test_a_page_of_text_is_no_launch_file_that_a_script_starts(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("torchrun pretrain_gpt.py --num-layers 8")
    (tmp_path / "conversion.sh").write_text("# see README.md\necho\n")
    with pytest.raises(InputError, match="is not a known launch file"):
        read_launch(tmp_path / "conversion.sh", LaunchContext())


def test_a_flood_of_unread_options_is_a_list_of_names(tmp_path: Path) -> None:
    keys = [f"setting_{at}: {at}" for at in range(30)]
    sizes = ["base_emb_dim: 512", "base_num_decoder_layers: 4", "ici_fsdp_parallelism: 8", "fused_mlp: true"]
    (tmp_path / "own.yml").write_text("\n".join([*sizes, *keys]))
    done = run(tmp_path, "read", "own.yml", "--as", "maxtext")
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "fused_mlp True two products are priced" in printed
    assert "setting_28, setting_29: not known here" in printed


SCRIPT = """#!/bin/bash
#SBATCH --array=0-3
#SBATCH --gres=gpu:8
TPS=(1 2 4 8)
torchrun --nproc_per_node=8 pretrain_gpt.py --num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 512 \\
  --vocab-size 32000 --max-position-embeddings 512 --tensor-model-parallel-size ${TPS[$SLURM_ARRAY_TASK_ID]} \\
  --micro-batch-size 1 --global-batch-size 64 --bf16
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_script_of_a_slurm_array_asks_for_its_task_whatever_editor_wrote_it(tmp_path: Path, end: str) -> None:
    path = tmp_path / "array.sbatch"
    path.write_bytes(SCRIPT.replace("\n", end).encode())
    with pytest.raises(InputError, match="pass --set SLURM_ARRAY_TASK_ID=VALUE"):
        read_launch(path, LaunchContext())
    assert read_launch(path, LaunchContext(variables=(("SLURM_ARRAY_TASK_ID", "2"),))).plan.tp == 4
    with pytest.raises(InputError, match="whole number of at least 1, got no value"):
        read_launch(path, LaunchContext(variables=(("SLURM_ARRAY_TASK_ID", "9"),)))


def test_a_file_of_another_program_with_a_few_names_alike_is_refused(tmp_path: Path) -> None:
    """The keys by which a file of axolotl is known are those of other programs too."""
    file = tmp_path / "specifications.yaml"
    own = "\n".join(f"setting_{number}: 1" for number in range(12))
    file.write_text(f"base_model: llama3-8b\nmicro_batch_size: 4\nbf16: true\n{own}\n")
    with pytest.raises(InputError, match=r"12 of its \d+ settings are unknown to axolotl.*--as axolotl"):
        read_launch(file, LaunchContext(num_devices=8))
    launch = read_launch(file, LaunchContext(num_devices=8), "axolotl")
    assert launch.plan.micro_batch == 4


def test_a_container_in_a_table_is_no_model_of_images(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    text = (
        "recipe: TrainFinetuneRecipeForNextTokenPrediction\nstep_scheduler: {local_batch_size: 1}\n"
        "distributed: {tp_size: 1}\npacked_sequence: {packed_sequence_size: 2048}\n"
        "model: {pretrained_model_name_or_path: llama3-8b}\nrun: {env: {KEY: registry/train:1}}\n"
    )
    file.write_text(text.replace("distributed: {", "distributed:\n  {").replace("KEY", "container_image"))
    for key, tells in (("container_image", False), ("image_folder", True)):
        file.write_text(text.replace("KEY", key))
        launch = read_launch(file, LaunchContext(num_devices=8))
        assert any("images or sound" in item.why for item in launch.unread) == tells


def test_the_folder_of_an_export_is_read(tmp_path: Path) -> None:
    """Its launch.sh may start a recipe of Megatron-Bridge beside it, with overrides."""
    file = plan_file_of(LLAMA_8B, tp=2, sp=True, dp_shard=4, micro_batch=2, sharding="zero1")
    file = replace(file, framework=load_framework(facts_of("megatron-bridge")))
    for item in exported(file, "megatron-bridge", "torchrun"):
        (tmp_path / item.name).write_text(item.text)
    done = run(tmp_path, "read", ".")
    assert done.returncode == 0, done.stderr
    assert "a file of megatron-bridge" in done.stdout
    script = tmp_path / "launch.sh"
    launch = read_launch(script, LaunchContext())
    assert (launch.plan, launch.plan.num_devices) == (file.best.plan, 8)
    script.write_text(script.read_text().replace('"$@"', 'train.micro_batch_size=1 "$@"'))
    assert read_launch(script, LaunchContext()).plan.micro_batch == 1


def test_settings_over_a_recipe_are_read_from_yaml(tmp_path: Path) -> None:
    """The function of the recipe takes arguments; sections override what it returns, and what it sets is listed."""
    file = tmp_path / "default.yaml"
    file.write_text(
        "run: {env: {nodes: 2}}\n"
        "recipe:\n  _target_: megatron.bridge.recipes.llama.llama3.llama3_8b_pretrain_config\n"
        "  context_parallelism: 2\n  peft: null\n"
        "model:\n  tensor_model_parallel_size: 4\n  sequence_parallel: true\n"
        "train: {micro_batch_size: 1, global_batch_size: 16}\n"
        "dataset: {seq_length: '${art:data,size}'}\n"
    )
    launch = read_launch(file, LaunchContext(num_devices=16))
    plan = launch.plan
    assert (plan.tp, plan.cp, plan.dp, plan.sp, plan.micro_batch, plan.global_batch) == (4, 2, 2, True, 1, 16)
    assert launch.model.name == "llama3-8b"
    assert {item.option for item in launch.unread if item.matters} == {"recipe", "dataset.seq_length"}

"""Conditions that only a running shell decides: listed as mattering where what is started depends on them."""

from __future__ import annotations

from pathlib import Path

from autoplan.api.launch_files import make_context
from autoplan.frameworks.common.launch import Unread
from autoplan.frameworks.launch_files import read_launch

TRAINING = """
torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $TP --num-layers 4 --hidden-size 1024 \
  --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --bf16 \
  --global-batch-size 8 --vocab-size 32000 --data-path $DATA $EXTRA
"""


def conditions(folder: Path, text: str) -> dict[str, Unread]:
    """Return what is listed of the conditions of a script."""
    path = folder / "train.sh"
    path.write_text(f"TP=2 DATA=a\n{text}{TRAINING}")
    launch = read_launch(path, make_context())
    return {item.option: item for item in launch.unread if "running shell" in item.why}


def test_a_branch_that_changes_the_plan_matters(tmp_path: Path) -> None:
    item = conditions(tmp_path, "if [ -f /etc/large ]; then TP=4; fi\n")["if [ -f /etc/large ]"]
    assert item.matters
    assert "if it holds: tp 4" in item.why


def test_a_branch_that_changes_nothing_priced_does_not_matter(tmp_path: Path) -> None:
    item = conditions(tmp_path, "if [ -f /etc/data ]; then DATA=b; else DATA=c; fi\n")["if [ -f /etc/data ]"]
    assert not item.matters


def test_the_other_branch_counts_too(tmp_path: Path) -> None:
    script = "if [ -d /data ]; then DATA=b; else EXTRA='--recompute-granularity selective'; fi\n"
    item = conditions(tmp_path, script)["if [ -d /data ]"]
    assert item.matters
    assert "if it does not hold: recompute 'selective'" in item.why


def test_a_command_behind_an_undecided_test_is_run_and_listed(tmp_path: Path) -> None:
    item = conditions(tmp_path, "[[ -d /data ]] && TP=4\n")["[[ -d /data ]] &&"]
    assert item.matters
    assert "does not hold: tp 2" in item.why


def test_a_named_case_of_an_unknown_word_matters(tmp_path: Path) -> None:
    found = conditions(tmp_path, "case $SIZE in small) TP=1;; *) DATA=b;; esac\n")
    (item,) = found.values()
    assert item.matters
    assert "tp 1" in item.why


def test_an_option_that_only_a_branch_gives_is_named(tmp_path: Path) -> None:
    item = conditions(tmp_path, "if [ -f /x ]; then EXTRA=--some-option-of-a-fork; fi\n")["if [ -f /x ]"]
    assert item.matters
    assert "--some-option-of-a-fork, not read" in item.why


def test_a_batch_of_no_whole_number_of_micro_batches_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"TP=1 DATA=a\n{TRAINING.replace('--global-batch-size 8', '--global-batch-size 4')}")
    (item,) = (item for item in read_launch(path, make_context()).unread if item.option == "global batch")
    assert item.matters
    assert "micro-batches of 1 on 8 replicas" in item.why


def test_a_script_that_starts_other_runs_too_says_that_the_last_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"DATA=a\nTP=1\n{TRAINING}TP=2\n{TRAINING}")
    launch = read_launch(path, make_context())
    assert launch.plan.tp == 2
    assert any(item.option == "2 commands" and item.matters for item in launch.unread)


def test_a_command_that_is_repeated_is_one_run(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"DATA=a TP=1\n{TRAINING}{TRAINING}")
    assert not any("commands" in item.option for item in read_launch(path, make_context()).unread)

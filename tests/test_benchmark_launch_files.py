"""Does the benchmark of public launch files tell read, refused and broken files apart?"""

from __future__ import annotations

from pathlib import Path

import launch_files
import pytest
from launch_files import candidates, judged

SCRIPT = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 \\
  --bf16 \\
  --seq-length 1024 --micro-batch-size $MICRO --global-batch-size 64 --vocab-size 32000 --odd-option
"""


def test_files_are_counted_by_what_became_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    (tmp_path / "bad.sh").write_text(SCRIPT.replace("8 pretrain", "8 pretrain_bert.py; pretrain").replace("1024", "x"))
    (tmp_path / "notes.md").write_text(SCRIPT)
    paths = {path.name: path for path in candidates(tmp_path)}
    assert set(paths) == {"train.sh", "bad.sh"}
    assert judged(paths["train.sh"]) == ("read", "read", True)  # with a micro-batch that was asked for
    kind, message, _ = judged(paths["bad.sh"])
    assert kind == "refused"
    assert "whole number" in message

    def breaks(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(launch_files, "read_launch", breaks)
    assert judged(paths["train.sh"])[0] == "traceback"

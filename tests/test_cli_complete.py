"""Does the shell complete names, as typer's own scripts ask for them?"""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import run


def completed(folder: Path, line: str) -> list[str]:
    """Words that a shell is offered behind a line."""
    count = len(line.split()) - (not line.endswith(" "))
    answer = run(folder, _AUTOPLAN_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(count))
    assert answer.returncode == 0
    return answer.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("autoplan exp", ["explain", "export"]),
        ("autoplan search llama3-7", ["llama3-70b"]),
        ("autoplan search llama3-70b --cluster gb", ["gb200-nvl72", "gb300-nvl72"]),
        (
            "autoplan estimate llama3-8b --framework torchtitan-",
            ["torchtitan-0.1", "torchtitan-0.2", "torchtitan-eager"],
        ),
        ("autoplan export plan.json --to megatron-", ["megatron-bridge", "megatron-lm"]),
        ("autoplan topo b2", ["b200"]),
        ("autoplan schema mixed-", ["mixed-cluster", "mixed-plan"]),
        ("autoplan db pu", ["pull", "push"]),
        ("autoplan search --precision f", ["fp16", "fp32", "fp8"]),
    ],
)
def test_names_are_offered(tmp_path: Path, line: str, offered: list[str]) -> None:
    assert sorted(completed(tmp_path, line)) == offered


def test_a_file_is_left_to_the_shell(tmp_path: Path) -> None:
    assert completed(tmp_path, "autoplan search ./my-mod") == []

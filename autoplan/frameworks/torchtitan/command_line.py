"""Command lines of torchtitan 0.3: where the program starts, its options, and the processes that torchrun starts."""

from __future__ import annotations

import re
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Unread
from autoplan.frameworks.common.options import show
from autoplan.frameworks.common.shell import Command
from autoplan.frameworks.common.shell_words import is_open

PROGRAMS = ("torchtitan.train", "torchtitan/train.py", "plan_cfg.py")
SCRIPTS = ("run_train.sh",)
OLD_FILE = "job.config_file"  # option of 0.2 with the name of the file


def training_program(command: Command) -> int | None:
    """Return the index of the training program among the words of a command; None if there is none."""
    ends: tuple[str, ...] = (*PROGRAMS, *SCRIPTS)
    if any(word.startswith(f"--{OLD_FILE}") for word in command.words):  # its train.py of 0.1, beside the script
        ends = (*ends, "train.py")
    return next((at for at, word in enumerate(command.words) if word.endswith(ends)), None)


def config_options(variables: dict[str, str]) -> list[str]:
    """Return the options for module and config that run_train.sh derives from the variables."""
    module, config = variables.get("MODULE", "llama3"), variables.get("CONFIG", "llama3_debugmodel")
    return ["--module", module, "--config", config]


def parse_words(words: list[str]) -> tuple[dict[str, Any], str | None, list[Unread]]:
    """Return (options by dotted name, policy of activation checkpointing, unread options)."""
    options: dict[str, Any] = {}
    policy, unread, at = None, [], 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith("activation_checkpoint:") or word.startswith("activation-checkpoint:"):
            policy = word.partition(":")[2]
            if policy not in ("full", "selective", "none"):
                raise InputError(f"{show(word)}: known are full, selective and none")
        elif word.startswith("--"):
            name, sign, _ = word[2:].replace("-", "_").partition("=")
            if sign:
                options[name] = _parsed(name, word.partition("=")[2])
            elif at < len(words) and not words[at].startswith("--") and ":" not in words[at]:
                options[name] = _parsed(name, words[at])
                at += 1
            else:  # a switch: --compile.enable, --compile.no-enable
                section, _, key = name.rpartition(".")
                is_off = key.startswith("no_")
                options[f"{section}.{key.removeprefix('no_')}"] = not is_off
        elif word not in ("", "$@", "${@}"):
            unread.append(Unread(option="argument", value=show(word), why="not an option"))
    return options, policy, unread


def _parsed(name: str, text: str) -> Any:
    """Return the value of an option, parsed as a number or flag; the path of a file stays as written."""
    if name == OLD_FILE:
        return text
    if is_open(text):
        raise InputError(f"{show(text)} is only known in a running shell: give it with --set NAME=VALUE")
    if re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        return int(text)
    return {"True": True, "False": False, "None": None}.get(text, text)


def num_devices_of(words: list[str], variables: dict[str, str]) -> int | None:
    """Return the number of processes that torchrun starts, from its options or NGPU."""
    values = {}
    for at, word in enumerate(words):
        name, sign, value = word.replace("_", "-").partition("=")
        if name in ("--nnodes", "--nproc-per-node"):
            values[name] = value if sign else words[at + 1] if at + 1 < len(words) else ""
    ranks = values.get("--nproc-per-node", variables.get("NGPU"))
    nodes = values.get("--nnodes", "1")
    return (
        int(ranks) * int(nodes)
        if ranks and ranks.isdecimal() and nodes.isdecimal() and len(ranks + nodes) < 12
        else None
    )

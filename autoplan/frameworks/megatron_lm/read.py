"""Reader of launch scripts of Megatron-LM's pretrain_gpt.py: bash scripts and plain lists of options."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Given, Launch, Reader, Unread
from autoplan.frameworks.common.options import Argument, Options, Unknown, typed
from autoplan.frameworks.common.shell import Command, Script, is_open, read_script
from autoplan.frameworks.megatron_lm.launch import launch_of
from autoplan.frameworks.megatron_lm.options import SWITCHES
from autoplan.frameworks.megatron_lm.table import argument_of
from autoplan.frameworks.megatron_lm.with_deepspeed import FRAMEWORK, is_with_deepspeed, translate

ENTRIES = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py")


def recognises(name: str, text: str) -> bool:
    """Return whether a file looks like a launch of Megatron-LM."""
    if any(entry in text for entry in ENTRIES):
        return True
    return (
        text.lstrip().startswith("--") and re.search(r"--(num-layers|tensor-model-parallel-size)\b", text) is not None
    )


def read(text: str, given: Given) -> Launch:
    """The launch that a script or a list of options describes."""
    script = read_script(text, given.variables)
    if not text.lstrip().startswith("--"):
        before, words = started(script, ENTRIES, given)
        if words is None:
            raise InputError("no command of the script starts pretrain_gpt.py")
    else:
        before, words = (), tuple(word for command in script.commands for word in command.words)
    arguments = Options(given_arguments(words), way_out="pass --model")
    arguments.remarks += (
        Unread(option=condition, value="", why="only a running shell can decide it", matters=False)
        for condition in script.open
    )
    target, framework = "megatron-lm", "megatron-core"
    if is_with_deepspeed(arguments):
        translate(arguments, has_model=given.model is not None)
        target = framework = FRAMEWORK
    devices = num_devices(before, script, text)
    return launch_of(arguments, given, target=target, framework=framework, num_devices=devices)


def started(
    script: Script, entries: Sequence[str], given: Given, depth: int = 0
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The words before and behind the program of that name, of the last command that starts it; None: there is none.

    Where the program stands inside a word or a here-document, that is a script of its own.
    """
    found: tuple[tuple[str, ...], tuple[str, ...] | None] = ((), None)
    for command in script.commands:
        for at, word in enumerate(command.words):
            if word.endswith(tuple(entries)) and not re.search(r"\s", word):
                found = (command.words[:at], command.words[at + 1 :])
                break
        else:
            if depth < 5 and (inner := _inner(command, entries)) is not None:
                nested = read_script(inner, [*given.variables, *_texts(script)])
                before, words = started(nested, entries, given, depth + 1)
                if words is not None:
                    found = ((*command.words, *before), words)
    return found


def _inner(command: Command, entries: Sequence[str]) -> str | None:
    for text in (*command.words, command.text):
        if any(entry in text for entry in entries) and re.search(r"\s", text):
            return text
    return None


def _texts(script: Script) -> list[tuple[str, str]]:
    return [(name, value) for name, value in script.variables.items() if isinstance(value, str)]


def given_arguments(words: Sequence[str]) -> list[Argument]:
    """The options in a list of words, by the names of Megatron-LM's parsed arguments."""
    result: list[Argument] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            result.append(Argument(word, "", word, word))
            continue
        option, sign, value = word.partition("=")
        values = [value] if sign else []
        while not sign and at < len(words) and not words[at].startswith("--"):
            values.append(words[at])
            at += 1
        # A variable that is not set may hold options of its own; behind a value or a switch it is no value.
        keeps = 0 if argument_of(option, ())[0] in SWITCHES else 1
        strays = [item for item in values[keeps:] if is_open(item) and re.fullmatch(r"\$\{?\w+\}?", item)]
        values = [item for place, item in enumerate(values) if place < keeps or item not in strays]
        name, value = argument_of(option, values)
        known = Unknown(value) if isinstance(value, str) and is_open(value) else typed(value)
        result.append(Argument(option, " ".join(values), name, known))
        result += [Argument(stray, "", stray, stray) for stray in strays]
    return result


def num_devices(before: Sequence[str], script: Script, text: str) -> int | None:
    """Return the devices that a launcher's words, directives of Slurm or variables start; None where nothing says."""
    options = _options(before)
    if any("torchrun" in word or "torch.distributed" in word for word in before):
        per_node, nodes = options.get("nproc_per_node", "1"), options.get("nnodes", "1").partition(":")[0]
        return _product(per_node, nodes)
    if any(word.endswith("deepspeed") for word in before) and "num_gpus" in options:
        return _product(options["num_gpus"], options.get("num_nodes", "1"))
    directives = _options([word for line in re.findall(r"(?m)^\s*#SBATCH\s+(.*)$", text) for word in line.split()])
    for name in ("ntasks", "n", "np"):
        if name in options:
            return _product(options[name])
    both = directives | options
    per_node = both.get("ntasks_per_node") or both.get("gpus_per_node", "").rpartition(":")[2]
    nodes = both.get("nodes") or both.get("N") or ""
    if per_node and nodes:
        return _product(per_node, nodes)
    if both.get("ntasks"):
        return _product(both["ntasks"])
    world = script.variables.get("WORLD_SIZE")
    return int(world) if isinstance(world, str) and world.isdigit() else None


def _options(words: Sequence[str]) -> dict[str, str]:
    """Options of a launcher with their values."""
    result = {}
    for at, word in enumerate(words):
        if word.startswith("-"):
            name, sign, value = word.lstrip("-").partition("=")
            follows = words[at + 1] if at + 1 < len(words) else ""
            result[name.replace("-", "_")] = value if sign else follows
    return result


def _product(*numbers: str) -> int | None:
    if not all(re.fullmatch(r"\d{1,7}", number, re.ASCII) for number in numbers):
        return None
    result = 1
    for number in numbers:
        result *= int(number)
    return result or None


READER = Reader(target="megatron-lm", recognises=recognises, read=read)

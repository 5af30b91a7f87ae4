"""Scripts that a script runs or submits as a job, with the variables and arguments that it gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path, PurePath

from autoplan.frameworks.common.beside import path_beside
from autoplan.frameworks.common.launch import LaunchContext, Unread
from autoplan.frameworks.common.shell import FIRST_ROUND, SUFFIXES, Command, Script, script_of, slurm_variables
from autoplan.frameworks.common.shell_words import is_open

MAX_DEPTH = 5  # scripts that start one another, and commands inside words
MAX_SCRIPTS = 8  # tried of those that a script starts
_PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SUBMITS = ("sbatch", "qsub")
_STARTS_NOTHING = ("echo", "printf", "cp", "mv", "cat", "chmod", "rm", "ls", "source", ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A script beside another one that starts it; `variables` are its environment and, by their places, arguments."""

    path: Path
    variables: tuple[tuple[str, str], ...]
    unread: tuple[Unread, ...]


def started_scripts(path: Path, text: str, context: LaunchContext) -> list[Started]:
    """Return the scripts beside the one at `path` that it starts, in their order, each as it is started first."""
    script = script_of(text, context)
    found: dict[Path, Started] = {}
    for started in _started_in(path, script, context, (), 0):
        found.setdefault(started.path, started)
    return list(found.values())


def _started_in(
    path: Path, script: Script, context: LaunchContext, environment: tuple[tuple[str, str], ...], depth: int
) -> Iterator[Started]:
    for command in script.commands:
        words = command.words
        seen = _given_by(command, dict(environment) | dict(command.environment))
        for inner in filter(None, (command.text, *(_command_in(words, at) for at in range(len(words))))):
            if depth < MAX_DEPTH:
                nested = script_of(inner, replace(context, variables=(*seen.items(), *context.variables)))
                yield from _started_in(path, nested, context, tuple(seen.items()), depth + 1)
        for at, word in enumerate(words if words and words[0] not in _STARTS_NOTHING else ()):
            if word.endswith(SUFFIXES) and not word.startswith("-"):
                beside = path_beside(PurePath(word).as_posix(), context.folder)
                if beside is None or beside.absolute() == path.absolute():
                    continue
                arguments = {str(place): value for place, value in enumerate(words[at + 1 :], 1)}
                given = {name: value for name, value in (seen | arguments).items() if not is_open(value)}
                shown = " ".join(
                    value if name.isdecimal() else f"{name}={value}"
                    for name, value in given.items()
                    if not name.startswith("SLURM_")
                )
                why = f"starts {PurePath(word).name}{f' with {shown[:120]}' if shown else ''}, which is read instead"
                note = Unread(option=path.name, value="", why=why, matters=False)
                yield Started(
                    path=beside,
                    variables=tuple((given | dict(context.variables)).items()),
                    unread=(note, *(_noting_loops(item) for item in script.unread())),
                )
                break


def _noting_loops(item: Unread) -> Unread:
    """Return a part of a script that was not read; for a loop, that its other rounds start other runs."""
    if not item.option.endswith(FIRST_ROUND):
        return item
    why = "starts several runs, of which the first is read: --set names another"
    return replace(item, option=item.option.removesuffix(FIRST_ROUND), why=why, matters=True)


def _command_in(words: tuple[str, ...], at: int) -> str:
    """Return the commands that a word of a command holds: of `bash -c` and of `sbatch --wrap`; blank if none."""
    word, before = words[at], words[at - 1] if at else ""
    if word.startswith("--wrap="):
        return word.removeprefix("--wrap=")
    holds = before == "--wrap" or (re.fullmatch(r"-[a-z]*c", before) and words[at - 2 : at - 1] != ("srun",))
    return word if holds and re.search(r"\s", word) else ""


def _pairs(words: Iterable[str]) -> dict[str, str]:
    return {match[1]: match[2] for word in words if (match := _PAIR.fullmatch(word))}


def _given_by(command: Command, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment that a command gives to what it starts: `sbatch --export`, `qsub -v`, `env NAME=VALUE`."""
    words = command.words
    submits = next((at for at, word in enumerate(words) if PurePath(word).name in _SUBMITS), None)
    if submits is None:
        own = [word for at, word in enumerate(words) if not _command_in(words, at)]
        return environment | _pairs(own)
    options = words[submits + 1 :]
    script_at = next((at for at, word in enumerate(options) if word.endswith(SUFFIXES)), len(options))
    options = options[:script_at]
    is_slurm = PurePath(words[submits]).name == "sbatch"
    lists = [
        word.partition("=")[2] if "=" in word and word.startswith("--") else follows
        for word, follows in zip_longest(options, options[1:], fillvalue="")
        if (word.partition("=")[0] == "--export" if is_slurm else word == "-v")
    ]
    named = _pairs(part for text in lists for part in text.split(","))
    takes_all = "-V" in options if not is_slurm else not lists or any("ALL" in text.split(",") for text in lists)
    job = slurm_variables(f"#SBATCH {' '.join(options)}") if is_slurm else {}
    of_job = {name: value for name, value in job.items() if isinstance(value, str)}
    return (environment if takes_all else {}) | named | of_job

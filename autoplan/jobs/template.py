"""Template of a scheduler: commands that submit, follow and end a job, and patterns to parse their output.

The commands are lists of arguments whose {placeholders} are replaced item by item, without a shell.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from autoplan.base.errors import InputError
from autoplan.base.files import decode, read_table, shipped
from autoplan.base.json_schema import schema
from autoplan.base.units import check_name, check_positive
from autoplan.jobs.job import Cause
from autoplan.launch.names import LAUNCHERS

# Meanings of the scheduler's words for states; if several words match, the first of these meanings counts.
Meaning = Cause | Literal["running", "waiting", "done"]
MEANINGS: tuple[Meaning, ...] = (*get_args(Cause), "running", "waiting", "done")

# Placeholders that a trial replaces, with their meanings; then placeholders for several words or several jobs.
PLACEHOLDERS = {
    "folder": "of the trial",
    "plan": "its plan.json",
    "log": "the file that belongs to what the job writes",
    "outcome": "the file that `autoplan run --out` writes",
    "script": "the launch file, where the template has a launcher",
    "nodes": "number of them",
    "gpus_per_node": "devices of each",
    "gpus": "devices of all",
    "steps": "that the trial takes, with those that warm up",
    "time_limit": "hours:minutes:seconds",
    "time_limit_s": "seconds",
    "user": "name of the one who submits",
    "job": "name of the job, unlike all others",
    "id": "that the answer to submit gave",
}
_WORDS, _JOBS, _IDS = "options", "jobs", "ids"  # options of `autoplan run`, after its plan
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_BLANKS = ("None", "<none>")  # in squeue and kubectl


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """State of a job from one line of output, with its own name, the scheduler's id, or both."""

    job: str
    id: str
    state: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTemplate:
    """A scheduler: its commands and the meaning of their output.

    Patterns are Python's.  `answer` finds (?P<id>...) in the output of submit; blank if jobs only have their name.
    `rows` is matched with every line of output of poll and history: it has groups (?P<job>...), (?P<id>...) or both,
    (?P<state>...) and optionally (?P<why>...), whose words may be in `states` too.  A command with {jobs} or {ids},
    joined by commas, is run once for all jobs, any other command once per job.  `history` is asked about jobs unknown
    to poll, and may fail or lag behind.  `log` writes a job's log to stdout; blank if the job writes the file itself.
    `busy` matches the output of a failed command that should be run again.  With a `launcher` of `autoplan export`,
    every trial gets its launch files.
    """

    name: str
    submit: tuple[str, ...]
    poll: tuple[str, ...]
    rows: str
    states: dict[str, Meaning]
    cancel: tuple[str, ...]
    answer: str = ""
    history: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    busy: str = "(?!)"
    launcher: str = ""
    poll_every_s: float = 10.0
    patience_s: float = 3600.0  # maximum time without an answer, before the study ends

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_positive("poll_every_s", self.poll_every_s)
        check_positive("patience_s", self.patience_s)
        _pattern("busy", self.busy, ())
        if self.answer:
            _pattern("answer", self.answer, ("id",))
        rows = _pattern("rows", self.rows, ("state",))
        if not {"job", "id"} & set(rows.groupindex):
            raise InputError("rows must name (?P<job>...), (?P<id>...) or both")
        if not self.states:
            raise InputError("states must say what the words of the scheduler mean")
        if self.launcher and self.launcher not in LAUNCHERS:
            raise InputError(f"no launcher {self.launcher!r}: known are {', '.join(LAUNCHERS)}")
        for command in ("submit", "poll", "cancel", "history", "log"):
            self._check(command, getattr(self, command))

    def _check(self, command: str, words: tuple[str, ...]) -> None:
        if not words and command in ("submit", "poll", "cancel"):
            raise InputError(f"{command} must be a list of words")
        if words and (not words[0] or _PLACEHOLDER.search(words[0])):
            raise InputError(f"{command} must begin with the name of a program, got {words[0]!r}")
        allowed = set(PLACEHOLDERS) - (set() if self.launcher else {"script"})
        if command == "submit":
            allowed |= {_WORDS}
        if command in ("poll", "history"):
            allowed |= {_JOBS, _IDS}
        if command == "submit" or not self.answer:
            allowed -= {"id", _IDS}
        for word in words:
            for name in _PLACEHOLDER.findall(word):
                if name not in allowed:
                    raise InputError(f"{command}: no placeholder {{{name}}}; known: {', '.join(sorted(allowed))}")
            if f"{{{_WORDS}}}" in word and word != f"{{{_WORDS}}}":
                raise InputError(
                    f"{command}: {{{_WORDS}}} stands for several arguments: it must be a separate argument"
                )

    @property
    def takes_options(self) -> bool:
        """Return whether submit passes words on to the program of the trial."""
        return f"{{{_WORDS}}}" in self.submit

    @property
    def finds_by_name(self) -> bool:
        """Return whether poll finds a job by the name it was submitted with, even if the submission got no answer."""
        return "job" in re.compile(self.rows).groupindex

    def submission(self, values: Mapping[str, str], options: Sequence[str] = ()) -> list[str]:
        """Return the command that submits the trial."""
        return [
            word for item in self.submit for word in (options if item == f"{{{_WORDS}}}" else (_filled(item, values),))
        ]

    def questions(self, command: Literal["poll", "history"], jobs: Sequence[Mapping[str, str]]) -> Iterator[list[str]]:
        """Return the commands that ask about all of `jobs`; empty if the template has none."""
        words: tuple[str, ...] = getattr(self, command)
        placeholders = {name for word in words for name in _PLACEHOLDER.findall(word)}
        if placeholders & {"job", "id"} or not jobs:
            yield from ([_filled(word, values) for word in words] for values in jobs)
            return
        joined = {_JOBS: ",".join(job["job"] for job in jobs), _IDS: ",".join(job["id"] for job in jobs if job["id"])}
        yield [_filled(word, {**jobs[0], **joined}) for word in words]

    def command(self, command: Literal["cancel", "log"], values: Mapping[str, str]) -> list[str]:
        """Return the command that ends a job, or writes its log."""
        return [_filled(word, values) for word in getattr(self, command)]

    def read_id(self, text: str) -> str:
        """Return the scheduler's id of a job, from the output of submit; blank without an `answer`."""
        if not self.answer:
            return ""
        match = re.search(self.answer, text, re.MULTILINE)
        if match is None:
            raise InputError(f"{self.submit[0]} wrote {_short(text)}, in which answer {self.answer!r} finds no id")
        return match["id"]

    def read_rows(self, program: str, text: str) -> list[Row]:
        """Parse an output line by line; lines that do not match are skipped if others match."""
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        rows = [row for line in lines if (row := re.search(self.rows, line))]
        if lines and not rows:
            raise InputError(f"{program} wrote {_short(text)}, in which rows {self.rows!r} finds nothing")
        return [
            Row(**{name: row.groupdict("").get(name, "") for name in ("job", "id", "state", "why")}) for row in rows
        ]

    def meaning(self, rows: Sequence[Row]) -> tuple[Meaning, str]:
        """Return the state for the rows of one job, and the scheduler's words for it."""
        readings = []
        for row in rows:
            if row.state not in self.states:
                explained = ", ".join(self.states)
                raise InputError(f"{self.name} says {row.state!r}, which is not in states; known are {explained}")
            why = [word for word in row.why.split() if word not in _BLANKS]
            words = [row.state, *(word for part in why for word in part.split(",") if word in self.states)]
            states = dict.fromkeys([*([] if row.state in _BLANKS else [row.state]), *why])
            readings.append((min((self.states[word] for word in words), key=MEANINGS.index), " ".join(states)))
        meaning, text = min(readings, key=lambda reading: MEANINGS.index(reading[0]))
        return meaning, f"{self.name}: {text}" if text else self.name

    def is_busy(self, text: str) -> bool:
        """Return whether a failed command should be run again."""
        return re.search(self.busy, text) is not None


def _pattern(key: str, text: str, groups: tuple[str, ...]) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # e.g. for "[[", which now means "["
            pattern = re.compile(text)
    except re.error as error:
        raise InputError(f"{key} is not a valid pattern: {' '.join(str(error).split())}") from None
    for group in groups:
        if group not in pattern.groupindex:
            raise InputError(f"{key} must name (?P<{group}>...)")
    return pattern


def _filled(word: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], word)


def _short(text: str) -> str:
    """Return the first line of an output, short enough for a message."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return repr(line[:200]) if line else "nothing"


def load_job_template(text: str) -> JobTemplate:
    """Return the template with a shipped id, or in a TOML file, which may extend a shipped template."""
    shipped_templates = shipped("jobs")
    if text in shipped_templates:
        return decode(JobTemplate, read_table(shipped_templates[text]), f"template {text}")
    path = Path(text)
    if path.suffix != ".toml":
        raise InputError(f"unknown template {text!r}: known: {', '.join(shipped_templates)}, or give a TOML file")
    table = dict(read_table(path))
    if "extends" in table:
        name = table.pop("extends")
        if name not in (names := tuple(shipped_templates)):  # may have any type
            raise InputError(f"{path}: extends {name!r}, which must be one of {', '.join(names)}")
        base = read_table(shipped_templates[name])
        states = table.get("states", {})
        table = {**base, **table, "states": {**base["states"], **states} if isinstance(states, dict) else states}
    return decode(JobTemplate, table, str(path))


def job_template_schema() -> dict[str, Any]:
    """Return the JSON Schema of a template, in which anything is optional if it extends a shipped template."""
    described = schema(JobTemplate, human_units=True)
    table = described["$defs"]["JobTemplate"]
    required = table.pop("required")
    table["properties"]["extends"] = {"enum": list(shipped("jobs"))}
    table["anyOf"] = [{"required": required}, {"required": ["extends"]}]
    return described

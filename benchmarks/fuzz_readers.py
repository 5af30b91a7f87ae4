"""Fuzzing of the readers of launch files: nothing but an InputError may come out, whatever the file holds.

usage: python benchmarks/fuzz_readers.py [--seconds N] [--seed N] [--examples FOLDER ...] [--out FOLDER]

Files that `export` writes, and those of the folders of examples, are cut, joined and filled with values that break
parsers; random bytes come beside them.  Every reader that autoplan has reads them.  A file that makes one raise
anything but an InputError, hang, take gigabytes, start a process, open a connection, run text as a program or touch a
file is kept in the output folder, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import autoplan
from autoplan.api.plan_files import make_plan_file
from autoplan.base.errors import InputError
from autoplan.base.files import encode, write_text
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.launch import Given, Launch, Reader
from autoplan.frameworks.launch_files import READERS
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.frameworks.registry import TARGETS
from autoplan.launch.targets import exported
from autoplan.read.cluster import load_cluster
from autoplan.read.model import load_model
from autoplan.search.ranking import ranked
from autoplan.spec.enums import ContextParallelKind, Recompute, Schedule, Sharding
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec

LONGEST_S = 20.0  # of the processor, that reading one file may take
MOST_BYTES = 8 * 2**30  # of address space
MOST_CHARACTERS = 2**16  # of one file

PLANS = (
    ParallelPlan(global_batch=64, dp_shard=8),
    ParallelPlan(global_batch=64, dp_shard=8, sharding=Sharding.ZERO3),
    ParallelPlan(global_batch=64, dp_shard=4, tp=2, sp=True),
    ParallelPlan(global_batch=64, dp_shard=4, tp=2, sharding=Sharding.ZERO2),
    ParallelPlan(global_batch=64, dp_shard=2, pp=4, recompute=Recompute.FULL),
    ParallelPlan(global_batch=64, pp=4, vp=2, schedule=Schedule.INTERLEAVED, dp_shard=2),
    ParallelPlan(global_batch=64, cp=2, cp_kind=ContextParallelKind.ALL_TO_ALL, dp_shard=4, sharding=Sharding.ZERO3),
    ParallelPlan(global_batch=64, ep=4, dp_shard=8),
)
NASTY = (
    "", "0", "-1", "1e999", "-0.0", "nan", ".nan", ".inf", "1" * 5000, "0x" + "f" * 5000, "99999999999999999999",
    "4294967296", "1_000", "0o17", "true", "null", "~", "None", "auto", "[]", "{}", "[1, 2]", "{a: 1}", "''", '"', "'",
    "\\", "\0", "\ufeff", "\u2028", "\\ud800", "\U0001f600", "[" * 3000, "{" * 3000, "(" * 3000, '{"a":' * 3000,
    "- " * 3000, "$(" * 500, "${a:-" * 500, "$(touch pwned)", "`touch pwned`", "; touch pwned", "| touch pwned",
    "> pwned", "<<EOF", "${X:?}", "$((1 + ", "${!a*}", "!!python/object/apply:os.system [touch pwned]", "!!binary x",
    "&a [*a]", "<<: *a", "2026-99-99", "? a", "--- a", "%YAML 9", "import os", "__import__('os').system('touch pwned')",
    "exec('touch pwned')", "open('pwned', 'w')", "lambda: 0", "../../pwned", "/dev/zero", "~/pwned", "file:///pwned",
)  # fmt: skip
TAME = ("0", "1", "2", "3", "4", "7", "8", "16", "64", "4096", "1.5", "5e8", "true", "false", "bf16", "fp16", "full")
WORDS, MARKS = re.compile(r"[\w.+-]+"), re.compile(r"[^\w\s]")

OWN = tuple({str(Path(autoplan.__file__).parent), sys.prefix, sys.base_prefix})  # presets, and modules imported late
ANNOTATES = ("typing", "annotationlib")  # evaluate the annotations of classes
FORBIDDEN = re.compile(
    r"os\.(system|exec|fork|forkpty|posix_spawn|spawn|remove|rename|rmdir|mkdir|link|symlink|truncate|chmod|chown|utime"
    r"|putenv|unsetenv|kill|startfile)|subprocess\..*|shutil\..*|socket\..*|pty\..*|pickle\..*|ctypes\..*|tempfile\..*"
)


@dataclass(frozen=True, slots=True)
class Seed:
    """A file to start from."""

    name: str
    text: str


class Forbidden(BaseException):
    """Deed of a reader beside reading; no `except Exception` of a reader can hide it."""


class Guard:
    """Sees what the process does while a reader runs."""

    def __init__(self) -> None:
        self.watches = False
        sys.addaudithook(self._saw)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Nothing but reading happens inside, for a limited time."""
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
        self.watches = True
        try:
            yield
        finally:
            self.watches = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watches:
            return
        if event == "open":
            path, mode, flags = (*arguments, None, None, None)[:3]
            writes = any(letter in str(mode or "") for letter in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if writes or not str(path).startswith(OWN):
                raise Forbidden(f"opened {path!r} ({mode or flags})")
        elif event == "exec":
            name = getattr(arguments[0], "co_filename", "")
            if name.startswith("<") and sys._getframe(1).f_globals.get("__name__") not in ANNOTATES:
                raise Forbidden(f"ran a program from {name}")
        elif FORBIDDEN.fullmatch(event):
            raise Forbidden(f"{event} {arguments!r:.200}")


def readers() -> tuple[Reader, ...]:
    """Return the readers of all launch files, and of plan files."""
    return READERS


def exports() -> Iterator[Seed]:
    """Files that export writes for some plans, for every target and version that takes them, and the plan files."""
    cluster, training = load_cluster("h100-sxm:4x8"), TrainingSpec(seq_len=4096)
    frameworks = {framework.rules: framework for framework in map(load_framework, reversed(preset_frameworks()))}
    for model in map(load_model, ("llama3-8b", "mixtral-8x7b")):
        for rules, framework in frameworks.items():
            problem = Problem(model=model, training=training, cluster=cluster, framework=framework)
            costs = estimate(problem, PlanBatch.of(PLANS[:1], model.num_layers))
            first = make_plan_file(problem, ranked(problem, costs, [0]), None)
            for plan in PLANS:  # the figures beside it stay those of the first
                file = replace(first, best=replace(first.best, plan=plan))
                yield Seed("plan.json", encode(file))
                for target in TARGETS.values():
                    for version in target.versions if rules in target.rules else ():
                        try:
                            files = exported(file, target.name, "torchrun", version)
                        except InputError:
                            continue
                        yield from (Seed(file.name, file.text) for file in files)


def examples(folders: Sequence[Path]) -> Iterator[Seed]:
    """Files below the folders that may be launch files, in order."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".sh", ".yaml", ".yml", ".json", ".toml", ".py") and path.is_file():
                yield Seed(path.name, path.read_text(errors="replace")[:MOST_CHARACTERS])


def mutated(seed: Seed, seeds: Sequence[Seed], dice: random.Random) -> str:
    """The text of a file after some changes."""
    if dice.random() < 0.03:
        return dice.randbytes(dice.randrange(500)).decode("utf-8", errors="replace")
    text = seed.text
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        text = dice.choice(CHANGES)(text, seeds, dice)
    return text[:MOST_CHARACTERS]


def _replace_word(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    words = list((MARKS if dice.random() < 0.1 else WORDS).finditer(text))
    if not words:
        return dice.choice(NASTY)
    word = dice.choice(words)
    new = dice.choice((dice.choice(NASTY), dice.choice(words).group(), dice.choice(TAME)))
    return text[: word.start()] + new + text[word.end() :]


def _insert(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    at = dice.randrange(len(text) + 1)
    return text[:at] + dice.choice(NASTY) + text[at:]


def _cut(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    first = dice.randrange(len(text) + 1)
    return text[:first] + text[first + dice.choice((1, 5, 50, len(text))) :]


def _lines(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    if not lines:
        return text
    at = dice.randrange(len(lines))
    other = dice.choice(dice.choice(seeds).text.splitlines(keepends=True) or ["\n"])
    kept = dice.choice(([], [lines[at]] * 2, [lines[at], other], [other], [lines[at].lstrip()], [" " + lines[at]]))
    return "".join((*lines[:at], *kept, *lines[at + 1 :]))


def _join(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    other = dice.choice(seeds).text
    return text[: dice.randrange(len(text) + 1)] + other[dice.randrange(len(other) + 1) :]


def _bytes(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    data = bytearray(text.encode("utf-8", errors="replace")[:MOST_CHARACTERS])
    for _ in range(min(dice.randrange(1, 20), len(data))):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return data.decode("utf-8", errors="replace")


CHANGES = (*[_replace_word] * 6, *[_lines] * 3, _insert, _cut, _join, _bytes)


def answer(guard: Guard, reader: Reader, name: str, text: str, given: Given) -> str:
    """'read' or 'refused'; whatever else came out is raised."""
    try:
        with guard.watching():
            reader.recognises(name, text)
            launch = reader.read(text, given)
        if not isinstance(launch, Launch):
            raise TypeError(f"answered a {type(launch).__name__}")
        launch.plan.describe()
        return "read"
    except InputError as error:
        if len(lines := str(error).splitlines()) != 1:
            raise ValueError(f"a message of {len(lines)} lines: {error!s:.200}") from error
        return "refused"
    except RecursionError:  # read.launches tells it for all readers
        return "refused"


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise Forbidden(f"took the processor longer than {LONGEST_S:g} s")


def fuzz(seconds: float, seed: int, folders: Sequence[Path], out: Path) -> int:
    """Fuzz the readers; return the number of files that went wrong, which are kept in `out`."""
    signal.signal(signal.SIGPROF, _out_of_time)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    seeds, known, dice, guard = [*exports(), *examples(folders)], readers(), random.Random(seed), Guard()
    model = load_model("llama3-8b")
    trainer = (("PER_DEVICE_TRAIN_BATCH_SIZE", "2"), ("GRADIENT_ACCUMULATION_STEPS", "4"), ("BF16", "true"))
    usual = Given(model=model, num_devices=8, devices_per_node=8, seq_len=4096, variables=trainer)
    givens = (
        *[usual] * 4,
        replace(usual, model=None),
        Given(),
        Given(
            model=model, num_devices=7, seq_len=1, variables=(("WORLD_SIZE", "x"), ("TP", "$(id)"), ("BF16", "perhaps"))
        ),
    )
    own = {reader.target: [start for start in seeds if reader.recognises(start.name, start.text)] for reader in known}
    for known_reader in known:  # what is imported late is imported before anything is watched
        for start in own[known_reader.target]:
            with suppress(InputError, RecursionError):
                known_reader.read(start.text, givens[0])
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    slowest: dict[str, float] = defaultdict(float)
    wrong, end = set[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        reader = dice.choice(known)
        start = dice.choice(own[reader.target] if own[reader.target] and dice.random() < 0.9 else seeds)
        text = mutated(start, seeds, dice)
        began = time.process_time()
        try:
            found = answer(guard, reader, start.name, text, dice.choice(givens))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            found = "wrong"
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{reader.target}: {type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
            if kind not in wrong:
                wrong.add(kind)
                kept = out / f"wrong_{len(wrong)}_{re.sub('[^a-z0-9.]+', '_', reader.target)}"
                write_text(kept, text.encode("utf-8", errors="replace").decode(), force=True)
                print(f"{kind}: {error!s:.300}\n  kept as {kept}", file=sys.stderr)
        counts[reader.target][found] += 1
        slowest[reader.target] = max(slowest[reader.target], time.process_time() - began)
    print(f"{len(seeds)} files to start from, seed {seed}, {seconds:g} s")
    for target, count in sorted(counts.items()):
        summary = ", ".join(f"{number} {what}" for what, number in sorted(count.items()))
        print(f"{target}: {count.total()} files, {summary}; slowest {1e3 * slowest[target]:.0f} ms")
    return len(wrong)


def main() -> None:
    """Fuzz for a while, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=Path, nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("fuzz"), metavar="FOLDER")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    sys.exit(1 if fuzz(asked.seconds, asked.seed, asked.examples, asked.out) else 0)


if __name__ == "__main__":
    main()

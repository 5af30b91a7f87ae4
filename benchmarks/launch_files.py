"""Public launch files: how many are read, refused with a line, break or hang the readers?

usage: python benchmarks/launch_files.py CHECKOUT ... [--report FILE]

Every file of the checkouts that a reader knows, or that names a launcher, is read.  Where a refusal asks for a model,
devices, a length or a variable it gets one, as a person would give it; what is still refused is counted by its message.
"""

from __future__ import annotations

import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from reports import make_parser, write_report

from autoplan.api.launch_files import make_context
from autoplan.base.errors import InputError
from autoplan.frameworks.launch_files import looks_like_launch, read_launch

SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml", ".json", ".toml", ".py")
LAUNCHES = re.compile(r"torchrun|accelerate launch|\bdeepspeed\s|--tensor-model-parallel-size|\bmegatron (sft|pt)\b")
NOT_LAUNCHES = re.compile(r"/(tests?|unit_tests|docker|\.github|docs)/")
MAX_BYTES = 200_000
MAX_ANSWERS = 12  # that are given to one file
LONGEST_S = 10
ANSWERS: dict[str, tuple[str, Any]] = {
    "--devices": ("devices", 64),
    "--model": ("model", "llama3-8b"),
    "--seq-len": ("seq_len", 4096),
}


@dataclass(slots=True)
class Counts:
    """Outcomes of the files of one checkout."""

    outcomes: Counter[str] = field(default_factory=Counter)
    partly: int = 0  # files that are read with options that may cost something and are not in the plan

    @property
    def broken(self) -> int:
        """Files that broke a reader, or held it up."""
        return self.outcomes["hang"] + self.outcomes["traceback"]


def candidates(checkout: Path) -> Iterator[Path]:
    """Yield the files that may be launch files; of Python those that are recipes or configurations."""
    for path in sorted(checkout.rglob("*")):
        name = str(path.relative_to(checkout.parent))
        if path.suffix not in SUFFIXES or not path.is_file() or NOT_LAUNCHES.search(name):
            continue
        text = path.read_text(errors="replace")
        if len(text) > MAX_BYTES or (path.suffix == ".py" and not re.search("recipe|config", name)):
            continue
        is_script = path.suffix in (".sh", ".slurm", ".sbatch")
        if looks_like_launch(path, text) or (is_script and LAUNCHES.search(text)):
            yield path


def outcome(path: Path) -> tuple[str, bool]:
    """Return 'read' or the message of the refusal, and whether options that matter were not read."""
    answers: dict[str, Any] = {}
    variables: dict[str, str] = {}
    message = ""
    for _ in range(MAX_ANSWERS):
        try:
            launch = read_launch(path, make_context(**answers, variables=variables))
        except InputError as error:
            message = str(error)
        else:
            return "read", any(option.matters for option in launch.unread)
        asked = [word for word in ANSWERS if word in message and ANSWERS[word][0] not in answers]
        if asked:
            answers |= dict(ANSWERS[word] for word in asked)
            continue
        named = [name for name in re.findall(r"--set (\w+)=", message) if name not in variables]
        if not named:
            break
        recipe = re.search(r"one of (\w+)", message)
        choice = recipe[1] if named[0] == "RECIPE" and recipe else "1"
        variables[named[0]] = "true" if f"{named[0]}=true" in message else choice
    return message.removeprefix(f"{path}: "), False


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def main() -> None:
    """Read the files of all checkouts, and tell."""
    parser = make_parser(__doc__)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT")
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, _out_of_time)
    counts: dict[str, Counts] = defaultdict(Counts)
    refusals: Counter[str] = Counter()
    for checkout in asked.checkouts:
        for path in candidates(checkout):
            kind, message, is_partly = judged(path)
            counts[checkout.name].outcomes[kind] += 1
            counts[checkout.name].partly += is_partly
            if kind == "refused":
                message = message.replace(str(path.parent), "")
                refusals[re.sub(r"'[^']*'|(?<!\w)/\S+|\d+", "#", message)[:100]] += 1
    table = outcomes_table(counts, refusals)
    print(table)
    if asked.report:
        names = " ".join(checkout.name for checkout in asked.checkouts)
        write_report(asked.report, "Public launch files", f"`python benchmarks/launch_files.py {names}`", table)
    sys.exit(1 if any(count.broken for count in counts.values()) else 0)


def judged(path: Path) -> tuple[str, str, bool]:
    """Return the kind of the outcome of a file, its message, and whether it is read in part."""
    signal.alarm(LONGEST_S)
    try:
        message, is_partly = outcome(path)
    except TimeoutError:
        return "hang", "", False
    except Exception as error:
        print(f"{path}: {type(error).__name__}: {error!s:.200}", file=sys.stderr)
        return "traceback", "", False
    finally:
        signal.alarm(0)
    return "read" if message == "read" else "refused", message, is_partly


def outcomes_table(counts: dict[str, Counts], refusals: Counter[str]) -> str:
    """Return the table of outcomes, and the most frequent refusals."""
    lines = [f"{'checkout':<36} {'files':>6} {'read':>6} {'partly':>7} {'refused':>8} {'broken':>7}"]
    for name, count in sorted(counts.items()):
        outcomes = count.outcomes
        figures = f"{outcomes.total():>6} {outcomes['read']:>6} {count.partly:>7} {outcomes['refused']:>8}"
        lines.append(f"{name[:36]:<36} {figures} {count.broken:>7}")
    lines += ["", "refused most often because"]
    lines += [f"{number:>5}  {message}" for message, number in refusals.most_common(15)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

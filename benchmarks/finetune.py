"""Fine-tuning against published runs: time and memory of full, LoRA, 8-bit and 4-bit training, by kind and source.

The runs stand in `finetuning_runs.csv`, in the columns of the table of measured runs, with their sources.  Mechanisms
were mended with the sources of `LEARNT` in view: those whose faults were known before, of the others those that a hash
of their name draws, and those of the eighth and tenth blind rounds, whose errors were looked at one by one.  Of the
rest only these figures were looked at, but for the memory of fmsaccel and torchtune, whose verdicts were wrong.  What
was predicted before anything was changed for them is in `first_errors.csv`.

usage: python benchmarks/finetune.py [--rows] [--report FILE]
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measured_runs import source_of, with_answers
from reports import make_parser, write_report

from autoplan.runs.predictions import predict_all
from autoplan.runs.runs import Run, read_runs
from autoplan.spec.run_outcome import Prediction

RUNS = Path(__file__).with_name("finetuning_runs.csv")
FIRST_ERRORS = Path(__file__).with_name("first_errors.csv")
KNOWN = ("axolotl", "fsdpqlora", "litgpt", "mlperflora40", "mlperflora51", "nemolora", "qwenreadme")
DRAWN = ("a800gist", "automodellora", "hffsdp")  # sha256 of the name begins with 8 or more
ROUND_8 = ("unillm", "vectorlm")
ROUND_10 = ("halolora", "krailora", "mlperflora41", "swifth20")
LEARNT = (*KNOWN, *DRAWN, *ROUND_8, *ROUND_10)
HEAD = (
    f"{'':28}{'runs':>6}{'error':>7}{'p90':>7}{'bias':>7}{'cover':>7}{'width':>7}{'first':>7}{'memory':>8}{'error':>7}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A finished run beside its prediction; figures that nobody published are NaN."""

    run: Run
    prediction: Prediction
    measured_s: float
    measured_gib: float
    first_log_error: float  # log(measured / predicted), before anything was changed for such runs

    @property
    def source(self) -> str:
        """The publisher."""
        return source_of(self.run)

    @property
    def half(self) -> str:
        """Whether mechanisms were mended with the run in view."""
        return "learnt from" if self.source in LEARNT else "blind"

    @property
    def kind(self) -> str:
        """Type of the frozen weights beside adapters; LoRA where it is the usual one, full without adapters."""
        tuning = self.run.problem.training.finetuning if self.run.problem else None
        if tuning is None or not tuning.has_adapters:
            return "full"
        return {"none": "LoRA", "nf4-dq": "nf4"}.get(tuning.quantization, tuning.quantization)

    @property
    def time_error(self) -> float:
        """The relative error of the step."""
        return (self.prediction.step_time_s or np.nan) / self.measured_s - 1.0

    @property
    def memory_error(self) -> float:
        """The relative error of the peak memory."""
        return (self.prediction.peak_memory_gib or np.nan) / self.measured_gib - 1.0

    @property
    def is_inside(self) -> bool:
        """Whether the measured step lies in the predicted interval."""
        low, high = self.prediction.step_time_low_s, self.prediction.step_time_high_s
        return low is not None and high is not None and low <= self.measured_s <= high

    @property
    def width(self) -> float:
        """Width of the interval over the measured step."""
        low, high = self.prediction.step_time_low_s or np.nan, self.prediction.step_time_high_s or np.nan
        return (high - low) / self.measured_s


def compared() -> Iterator[Compared]:
    """Every finished run of the table beside its prediction."""
    with FIRST_ERRORS.open(newline="", encoding="utf-8") as file:
        first = {row["id"]: float(row["log_error"]) for row in csv.DictReader(file)}
    runs = list(read_runs(RUNS))
    for (run, row), prediction in zip(with_answers(RUNS, runs), predict_all(runs), strict=True):
        if row["status"] == "ok":
            yield Compared(
                run=run,
                prediction=prediction,
                measured_s=float(row["step_time_s"] or "nan"),
                measured_gib=float(row["peak_memory_gib"] or "nan"),
                first_log_error=first.get(run.id, np.nan),
            )


def median_error(errors: Iterable[float]) -> float:
    """The median of the absolute errors that are known."""
    known = [abs(error) for error in errors if not np.isnan(error)]
    return float(np.median(known)) if known else np.nan


def line(name: str, rows: list[Compared]) -> str:
    """Figures of some runs in percent; runs without a prediction count as errors of 100 %."""
    timed = [row for row in rows if not np.isnan(row.measured_s)]
    weighed = [row for row in rows if not np.isnan(row.measured_gib)]
    errors = np.nan_to_num([abs(row.time_error) for row in timed], nan=1.0)
    logs = [np.log1p(row.time_error) for row in timed if not np.isnan(row.time_error)]
    first = [np.expm1(-row.first_log_error) for row in timed]
    memory = np.nan_to_num([row.memory_error for row in weighed], nan=1.0).tolist()
    text = f"{name:28}{len(timed):6d}"
    if timed:
        text += f"{100 * np.median(errors):7.1f}{100 * np.quantile(errors, 0.9):7.1f}{100 * np.median(logs):7.1f}"
        inside, width = np.mean([row.is_inside for row in timed]), np.nanmedian([row.width for row in timed])
        text += f"{inside:7.2f}{100 * width:7.1f}{100 * median_error(first):7.1f}"
    else:
        text += f"{'-':>7}" * 6
    return text + f"{len(weighed):8d}" + (f"{100 * median_error(memory):7.1f}" if weighed else f"{'-':>7}")


def table(title: str, rows: list[Compared], name: Callable[[Compared], str]) -> str:
    """Figures of the runs by what `name` calls them."""
    groups: Mapping[str, list[Compared]] = {each: [] for each in sorted(map(name, rows))}
    for row in rows:
        groups[name(row)].append(row)
    return "\n".join([f"{title:28}{HEAD}", *(line(each, members) for each, members in groups.items())])


def each_row(rows: list[Compared]) -> str:
    """Every run that was learnt from on a line of its own."""
    return "\n".join(
        f"{row.run.id:18}{row.kind:6}{row.measured_s:9.3f} s ({100 * row.time_error:+4.0f} %)"
        f"{row.measured_gib:8.1f} GiB ({100 * row.memory_error:+4.0f} %)"
        for row in rows
        if row.half != "blind"
    )


def main() -> int:
    """Print the figures by half, by kind in each, and by source."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", action="store_true", help="also every run that was learnt from")
    options = parser.parse_args()
    rows = list(compared())
    about = (
        "error, p90, bias, cover and width are those of the time of a step, as autoplan score has them; first: the\n"
        "median error before anything was changed for these runs; memory: runs with a peak, and its median error"
    )
    blocks = [about, table("half", rows, lambda row: row.half)]
    blocks.append(table("kind", rows, lambda row: f"{row.half}: {row.kind}"))
    blocks.append(table("source", rows, lambda row: f"{row.half}: {row.source}"))
    if options.rows:
        blocks.append(each_row(rows))
    print("\n\n".join(blocks))
    if options.report:
        write_report(options.report, "Fine-tuning against published runs", "`python benchmarks/finetune.py`", *blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How true are the predictions on measured runs?  Prices a table of runs and scores the prediction table.

usage: python benchmarks/accuracy.py [--runs RUNS.csv] [--scorer SCORER.py] [--report REPORT.md]

The table is priced by `autoplan predict`, as people do it.
The scorer is any program that takes RUNS.csv and PREDICTIONS.csv and prints a table.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import autoplan
from autoplan.files import write_text

AUTOPLAN = (sys.executable, "-c", "from autoplan.cli import main; main()")
SHARED = Path(__file__).resolve().parents[2] / "shared"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Price, score, print and, if asked, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=SHARED / "data" / "measured_runs.csv")
    parser.add_argument("--scorer", type=Path, default=SHARED / "tools" / "score_runs.py")
    parser.add_argument("--report", type=Path, help="write the table to this Markdown file as well")
    options = parser.parse_args()
    for path in (options.runs, options.scorer):
        if not path.is_file():
            print(f"{path} is not there: name it with --runs or --scorer", file=sys.stderr)
            return 1
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "predictions.csv"
        start = time.perf_counter()
        summary = _output(*AUTOPLAN, "predict", "--runs", str(options.runs), "--out", str(table)).partition(";")[0]
        taken_s = time.perf_counter() - start
        scored = _output(sys.executable, str(options.scorer), str(options.runs), str(table))
    print(scored)
    print(f"{summary}; in {taken_s:.1f} s")
    if options.report:
        today = datetime.date.today().isoformat()
        head = (
            f"# Accuracy on measured runs, {today}\n\n"
            f"autoplan {autoplan.__version__}, Python {platform.python_version()}, {summary}; "
            "reference rates and framework traits; presets that say so were fitted to some of these runs.\n"
        )
        write_text(options.report, f"{head}\n```\n{scored}```\n", force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

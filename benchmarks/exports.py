"""Plans searched for a target of export: does every answer of `autoplan search --to TARGET` export to it?

usage: python benchmarks/exports.py [--searches N] [--seed N] [--to TARGET ...] [--report FILE]

For every target that `autoplan list targets` shows, searches are drawn (shipped model, cluster, batch, length; for
targets that fine-tune, a method) until so many were answered.  Each answer is exported.  What the search refuses
before it answers (no plan fits, the target does not know the model) is counted and drawn again; an answer that does
not export is printed, and the exit status is 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
from reports import make_parser, write_report

import autoplan
from autoplan.base.errors import InputError, NoPlanError
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.frameworks.registry import TARGETS
from autoplan.readers.model import load_model, preset_models

SEED = 30
MAX_DRAWS = 10  # for each search that is to be answered
MAX_PARAMETERS = 75e9  # larger models fit on none of the clusters
CLUSTERS = ("h100-sxm:1x8", "h100-sxm:2x8", "a100-sxm:2x8", "b200:1x8", "mi300x:1x8", "l40s:1x4", "rtx-4090:1x8")
LENGTHS, BATCHES = (2048, 4096, 8192), (16, 32, 64, 128)
FINETUNES = ("accelerate", "automodel", "axolotl", "deepspeed", "hf-trainer", "llama-factory", "ms-swift")
METHODS = (None, "lora:r=16,targets=all-linear", "qlora:r=64")

Rng = np.random.Generator


def draw_search(rng: Rng, to: str) -> dict[str, Any]:
    """Random arguments of a search for a target."""
    search: dict[str, Any] = {
        "model": str(rng.choice(models())),
        "cluster": str(rng.choice(CLUSTERS)),
        "global_batch": int(rng.choice(BATCHES)),
        "seq_len": int(rng.choice(LENGTHS)),
        "to": to,
    }
    method = METHODS[int(rng.integers(len(METHODS)))] if to in FINETUNES else None
    return search | ({"finetune": method} if method else {})


@cache
def models() -> list[str]:
    """Shipped models that are not too large for the clusters."""
    return [name for name in preset_models() if count_parameters(load_model(name)) <= MAX_PARAMETERS]


def outcomes(to: str, searches: int, rng: Rng) -> Counter[str]:
    """Count searches for a target by their outcome; print answers that do not export."""
    counts: Counter[str] = Counter()
    for _ in range(MAX_DRAWS * searches):
        if counts["answered"] == searches:
            break
        search = draw_search(rng, to)
        try:
            result = autoplan.search(**search)
        except NoPlanError:
            counts["does not fit"] += 1
            continue
        except InputError as error:
            counts["refused"] += 1
            print(f"{to}, {search['model']} on {search['cluster']} refused: {error}", file=sys.stderr, flush=True)
            continue
        counts["answered"] += 1
        try:
            counts["exported"] += bool(result.export(to).files)
        except InputError as error:
            print(f"{search}: {error}", flush=True)
    return counts


def main() -> int:
    """Search for every target and print the table of outcomes."""
    parser = make_parser(__doc__)
    parser.add_argument("--searches", type=int, default=20, help="answered searches for each target")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--to", nargs="*", default=[*TARGETS], help="targets; by default all")
    options = parser.parse_args()
    lines = [f"{'target':16} {'answered':>8} {'exported':>8} {'does not fit':>12} {'refused':>8}"]
    print(lines[0])
    failed = 0
    for to in options.to:
        counts = outcomes(to, options.searches, np.random.default_rng([options.seed, *to.encode()]))
        lines.append(
            f"{to:16} {counts['answered']:8} {counts['exported']:8} {counts['does not fit']:12} {counts['refused']:8}"
        )
        print(lines[-1], flush=True)
        failed += counts["answered"] - counts["exported"]
    if options.report:
        made_by = f"`python benchmarks/exports.py --searches {options.searches} --seed {options.seed}`"
        write_report(options.report, "Searches for targets of export", made_by, "\n".join(lines))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""What came of a measured run?  The columns of a table of runs that a prediction never reads."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from autoplan.errors import InputError
from autoplan.files import read_text
from autoplan.read.runs import MOST_BYTES
from autoplan.result import Outcome, Status

# Runs that agree in these were alternatives of one decision; the plans that one chose among differ in the others.
GROUP_COLUMNS = (
    "framework",
    "year",
    "model",
    "num_layers",
    "hidden_size",
    "num_heads",
    "gpu",
    "num_gpus",
    "seq_len",
    "global_batch",
    "precision",
    "attention",
    "fused_norm",
)
PLAN_COLUMNS = (
    "tp",
    "sp",
    "cp",
    "pp",
    "vp",
    "ep",
    "etp",
    "dp",
    "sharding",
    "shard_group",
    "micro_batch",
    "recompute",
)


def read_outcomes(path: Path) -> Iterator[Outcome]:
    """The outcomes of a CSV table in the columns of `measured_runs.csv`, in order."""
    text = read_text(path, most_bytes=MOST_BYTES).removeprefix("\ufeff")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = set(reader.fieldnames or ())
    if not {"id", "step_time_s"} <= columns:
        raise InputError(f"{path}: not a table of measured runs: it needs the columns id and step_time_s")
    for row in reader:
        name = row["id"] or ""
        source = re.sub(r"-\d+$", "", name)
        step_s = _number(row.get("step_time_s"))
        # A table of one's own may leave the status out: what has a step time ended well.
        status = (row.get("status") or ("ok" if step_s is not None else "?")).strip()
        yield Outcome(
            id=name,
            source=source,
            status=status if status in get_args(Status) else "?",  # type: ignore[arg-type]
            step_s=step_s,
            peak_gib=_number(row.get("peak_memory_gib")),
            decision=(source, *(row.get(column) or "" for column in GROUP_COLUMNS)),
            plan=tuple(row.get(column) or "" for column in PLAN_COLUMNS),
        )


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None

"""Outcomes of measured runs: the columns of a table that predictions never read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.runs.table import positive, read_rows
from autoplan.spec.run_outcome import RunOutcome, Status

# Runs that agree in these columns were alternatives of one decision; their plans differ in the others.
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


# Possible statuses of a run in a table; computed figures are not measurements.
STATUSES: dict[str, Status] = {
    **{"ok": "ok", "oom": "oom", "failed": "failed", "invalid": "invalid"},
    **{"computed": "?", "?": "?", "": "?"},
}


def read_outcomes(path: Path) -> Iterator[RunOutcome]:
    """Read the outcomes of a CSV table with the columns of `measured_runs.csv`, in order."""
    for row in read_rows(path, "measured runs", ("id", "step_time_s")):
        step_s = positive(path, row, "step_time_s")
        # A user's table may omit the status: a run with a step time finished.
        status = row.get("status", "").strip() or ("ok" if step_s is not None else "?")
        if status not in STATUSES:
            raise InputError(
                f"{path}: status {status[:40]!r} of {row['id'][:40]} must be one of {', '.join(filter(None, STATUSES))}"
            )
        source = re.sub(r"-\d+$", "", row["id"])
        yield RunOutcome(
            id=row["id"],
            source=source,
            status=STATUSES[status],
            step_s=step_s,
            peak_gib=positive(path, row, "peak_memory_gib"),
            decision=(source, *(row.get(column, "") for column in GROUP_COLUMNS)),
            plan=tuple(row.get(column, "") for column in PLAN_COLUMNS),
        )

"""Option table of the probe."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import count

ROWS = (count("replicas", "dp_shard"), count("micro_batch", "micro_batch"), count("global_batch", "global_batch"))

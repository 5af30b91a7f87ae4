"""Option table of the settings of PyTorch FSDP2, as they are written and read."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import count, switch, word
from autoplan.spec.enums import Precision

# Of torch.distributed.pipelining.schedules.get_schedule_class; zero bubbles with one stage a rank.
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
DTYPE = word("param_dtype", "precision", None, {"bfloat16": Precision.BF16, "float16": Precision.FP16})
SEQUENCE_PARALLEL = switch("sequence_parallel", "sp")
BATCH = (count("micro_batch", "micro_batch"), count("global_batch", "global_batch"))

"""Names of torch.distributed that launch files of FSDP2 and torchtitan have, as they are written and read."""

from __future__ import annotations

# Of torch.distributed.pipelining.schedules.get_schedule_class; zero bubbles with one stage a rank.
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}

"""Terms of a step's time: one table of what each is called, where it arises, and which rates decide it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Part = Literal["block", "stage", "pipeline", "update", "end"]

# What of a rank is at work, in the order in which it is shown; nothing is, while it waits.
STREAMS = (
    "compute",
    "host",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "sharded parameters",
    "host copies",
    "pipeline",
    "data parallel",
    "wait",
)


class Term(NamedTuple):
    """Term of a step."""

    name: str
    title: str  # for people
    part: Part  # of a step: blocks of layers, the rest of a stage, its pipeline, gradients and update, the end
    stream: str  # of STREAMS
    component: str | None  # what takes its time from the same rates; None: goes with all of them


# In the order in which they are shown.  Matrix products and the head are one component, as either may be on the busiest
# stage; waiting for the slowest rank goes with all of them.
TERMS = (
    Term("gemm", "matrix products", "block", "compute", "kernels"),
    Term("attention", "attention core", "block", "compute", "kernels"),
    Term("memory_bound", "memory-bound kernels", "block", "compute", "kernels"),
    Term("recompute", "recomputation", "block", "compute", "kernels"),
    Term("tp_communication", "tensor-parallel traffic", "block", "tensor parallel", "tensor"),
    Term("cp_communication", "context-parallel traffic", "block", "context parallel", "tensor"),
    Term("ep_communication", "expert traffic", "block", "expert parallel", "experts"),
    Term("fsdp_communication", "parameter gathers", "block", "sharded parameters", "states"),
    Term("activation_offload", "activations to the host", "block", "host copies", "states"),
    Term("launch", "kernel launches", "block", "host", "host"),
    Term("reference", "reference model", "block", "compute", "kernels"),
    Term("head", "head and loss", "stage", "compute", "kernels"),
    Term("allocator_retries", "allocator retries", "stage", "host", "host"),
    Term("pipeline_bubble", "pipeline bubble", "pipeline", "wait", "pipeline"),
    Term("pipeline_send", "pipeline messages", "pipeline", "wait", "pipeline"),
    Term("data_parallel_reduce", "gradient reduction", "update", "data parallel", "states"),
    Term("optimizer", "optimizer", "update", "compute", "kernels"),
    Term("parameter_gather", "parameter gather", "update", "data parallel", "states"),
    Term("overhead", "fixed overhead", "end", "host", "host"),
    Term("encoder_ranks", "waiting for the encoder's ranks", "end", "wait", None),
    Term("uneven_lengths", "waiting for longer samples", "end", "wait", None),
    Term("input", "waiting for samples", "end", "wait", None),
    Term("stragglers", "waiting for the slowest rank", "end", "wait", None),
)


def _of(*parts: Part) -> tuple[str, ...]:
    return tuple(term.name for term in TERMS if term.part in parts)


STEP_TERMS = _of("block", "stage", "pipeline", "update", "end")
BLOCK_TERMS = _of("block")
WORK_TERMS = _of("block", "stage")  # of a stage, in one pass or another
PIPELINE_TERMS = _of("block", "stage", "pipeline")  # until the last backward pass is over
UPDATE_TERMS = _of("update")  # of gradients, optimizer and parameters
END_TERMS = _of("update", "end")  # what follows the last backward pass, one after another
LAST_WAITS = tuple(term.name for term in TERMS if term.part == "end" and term.stream == "wait")
KERNEL_TERMS = tuple(term.name for term in TERMS if term.component == "kernels")
TRAFFIC_TERMS = tuple(  # in which links are waited for
    term.name for term in TERMS if term.component in ("tensor", "experts", "states") or term.name == "pipeline_send"
)
# Of a stage, what takes longer where a micro-batch has more tokens.
OF_TOKENS = tuple(name for name in WORK_TERMS if name not in ("fsdp_communication", "launch", "allocator_retries"))

STREAM_OF = {term.name: term.stream for term in TERMS}
COMPONENTS: dict[str, tuple[str, ...]] = {
    component: tuple(term.name for term in TERMS if term.component == component)
    for component in ("kernels", "host", "tensor", "experts", "states", "pipeline")
}

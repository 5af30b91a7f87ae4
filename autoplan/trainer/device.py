"""Device of a rank, rendezvous of ranks, and detection of out-of-memory errors."""

from __future__ import annotations

import datetime
import time

import torch
import torch.distributed as dist

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.processes import RankPlace
from autoplan.base.units import cleaned, counted

# Messages of torch, cuBLAS, cuDNN and NCCL for it, in addition to torch's exception.
_FULL = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED", "Failed to CUDA calloc")


def take_device(place: RankPlace) -> torch.device:
    """Make the rank's device current, whether it sees all devices of the node or only its own; the CPU without any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not place.launcher and place.rank == count:  # only the first rank without a device reports it
        raise InputError(
            f"has no device: {place.num_ranks} ranks were asked for, torch sees {counted(count, 'device')}: "
            "check CUDA_VISIBLE_DEVICES, or use fewer ranks"
        )
    device = torch.device("cuda", place.local_rank % count)
    torch.cuda.set_device(device)
    return device


def join(place: RankPlace, limit_s: float) -> torch.device:
    """Take a device and join the process group."""
    torch.set_num_threads(1)  # ranks that share cores through thread pools are 3 to 6 times slower
    device = take_device(place)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=place.meeting_point,
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=datetime.timedelta(seconds=limit_s),
    )
    return device


def meet(device: torch.device) -> None:
    """Wait for all ranks, with the device of each: by default NCCL guesses it from the rank."""
    dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


def moment(device: torch.device) -> float | torch.cuda.Event:
    """Return this point in the work of a device, for `between`."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    """Return the seconds between two moments whose work is done."""
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
    return float(first.elapsed_time(last)) / 1e3


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in _FULL)


def describe(error: BaseException) -> str:
    """Return an error as one line, with the last message of NCCL; out of memory has the same text on all devices."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[-1 if "Last error:" in lines[:-1] else 0][:300]
    if is_out_of_memory(error):
        return cleaned(f"out of memory: {text}")
    return cleaned(text if isinstance(error, AutoplanError) else f"{type(error).__name__}: {text}")

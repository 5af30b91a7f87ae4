"""Which device does a rank take, and which errors are for lack of memory?"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from autoplan.base.errors import InputError  # noqa: E402
from autoplan.base.processes import RankPlace  # noqa: E402
from autoplan.trainer.device import describe, is_out_of_memory, take_device  # noqa: E402


def taken(monkeypatch: pytest.MonkeyPatch, place: RankPlace, num_devices: int) -> int:
    """The index of the device that a rank takes where torch sees so many."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    device = take_device(place)
    assert current == [device]
    assert device.type == "cuda"
    return int(device.index)


def test_a_rank_takes_the_device_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    second = RankPlace(rank=9, num_ranks=16, local_rank=1, launcher="srun")
    assert taken(monkeypatch, second, 8) == 1
    assert taken(monkeypatch, second, 1) == 0  # Slurm shows it none but its own
    assert taken(monkeypatch, RankPlace(rank=3, num_ranks=4, local_rank=3), 8) == 3


def test_more_ranks_than_devices_are_refused_by_the_first_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [RankPlace(rank=rank, num_ranks=4, local_rank=rank) for rank in range(4)]
    assert [taken(monkeypatch, place, 2) for place in places[:2]] == [0, 1]
    with pytest.raises(InputError, match=r"has no device: 4 ranks were asked for, torch sees 2 devices"):
        taken(monkeypatch, places[2], 2)


def test_without_accelerators_ranks_compute_on_the_host() -> None:
    if not torch.cuda.is_available():
        assert take_device(RankPlace(rank=3, num_ranks=4, local_rank=3)) == torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError(
                "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
    ],
)
def test_memory_that_is_full_is_known_whoever_says_it(error: BaseException, is_full: bool) -> None:
    assert is_out_of_memory(error) is is_full


def test_an_error_of_nccl_is_told_by_what_it_says_last() -> None:
    error = RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for details)\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    )
    assert describe(error) == "RuntimeError: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    assert describe(InputError("a rule")) == "a rule"
    assert describe(MemoryError()) == "out of memory: MemoryError"

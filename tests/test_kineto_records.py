"""Do traces of a run become records of what ran by itself, and say of all else why it is no clean time?"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.imports import kineto_shapes
from autoplan.profiler.imports.kineto_records import read_trace_records
from autoplan.profiler.record import Record

Event = dict[str, Any]


def event(name: str, start_us: float, length_us: float, cat: str, **args: object) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "ts": start_us, "dur": length_us, "tid": 1, "args": args}


def product(
    number: int, left: list[int], right: list[int], start_us: float, length_us: float, **args: object
) -> list[Event]:
    dims = {"Input Dims": [left, right], "Input type": ["c10::BFloat16"] * 2, "External id": number}
    return [
        event("aten::mm", start_us - 500, 10, "cpu_op", **dims, **args),
        event("nvjet_tst", start_us, length_us, "kernel", **{"External id": number, "correlation": 9000 + number}),
    ]


def reduction(start_us: float, length_us: float, **args: object) -> Event:
    about = {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16",
        "Process Group Name": "1", "Process Group Ranks": "[0, 2]", "In split size": "[]",
    }  # fmt: skip
    return event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start_us, length_us, "kernel", **{**about, **args})


def written(path: Path, rank: int, events: list[Event], *, world: int = 4, **fields: object) -> Path:
    trace = {
        "deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}] * 2,
        "distributedInfo": {"rank": rank, "world_size": world, "nccl_version": "2.27.3"},
        "cuda_runtime_version": 12080,
        "host_name": f"node{rank // 2}",
        "username": "ada",
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": events,
        **fields,
    }
    path.write_text(json.dumps(trace))
    return path


def record_of(records: list[Record], operation: str) -> Record:
    (record,) = (record for record in records if record.operation == operation)
    return record


def test_products_are_those_of_their_operators_and_forward_passes(tmp_path: Path) -> None:
    backward = event("MmBackward0", 2400, 300, "cpu_op", **{"Sequence number": 7})
    events = [
        *product(1, [64, 128], [128, 256], 1000, 20, **{"Sequence number": 7}),
        backward,
        *product(2, [256, 64], [64, 128], 2920, 40),  # of the weight
        *product(3, [64, 256], [256, 128], 3000, 30),  # of the input
        *product(4, [5, 6], [6, 7], 5000, 10),  # neither forward nor in a backward pass
    ]
    records = read_trace_records(written(tmp_path / "trace.json", 0, events))
    assert {record.operation for record in records} == {"gemm", "dgrad"}
    assert all(record.shape == (64, 256, 128) and record.status == "ok" for record in records)
    assert record_of(records, "gemm").samples_s == pytest.approx((20e-6,))
    gradient = record_of(records, "dgrad")
    assert gradient.samples_s == pytest.approx((30e-6,))
    assert (gradient.measured_by, gradient.host, gradient.measured_at[:10]) == ("ada", "node0", "2023-11-14")
    assert (gradient.fingerprint.device, gradient.fingerprint.runtime) == ("h100-sxm", "cuda 12.8")
    assert gradient.conditions == {"trace": "trace.json"}
    assert gradient.mode == "sustained"  # so that no burst is taken off


def test_a_collective_takes_as_long_as_the_rank_saw_that_came_last(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank, lengths_us in enumerate(((900, 50), (1, 1), (60, 800), (1, 1))):
        events = (
            [reduction(1000 * at, length) for at, length in enumerate(lengths_us, start=1)] if rank % 2 == 0 else []
        )
        written(folder / f"{rank}.json", rank, events)
    (record,) = read_trace_records(folder)
    # One device of each of two nodes, as the other pair of devices at the same time.
    assert (record.operation, record.shape, record.dtype) == ("all_reduce", (2, 1, 2, 2000), "bf16")
    assert record.samples_s == pytest.approx((60e-6, 50e-6))
    assert (record.status, record.fingerprint.collectives, record.fingerprint.num_hosts) == ("ok", "nccl 2.27.3", 2)


def test_waits_that_cannot_be_told_and_kernels_beside_others_are_contaminated(tmp_path: Path) -> None:
    events = [
        reduction(1000, 50),
        *product(1, [64, 128], [128, 256], 1020, 20, **{"Sequence number": 7}),
    ]
    records = read_trace_records(written(tmp_path / "trace.json", 0, events))
    assert "not all ranks" in record_of(records, "all_reduce").reason
    assert record_of(records, "gemm").reason == "other kernels ran concurrently"
    assert {record.status for record in records} == {"contaminated"}
    # A product that ran alone once is a clean one, by that time.
    events += product(2, [64, 128], [128, 256], 3000, 15, **{"Sequence number": 8})
    clean = record_of(read_trace_records(written(tmp_path / "trace.json", 0, events)), "gemm")
    assert (clean.status, clean.samples_s) == ("ok", pytest.approx((15e-6,)))


def test_times_that_spread_are_unstable(tmp_path: Path) -> None:
    lengths_us = (10, 11, 30, 40, 12)
    events = [
        item
        for at, length in enumerate(lengths_us)
        for item in product(at, [64, 128], [128, 256], 1000 * (at + 1), length, **{"Sequence number": at})
    ]
    assert read_trace_records(written(tmp_path / "trace.json", 0, events))[0].status == "unstable"


@pytest.mark.parametrize(
    ("versions", "runtime"),
    [({"hip_runtime_version": 60443483}, "rocm 6.4"), ({"cuda_runtime_version": 12080}, "cuda 12.8"), ({}, "")],
)
def test_the_runtime_is_that_of_the_devices_maker(tmp_path: Path, versions: Event, runtime: str) -> None:
    events = product(1, [8, 8], [8, 16], 1, 2, **{"Sequence number": 1})
    path = written(tmp_path / "trace.json", 0, events, **{"cuda_runtime_version": 0, **versions})
    assert read_trace_records(path)[0].fingerprint.runtime == runtime


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"Collective name": "_allgather_base", "Out msg nelems": 2000}, ("all_gather", 4000)),
        ({"Collective name": "_reduce_scatter_base"}, ("reduce_scatter", 2000)),
        ({"Collective name": "all_to_allv", "dtype": "Float"}, ("all_to_all", 4000)),
        ({"Collective name": "all_to_allv", "In split size": "[1, 999]"}, None),  # uneven
        ({"Collective name": "send"}, None),
        ({"dtype": "Long"}, None),
        ({"Process Group Ranks": "[0, 1, 2, ...]"}, None),  # shortened, and in no list of groups
        ({"Process Group Ranks": "[0, 1, 2]"}, None),  # uneven over nodes of two
    ],
)
def test_collectives_and_their_buffers(tmp_path: Path, about: Event, expected: tuple[str, int] | None) -> None:
    events = [reduction(1000, 50, **about), *product(1, [8, 8], [8, 16], 1, 2, **{"Sequence number": 1})]
    records = read_trace_records(written(tmp_path / "trace.json", 0, events))
    found = [(record.operation, record.shape[-1]) for record in records if record.operation != "gemm"]
    assert found == ([expected] if expected else [])


def test_causal_attention_is_read_where_torch_has_its_arguments(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, places in kineto_shapes._ATTENTIONS.items():
        schema = getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema
        names = [argument.name for argument in schema.arguments]
        assert (names[places.query], names[places.is_causal]) == ("query", "is_causal")
    query, key = [2, 512, 8, 64], [2, 512, 4, 64]
    attention = event(
        "aten::_flash_attention_forward", 0, 10, "cpu_op",
        **{
            "External id": 1, "Input Dims": [query, key, key], "Input type": ["c10::Half"] * 3,
            "Concrete Inputs": ["", "", "", "", "", "512", "512", "0.", "True"],
        },
    )  # fmt: skip
    kernel = event("flash_fwd_kernel", 100, 70, "kernel", **{"External id": 1, "correlation": 2})
    (record,) = read_trace_records(written(tmp_path / "trace.json", 0, [attention, kernel]))
    assert (record.operation, record.shape, record.dtype) == ("attention", (2, 512, 8, 4, 64, 0), "fp16")


@pytest.mark.parametrize(
    ("events", "fields", "said"),
    [
        ([], {}, "record_shapes=True"),
        ([reduction(1000, 50)], {"deviceProperties": []}, "--device h100-sxm"),
        ([reduction(1000, 50) | {"dur": "x"}], {}, "no trace|no number"),
        ([reduction(1000, 50, **{"In msg nelems": "many"})], {}, "no number"),
        ([reduction(1000, 50)], {"baseTimeNanoseconds": 10**30}, "no number|no trace"),
        ([reduction(1000, 50)], {"distributedInfo": {"world_size": 0}}, ">= 1"),
        ([reduction(1000, 50), {"ph": "X", "name": "f", "cat": "f", "ts": "soon"}], {}, "no number"),
        ([*product(1, {"m": 8}, [8, 8], 1, 2, **{"Sequence number": 1})], {}, "no number|record_shapes"),  # type: ignore[arg-type]
        ([*product(1, [8, "a"], [8, 8], 1, 2, **{"Sequence number": 1})], {}, "no number"),  # type: ignore[list-item]
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path: Path, events: list[Event], fields: Event, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_trace_records(written(tmp_path / "trace.json", 0, events, **fields))


BROKEN = (None, [], {}, {"a": 1}, "x", -1, 0, 2**70, 1e300, [[[]]], [{}], True)


@pytest.mark.parametrize("value", BROKEN, ids=str)
def test_a_damaged_value_is_refused_or_passed_over(tmp_path: Path, value: object) -> None:
    """Never a traceback, whichever field it is in."""
    sound = [
        reduction(1000, 50),
        *product(1, [64, 128], [128, 256], 2000, 20, **{"Sequence number": 7}),
        event("MmBackward0", 2400, 300, "cpu_op", **{"Sequence number": 7}),
        *product(3, [64, 256], [256, 128], 3000, 30),
    ]
    for at, item in enumerate(sound):
        for name in item["args"]:
            broken = [*sound]
            broken[at] = {**item, "args": {**item["args"], name: value}}
            path = written(tmp_path / "trace.json", 0, broken)
            with suppress(InputError):
                assert all(record.seconds > 0 for record in read_trace_records(path))


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        written(tmp_path / name, 0, [reduction(1000, 50)])
    with pytest.raises(InputError, match="a second trace of rank 0"):
        read_trace_records(tmp_path)

"""Are outputs of nccl-tests and rccl-tests read with their groups, sizes and errors?

The figures are from public threads, named at each log; headers are shortened to the lines that are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.imports.nccl_tests import read_log
from autoplan.profiler.record import Record
from autoplan.profiler.store.plausible import implausible

COLUMNS = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
OLD_COLUMNS = """#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 334.9\n#\n"


def ranks(device: str, hosts: int, per_host: int, group_of: Callable[[int], int] = lambda rank: 0) -> str:
    return "# Using devices\n" + "".join(
        f"#  Rank {rank:2} Group {group_of(rank):2} Pid {1000 + rank} on node{rank // per_host} "
        f"device {rank % per_host:2} [0000:{rank:02x}:00] {device}\n"
        for rank in range(hosts * per_host)
    )


H100, MI300X = "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"
# https://github.com/NVIDIA/nccl/issues/2169
ALL_TO_ALL = (
    "# nccl-tests version 2.17.8 nccl-headers=23004 nccl-library=23004\n"
    "# Collective test starting: alltoall_perf\n"
    "# nThread 1 nGpus 1 minBytes 524288000 maxBytes 555745280 step: 1048576(bytes) warmup iters: 1 iters: 10\n#\n"
    + ranks(H100, 1, 4)
    + COLUMNS
    + "   524288000      32768000     float    none      -1  1174.14  446.53  334.90       0  1163.40  450.65  337.99"
    "    N/A\n" + FOOTER
)
# https://github.com/crickett-hpe/hpc-ai-envs/pull/30
RCCL = (
    "$ ./build/all_reduce_perf -b 8M -e 1G -f 2 -g 8\n"
    "# nThread 1 nGpus 8 minBytes 8388608 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20\n#\n"
    "rccl-tests: Version develop:83d38d9\n"
    + ranks(MI300X, 1, 8)
    + COLUMNS
    + "     8388608       2097152     float     sum      -1    91.10   92.08  161.14      0    94.94   88.36  154.63"
    "      0\n"
)
# https://github.com/NVIDIA/nccl-tests/issues/82: no groups and no redop, and NCCL's own lines in between
BROADCAST = """mpirun -np 2 --host 10.0.0.48:1,10.0.0.52:1 ./build/broadcast_perf -b 8 -e 2G -w 10 -f 2 -g 1 -n 100 -c 0
# Using devices
#   Rank  0 Pid  14926 on v100-gpu-1 device  0 [0x00] Tesla V100-PCIE-16GB
#   Rank  1 Pid   9210 on v100-gpu-5 device  0 [0x00] Tesla V100-PCIE-16GB

v100-gpu-1:14926:14926 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
NCCL version 2.9.6+cuda11.2
#
#                                                     out-of-place                       in-place
#       size         count    type    root     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2   float       0    45.82    0.00    0.00    N/A    38.17    0.00    0.00    N/A
"""
# https://github.com/NVIDIA/nccl-tests/issues/37: wrong results
WRONG = (
    "all_gather_perf -g 8 -b 4294967296 -e 4294967296 -n 100\n"
    + ranks("Tesla V100-SXM2-32GB", 1, 8)
    + OLD_COLUMNS.replace("redop", "     ")
    + "  4294967296     134217728   float    29122  129.05  129.05  1e+00    29169  128.84  128.84  1e+00\n"
    " Out of bounds values : 2 FAILED\n"
)
# https://github.com/NVIDIA/nccl-tests/issues/128: empty messages
SMALL = (
    "reduce_scatter_perf\n"
    + ranks("NVIDIA A100-SXM4-80GB", 2, 4)
    + COLUMNS
    + "           0             0     float     sum      -1     5.70    0.00    0.00      0     5.54    0.00   0.00 0\n"
    "         128             4     float     sum      -1    32.31    0.00    0.00      0    25.35    0.01    0.00  0\n"
)


def read(folder: Path, text: str, **options: str) -> list[Record]:
    path = folder / "log.txt"
    path.write_text(text)
    return read_log(path, **options)


def refusal(folder: Path, text: str, **options: str) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, text, **options)
    message = str(caught.value)
    assert message.startswith(str(folder / "log.txt")) or message.startswith("--operation")
    assert message.isprintable()
    return message


def test_an_all_to_all_is_read_with_its_whole_buffer_and_both_columns(tmp_path: Path) -> None:
    first, second = read(tmp_path, ALL_TO_ALL)
    assert (first.operation, first.shape, first.dtype) == ("all_to_all", (4, 4, 1, 524288000), "fp32")
    assert (first.samples_s, first.kernel) == ((1174.14e-6,), "out of place")
    assert (second.seconds, second.kernel, second.status) == (1163.40e-6, "in place", "ok")
    assert (first.mode, first.source) == ("imported", "nccl-tests")
    machine = first.fingerprint
    assert (machine.device, machine.collectives, machine.num_hosts) == ("h100-sxm", "nccl 2.30.4", 1)
    assert machine.devices_per_node == 4
    assert implausible(first) == implausible(second) == ""


@pytest.mark.parametrize(
    ("text", "bus_gb_per_s", "share"), [(ALL_TO_ALL, 334.90, 3 / 4), (RCCL, 161.14, 2 * 7 / 8)], ids=["nccl", "rccl"]
)
def test_size_and_time_give_the_bus_bandwidth_that_the_test_printed(
    tmp_path: Path, text: str, bus_gb_per_s: float, share: float
) -> None:
    first, _ = read(tmp_path, text)
    assert share * first.shape[-1] / first.seconds / 1e9 == pytest.approx(bus_gb_per_s, rel=1e-3)


def test_rccl_is_known_by_its_line(tmp_path: Path) -> None:
    first, _ = read(tmp_path, RCCL)
    assert (first.fingerprint.device, first.source) == ("mi300x", "rccl-tests")
    assert (first.operation, first.shape) == ("all_reduce", (8, 8, 1, 8388608))


def test_older_outputs_have_no_groups(tmp_path: Path) -> None:
    first, second = read(tmp_path, BROADCAST)
    assert (first.operation, first.shape) == ("broadcast", (2, 1, 1, 8))
    assert (first.seconds, second.seconds) == (45.82e-6, 38.17e-6)
    assert (first.fingerprint.collectives, first.fingerprint.runtime) == ("nccl 2.9.6", "cuda 11.2")
    assert first.fingerprint.device == "Tesla V100-PCIE-16GB"


def test_wrong_results_are_failures(tmp_path: Path) -> None:
    for record in read(tmp_path, WRONG):
        assert (record.status, record.samples_s, record.shape) == ("failed", (), (8, 8, 1, 4294967296))
    counted = ALL_TO_ALL.replace("334.90       0", "334.90       7")
    assert [record.status for record in read(tmp_path, counted)] == ["failed", "ok"]


def test_a_deviation_within_what_the_test_allows_is_no_failure(tmp_path: Path) -> None:
    assert {record.status for record in read(tmp_path, WRONG.replace("1e+00", "5e-07"))} == {"ok"}


def test_empty_messages_are_left_out(tmp_path: Path) -> None:
    assert [record.shape for record in read(tmp_path, SMALL)] == [(8, 4, 1, 128)] * 2


@pytest.mark.parametrize(
    ("group_of", "layout"),
    [
        (lambda rank: 0, (16, 8, 1)),
        (lambda rank: rank % 8, (2, 1, 8)),  # NCCL_TESTS_SPLIT="MOD 8": one of each node
        (lambda rank: rank // 8, (8, 8, 2)),  # DIV 8: inside the nodes
        (lambda rank: rank % 2, (8, 4, 2)),
    ],
)
def test_groups_are_read_from_the_lines_of_the_ranks(
    tmp_path: Path, group_of: Callable[[int], int], layout: tuple[int, int, int]
) -> None:
    text = RCCL.replace(ranks(MI300X, 1, 8), ranks(H100, 2, 8, group_of))
    assert {record.shape[:3] for record in read(tmp_path, text)} == {layout}


def test_a_rack_is_one_domain_of_many_hosts(tmp_path: Path) -> None:
    text = RCCL.replace(ranks(MI300X, 1, 8), ranks("NVIDIA GB200", 4, 4))
    assert {record.shape[:3] for record in read(tmp_path, text)} == {(16, 16, 1)}


def test_several_tests_of_one_log_are_told_apart(tmp_path: Path) -> None:
    records = read(tmp_path, ALL_TO_ALL + RCCL)
    assert [(record.operation, record.shape[0]) for record in records] == [("all_to_all", 4)] * 2 + [
        ("all_reduce", 8)
    ] * 2


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "0: "])
def test_labels_of_launchers_are_passed_over(tmp_path: Path, prefix: str) -> None:
    text = "".join(prefix + line for line in ALL_TO_ALL.splitlines(keepends=True))
    assert read(tmp_path, text) == read(tmp_path, ALL_TO_ALL)


def nccl_json() -> dict[str, object]:
    """As nccl-tests 2.17 writes it (src/util.cu), with the figures of the log above."""
    devices = [
        {"rank": rank, "group": 0, "pid": 1, "hostname": "node1", "device": rank, "device_hex": "", "device_info": H100}
        for rank in range(4)
    ]
    row = {
        "size": 524288000,
        "count": 32768000,
        "type": "float",
        "redop": "none",
        "root": "    -1",
        "out_of_place": {"time": 1174.14, "alg_bw": 446.53, "bus_bw": 334.9, "nwrong": 0.0},
        "in_place": {"time": 1163.40, "alg_bw": 450.65, "bus_bw": 337.99, "nwrong": None},
    }
    return {
        "version": 1,
        "args": ["./build/alltoall_perf", "-J", "out.json"],
        "nccl_version": 23004,
        "config": {"devices": devices},
        "results": [row],
    }


def test_json_says_the_same_as_the_table(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(nccl_json())) == read(tmp_path, ALL_TO_ALL)


def test_the_times_of_every_iteration_are_kept_where_they_are_told(tmp_path: Path) -> None:
    table = nccl_json()
    table["results"][0]["out_of_place_per_iter"] = {"skipped_iterations": 1, "times_us": [9e9, 10.0, 30.0, 20.0]}  # type: ignore[index]
    assert read(tmp_path, json.dumps(table))[0].samples_s == pytest.approx((10e-6, 30e-6, 20e-6))


def test_json_lines_of_rccl_tests_need_the_device(tmp_path: Path) -> None:
    """Figures of https://github.com/ROCm/rccl-tests/pull/93."""
    row = {"#wrong": "0", "algBw": 0.05337739748698796, "busBw": 0.08006609623048194, "gpus": 4, "inPlace": 0}
    row |= {"name": "AllReduce", "redop": "sum", "size": 1024, "time": 19.184150000000002, "type": "float"}
    text = f"{json.dumps(row)}\n{json.dumps({**row, 'inPlace': 1, 'time': 19.897650000000002})}\n"
    first, second = read(tmp_path, text, device="mi300x")
    assert (first.shape, first.seconds, first.kernel) == ((4, 4, 1, 1024), 19.184150000000002e-6, "out of place")
    assert (second.kernel, second.source, second.fingerprint.device) == ("in place", "rccl-tests", "mi300x")
    assert "--device" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no results"),
        ("hello", "holds no results"),
        (COLUMNS + ALL_TO_ALL.splitlines()[-4], "does not say which collective"),
        ("all_reduce_perf\n" + COLUMNS + ALL_TO_ALL.splitlines()[-4], "lacks the lines"),
        (ALL_TO_ALL.replace("Rank  1", "Rank  0"), "several ranks have the same number"),
        (ALL_TO_ALL.replace(H100, "NVIDIA H200", 1), "NVIDIA H100 80GB HBM3, NVIDIA H200: name the one kind"),
        (ALL_TO_ALL.replace("on node0", "on node9", 1), "hosts of a group have 1 to 3 ranks"),
        (ALL_TO_ALL.replace("Group  0", "Group  1", 1), "groups have 1 to 3 ranks"),
        (ALL_TO_ALL.replace(ranks(H100, 1, 4), ranks(H100, 1, 1)), "groups of one device"),
        (ALL_TO_ALL.replace("  337.99    N/A", ""), "the line is cut"),
        (ALL_TO_ALL.replace("1174.14", "-1.0"), "no time in seconds"),
        (ALL_TO_ALL.replace("1174.14", "n\x1ban"), "line 14"),
        (ALL_TO_ALL.replace("  time", "cputime"), "option -C"),
        (ALL_TO_ALL.replace("#wrong", "_wrong"), "line 14: no column says whether results were right"),
        (ALL_TO_ALL.replace("type ", "type\ufffd "), "line 12: the table has no column 'type'"),
        ('{"results": 3}', "not the JSON of nccl-tests"),
        ('{"results": []}', "not the JSON of nccl-tests"),
        ('{"name":', "not valid JSON"),
        ('{"busBw": 1}\n{"busBw"', "not valid JSON"),
        ('{"busBw": 1}', "not the JSON of nccl-tests or rccl-tests"),
        ("{" * 100_000, "not valid JSON"),
    ],
)
def test_what_cannot_be_told_for_sure_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_device_and_operation_can_be_given(tmp_path: Path) -> None:
    text = COLUMNS + ALL_TO_ALL.splitlines()[-4]
    given = read(tmp_path, ranks("Graphics Device", 1, 4) + text, device="b200", operation="alltoall_perf")
    assert {(record.operation, record.fingerprint.device) for record in given} == {("all_to_all", "b200")}
    assert "known are all_reduce" in refusal(tmp_path, text, operation="sort")


def test_control_characters_of_a_log_are_stripped(tmp_path: Path) -> None:
    text = ALL_TO_ALL.replace(H100, "Other \x1b[31mGPU").replace("float", "f\x07loat")
    first, _ = read(tmp_path, text)
    assert (first.fingerprint.device, first.dtype) == ("Other [31mGPU", "fp32")

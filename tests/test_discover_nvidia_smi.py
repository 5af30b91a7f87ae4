import re

import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.discover.nvidia_smi import parse
from topology_samples import fabric, near, path, paths, sample


def test_dgx_1_is_a_cube_of_single_and_double_links():
    node = parse(sample("dgx-1-v100.txt"))
    assert [device.index for device in node.devices] == list(range(8))
    assert fabric(node) == {
        **{(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2},
        **{(4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2},
        **{(0, 4): 2, (1, 5): 2, (2, 6): 1, (3, 7): 1},
    }
    assert path(node, 0, 5) == "system"
    assert [nic.name for nic in node.nics] == ["mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"]  # as the driver orders them
    assert near(node, 0) == {"mlx5_0": "switch"}
    assert near(node, 6) == {"mlx5_3": "switch"}
    assert node.devices[0].numa is None  # no such column


def test_dgx_a100_has_two_nics_below_each_pair_of_switches():
    node = parse(sample("dgx-a100.txt"))
    assert set(fabric(node).values()) == {12}
    assert len(fabric(node)) == 28
    assert [device.numa for device in node.devices] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert near(node, 1) == {"mlx5_0": "switches", "mlx5_1": "switches"}
    assert near(node, 7) == {"mlx5_8": "switches", "mlx5_9": "switches"}
    assert len(node.nics) == 12


def test_hgx_h100_is_read_without_the_rows_of_its_last_nics():
    node = parse(sample("hgx-h100.txt"))
    assert fabric(node) == {(a, b): 18 for a in range(8) for b in range(a + 1, 8)}
    nearest = [near(node, device) for device in range(8)]
    assert nearest == [{f"NIC{at}": "switch"} for at in (0, 1, 2, 5, 6, 7, 8, 9)]
    assert [device.numa for device in node.devices] == [0] * 4 + [1] * 4


def test_table_without_tabs_of_four_h100():
    node = parse(sample("h100-nv6.txt"))
    assert fabric(node) == {(0, 1): 6, (0, 2): 6, (0, 3): 6, (1, 2): 6, (1, 3): 6, (2, 3): 6}
    assert [device.numa for device in node.devices] == [3, 1, 7, 5]
    assert [near(node, device) for device in range(4)] == [{f"NIC{at}": "switch"} for at in range(4)]


def test_gb200_tray():
    node = parse(sample("gb200-tray.txt"))
    assert fabric(node) == {(a, b): 18 for a in range(4) for b in range(a + 1, 4)}
    assert [device.numa for device in node.devices] == [0, 0, 1, 1]
    assert node.nics == ()


def test_boxes_without_nvlink():
    l40s = parse(sample("l40s.txt"))
    assert paths(l40s) == {"node": 2, "system": 4}
    assert [nic.name for nic in l40s.nics] == ["mlx5_0", "mlx5_1"]
    assert {(link.a, link.nic): link.path for link in l40s.links if link.nic}[2, "mlx5_1"] == "node"

    rtx4090 = parse(sample("rtx4090.txt"))  # with the underlined header that drivers print
    assert paths(rtx4090) == {"system": 28}
    assert [link.a for link in rtx4090.links if link.nic and link.path == "host"] == [6, 6]

    switches = parse(sample("pcie-switches.txt"))
    assert paths(switches) == {"switch": 12, "node": 16}
    assert path(switches, 3, 4) == "node"

    mixed = parse(sample("rtx-mixed.txt"))
    assert (path(mixed, 1, 2), path(mixed, 2, 3), path(mixed, 0, 4)) == ("host", "node", "system")


def test_virtual_machine_that_hides_its_processors():
    node = parse(sample("nv12-vm.txt"))
    assert fabric(node) == {(0, 1): 12}
    assert [device.numa for device in node.devices] == [None, None]
    assert near(node, 0) == {"NIC6": "switches", "NIC7": "switches"}


def test_device_whose_links_are_all_down_is_joined_by_pcie():
    words = [line.split("\t") for line in sample("gb200-tray.txt").splitlines()]
    for at in (1, 2, 4):
        words[at][3] = words[3][at] = "NODE"
    words[3][3] = "X"
    node = parse("\n".join("\t".join(line) for line in words))
    assert set(fabric(node)) == {(0, 1), (0, 3), (1, 3)}
    assert path(node, 2, 3) == "node"


def test_other_output_around_the_table_does_not_matter():
    table = sample("dgx-a100.txt")
    assert parse("NVIDIA Topology:\n" + table + "\nulimit soft: 1048576\n") == parse(table)
    assert parse("76 NICs found in the topology, only displaying 56 in the matrix.\n" + table) == parse(table)
    assert parse(table.replace("\n", "\r\n").replace("\t", "\xa0 ")) == parse(table)


def test_style_codes_are_dropped_also_where_the_escape_was_lost():
    table = sample("rtx4090.txt")
    assert "\x1b[4m" in table
    assert parse(table.replace("\x1b", "")) == parse(table)


def test_wrapped_table_is_the_same_table():
    table = sample("hgx-h100.txt")
    wrapped = "\n".join(
        line if len(line) < 60 else line[: line.rindex("\t", 0, 60)] + "\n" + line[line.rindex("\t", 0, 60) :]
        for line in table.splitlines()
    )
    assert wrapped.count("\n") > table.count("\n") + 8
    assert parse(wrapped) == parse(table)


def test_sixteen_gpus():
    names = [f"GPU{at}" for at in range(16)]
    rows = [
        f"{name}\t" + "\t".join(" X " if other == name else "NV6" for other in names) + "\t0-23,48-71" for name in names
    ]
    node = parse("\t" + "\t".join(names) + "\tCPU Affinity\n" + "\n".join(rows))
    assert len(fabric(node)) == 120
    assert len(node.devices) == 16


TABLE = sample("l40s.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no table"),
        ("\x00\x01\xff\x7f" * 100, "holds no table"),
        ("GPU0 GPU1\n", "the table ends before the row of GPU0"),
        (TABLE[: TABLE.index("GPU3\tSYS")], "the table ends before the row of GPU3"),
        (TABLE.replace("GPU1\tNODE\t X \tSYS", "GPU1\tNODE\t X "), "line 3.*GPU1 to CPU|line 3.*GPU1"),
        (
            TABLE.replace("\tSYS\tSYS\tSYS\tSYS\t0-95", "\tSYS\tSYS\tSYSSYS\t0-95", 1),
            r"line 2, column \d+: GPU0 to NIC0",
        ),
        (TABLE.replace("GPU0\t X ", "GPU0\t X \tPIX"), r"line 2, column \d+"),
        (TABLE.replace("NODE", "NVX", 1), r"line 2, column 10: GPU0 to GPU1 is 'NVX', no word of the legend"),
        (TABLE.replace("NODE", "NV999", 1), r"line 2, column 10: GPU0 to GPU1 is 'NV999'"),
        (TABLE.replace("NODE", "NV12", 1), r"line 3, column 6: GPU1 to GPU0 is NODE, GPU0 to GPU1 is NV12"),
        (TABLE.replace("GPU1\tNODE", "GPU0\tNODE"), "line 3, column"),
        (TABLE.replace("\tNIC1\t", "\tNIC0\t"), r"line 1, column \d+: 'NIC0' heads two columns"),
        (TABLE.replace("mlx5_1", "mlx5_0"), "one name to two"),
        ("GPU0 " + " ".join(f"GPU{at}" for at in range(1, 2000)) + "\nGPU0 X", "line 1: more than 256 columns"),
        ("GPU0 GPU1\nGPU0 X NV1\n" + "word\n" * 1000, "line 5[01][0-9]: the row of GPU0 does not end"),
        ("GPU0 " + "x" * 5000 + "\nGPU0 X", "line 1, column 6"),
    ],
)
def test_malformed_table_gives_one_line_with_the_place(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(text)
    assert len(str(caught.value)) < 200
    assert re.fullmatch(r"[^\x00-\x1f\x7f]*", str(caught.value))

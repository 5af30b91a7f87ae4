import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.discover.rocm_smi import parse
from topology_samples import fabric, path, paths, sample


def test_mi308x_is_a_mesh():
    node = parse(sample("mi308x.rocm.txt"))
    assert fabric(node) == {(a, b): 1 for a in range(8) for b in range(a + 1, 8)}
    assert [device.numa for device in node.devices] == [0] * 4 + [1] * 4


def test_devices_on_cpu_dies_of_their_own_reach_each_other_over_two():
    node = parse(sample("amd-pcie.rocm.txt"))
    assert paths(node) == {"system": 6}
    assert [device.numa for device in node.devices] == [0, 1, 3, 2]


def table(title: str, rows: list[str]) -> str:
    lines = [f"GPU{at}   {row}" for at, row in enumerate(rows)]
    return "\n".join([f"==== {title} ====", "       GPU0 GPU1 GPU2", *lines, "", ""])


WEIGHTS = table("Weight between two GPUs", ["0 15 30", "15 0 15", "30 15 0"])
HOPS = table("Hops between two GPUs", ["0 1 1", "1 0 1", "1 1 0"])
TYPES = table("Link Type between two GPUs", ["0 XGMI XGMI", "XGMI 0 XGMI", "XGMI XGMI 0"])
BANDWIDTHS = table(
    "Bandwidth between two GPUs", ["N/A 50000-200000 0-0", "50000-200000 N/A 50000-50000", "0-0 50000-50000 N/A"]
)


def test_dies_that_need_a_third_between_them_have_no_link_of_their_own():
    node = parse(WEIGHTS + HOPS + TYPES)  # hops are 1 all the same
    assert fabric(node) == {(0, 1): 1, (0, 2): 0, (1, 2): 1}


def test_bandwidths_are_read_where_they_are_given():
    node = parse(WEIGHTS + HOPS + TYPES + BANDWIDTHS)
    assert [link.bytes_per_s for link in node.links] == [200e9, None, 50e9]


def test_pcie_below_one_cpu():
    pcie = TYPES.replace("XGMI", "PCIE")
    node = parse(WEIGHTS + table("Hops between two GPUs", ["0 2 3", "2 0 3", "3 3 0"]) + pcie)
    assert (path(node, 0, 1), path(node, 0, 2)) == ("host", "system")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no table of weight"),
        ("\x1b\x00" * 50, "holds no table of weight"),
        (WEIGHTS + TYPES, "holds no table of hops"),
        (WEIGHTS[:-20] + "\n" + HOPS + TYPES, "line 4: GPU1 has 2 cells under 3 columns"),
        (WEIGHTS + HOPS + TYPES[:-25], "line 16: GPU1 has 2 cells under 3 columns"),
        (WEIGHTS.replace("15 0 15", "15 0"), "line 4: GPU1 has 2 cells under 3 columns"),
        (WEIGHTS.replace("30 15 0", "30 1e9 0"), "line 5: weight of GPU2 to GPU1 cannot be '1e9'"),
        (WEIGHTS.replace("30 15 0", f"30 {10**20} 0"), "line 5: weight of GPU2 to GPU1 cannot be"),
        (WEIGHTS + HOPS + TYPES.replace("XGMI 0 XGMI", "XGMI 0 SLOW"), "type of GPU1 to GPU2 cannot be 'SLOW'"),
        (WEIGHTS + HOPS + TYPES.replace("0 XGMI XGMI", "0 0 XGMI", 1), "GPU0 to GPU1 has no type of link"),
        (WEIGHTS.replace("GPU0 GPU1 GPU2", "GPU0 GPU1 GPU1"), "line 2: the table of weight must begin with"),
        (WEIGHTS.replace("GPU0 GPU1", f"GPU{10**13} GPU1"), "line 2: the number of the GPU must be"),
    ],
)
def test_malformed_output_gives_one_line_with_the_place(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(text)
    assert str(caught.value).isprintable()

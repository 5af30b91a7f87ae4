import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.discover.hwloc import parse
from topology_samples import near, path, paths, sample


def test_dgx_2h_joins_sixteen_devices_by_switches():
    node = parse(sample("dgx-2h.hwloc.xml"))
    assert [device.index for device in node.devices] == list(range(16))
    assert {device.name for device in node.devices} == {"Tesla V100-SXM3-32GB-H"}
    assert node.num_sockets == 2
    assert [device.numa for device in node.devices] == [0] * 8 + [1] * 8
    assert paths(node) == {"fabric": 120}
    assert {link.bytes_per_s for link in node.links} == {150e9}  # six NVLinks of 25 GB/s
    assert node.devices[0].host_bytes_per_s == pytest.approx(15.75e9, rel=1e-3)


def test_power8_links_of_devices_to_the_cpu_join_no_devices():
    node = parse(sample("power8-p100.hwloc.xml"))
    assert [(link.a, link.b, link.bytes_per_s) for link in node.links if link.path == "fabric"] == [
        (0, 1, 40e9),
        (2, 3, 40e9),
    ]
    assert path(node, 0, 2) == "system"
    assert node.num_sockets == 2


def pci(address: str, kind: str, ids: str, inside: str = "", speed: str = "31.507692") -> str:
    return (
        f'<object type="PCIDev" pci_busid="{address}" pci_type="{kind} [{ids}] [0000:0000] 00" '
        f'pci_link_speed="{speed}">{inside}</object>'
    )


def bridge(address: str, inside: str) -> str:
    return f'<object type="Bridge" bridge_type="1-1" pci_busid="{address}" pci_link_speed="31.507692">{inside}</object>'


def system(name: str, infos: str = "") -> str:
    return f'<object type="OSDev" name="{name}">{infos}</object>'


def node_of(*sockets: str, socket: str = "Package", version: str = ' version="2.0"') -> str:
    """A machine whose sockets are NUMA nodes; each holds the given objects below one host bridge."""
    objects = "".join(
        f'<object type="{socket}" os_index="{at}" nodeset="0x{1 << at:08x}">'
        f'<object type="Bridge" bridge_type="0-1" bridge_pci="000{at}:[00-ff]">{inside}</object></object>'
        for at, inside in enumerate(sockets)
    )
    return f'<topology{version}><object type="Machine" nodeset="0x00000003">{objects}</object></topology>'


A100 = "10de:20b2"
CX7 = "15b3:1021"
# A root port; a switch with an upstream port and a downstream port to each of two GPUs and a NIC; a second root port.
FIRST = bridge(
    "0000:00:01.0",
    bridge(
        "0000:01:00.0",
        bridge("0000:02:00.0", pci("0000:03:00.0", "0302", A100))
        + bridge("0000:02:01.0", pci("0000:04:00.0", "0302", A100))
        + bridge("0000:02:02.0", pci("0000:05:00.0", "0207", CX7, system("ib0") + system("mlx5_0"))),
    ),
) + bridge("0000:00:02.0", pci("0000:10:00.0", "0302", A100, speed="15.753846"))
SECOND = bridge("0001:00:01.0", pci("0001:01:00.0", "0200", "17db:0501", system("hsn0"))) + bridge(
    "0001:00:02.0", pci("0001:02:00.0", "0200", "8086:1572", system("eth0"))
)


@pytest.mark.parametrize("kind", ["Package", "Socket"])
def test_switches_host_bridges_and_sockets(kind):
    version = "" if kind == "Socket" else ' version="2.0"'  # the first version of the format
    node = parse(node_of(FIRST, SECOND, socket=kind, version=version))
    assert [device.pci for device in node.devices] == ["0000:03:00.0", "0000:04:00.0", "0000:10:00.0"]
    assert {device.name for device in node.devices} == {"NVIDIA A100-SXM4-80GB"}
    assert node.num_sockets == 2
    assert (path(node, 0, 1), path(node, 0, 2)) == ("switch", "host")
    assert near(node, 0) == near(node, 1) == {"mlx5_0": "switch"}
    assert near(node, 2) == {}
    assert [(nic.name, nic.kind, nic.numa) for nic in node.nics] == [
        ("mlx5_0", "infiniband", 0),
        ("hsn0", "slingshot", 1),
        ("eth0", "ethernet", 1),
    ]
    assert next(link.path for link in node.links if (link.a, link.nic) == (0, "hsn0")) == "system"
    assert node.devices[2].host_bytes_per_s == pytest.approx(15.753846e9)


def test_xgmi_rates_between_the_devices_that_they_name():
    gpus = "".join(
        bridge(
            f"0000:00:0{at}.0",
            pci(
                f"0000:0{at}:00.0",
                "0380",
                "1002:7408",
                system(f"rsmi{at}").replace("<object", f'<object gp_index="{at}"'),
            ),
        )
        for at in (1, 0)
    )
    matrix = (
        '<distances2 type="OSDev" nbobjs="2" kind="25" name="XGMIBandwidth" indexing="gp">'
        "<indexes>0 1</indexes><u64values>1000000 200000 </u64values><u64values>200000 1000000</u64values></distances2>"
    )
    node = parse(node_of(gpus).replace("</topology>", matrix + "</topology>"))
    assert [device.index for device in node.devices] == [0, 1]  # as ROCm SMI counts them
    assert [(link.path, link.bytes_per_s) for link in node.links] == [("fabric", 200e9)]


DGX2 = sample("dgx-2h.hwloc.xml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid XML"),
        ("\x7fELF\x02", "not valid XML: .*line 1, column 1"),
        (DGX2[:5000], r"not valid XML: .* \(line \d+, column \d+\)"),
        (DGX2.replace('"hwloc2.dtd"', '"hwloc2.dtd" [<!ENTITY x "y">]'), "line 2, column .*: declares"),
        ("<topology/>", "holds neither a device nor a network adapter"),
        ("<system/>", "must be <topology>, got 'system'"),
        (DGX2.replace('nbobjs="28"', 'nbobjs="27"'), r"line \d+: the matrix NVLinkBandwidth must have 27 indexes"),
        (DGX2.replace('nbobjs="28"', 'nbobjs="100000000"'), "nbobjs of distances2hetero must be"),
        (DGX2.replace(">0 0 0 0 0 0 25000", ">0 0 0 0 0 0 fast", 1), "a value must be a whole number .* 'fast'"),
        (DGX2.replace('"15.753846"', '"fifteen"', 1), r"line \d+: pci_link_speed must be in GB/s, .* 'fifteen'"),
    ],
)
def test_malformed_file_gives_one_line_with_the_place(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200

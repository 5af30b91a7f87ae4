import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.discover.nccl_xml import parse
from topology_samples import fabric, near, path, paths, sample


def test_mi300x_is_a_mesh_with_a_nic_beside_every_device():
    node = parse(sample("mi300x.xml"))
    assert {device.name for device in node.devices} == {"AMD Instinct MI300X"}
    assert {device.architecture for device in node.devices} == {"gfx942"}
    assert fabric(node) == {(a, b): 1 for a in range(8) for b in range(a + 1, 8)}
    assert [device.numa for device in node.devices] == [0] * 4 + [1] * 4
    assert [list(near(node, device)) for device in range(8)] == [[f"mlx5_{at}"] for at in range(8)]
    assert {nic.bytes_per_s for nic in node.nics} == {50e9}
    assert all(nic.gpudirect and nic.kind == "infiniband" for nic in node.nics)
    assert node.devices[0].host_bytes_per_s == pytest.approx(63.015e9, rel=1e-4)  # PCIe 5, 16 lanes
    assert node.devices[0].pci == "0000:0c:00.0"


def test_mi250x_dies_without_a_link_of_their_own_reach_each_other_over_the_host():
    node = parse(sample("mi250x.xml"))
    expected = [(0, 1), (0, 2), (0, 6), (1, 3), (1, 5), (2, 3), (2, 4), (3, 7), (4, 5), (4, 6), (5, 7), (6, 7)]
    assert fabric(node) == dict.fromkeys(expected, 1)
    assert path(node, 0, 3) == "system"
    assert path(node, 5, 6) == "host"
    assert [device.numa for device in node.devices] == [3, 3, 1, 1, 0, 0, 0, 0]
    assert node.devices[0].architecture == "gfx90a"
    assert [(nic.name, nic.kind, nic.bytes_per_s) for nic in node.nics] == [("bond0", "ethernet", 125e6)]


def test_p4d_as_its_provider_describes_it_to_nccl():
    node = parse(sample("p4d.xml"))
    assert [device.name for device in node.devices] == ["NVIDIA A100-SXM4-40GB"] * 8
    assert paths(node) == {"switch": 4, "host": 8, "system": 16}
    assert [nic.kind for nic in node.nics] == ["efa"] * 4
    assert near(node, 0) == near(node, 1) == {"0000:10:1b.0": "switch"}
    assert near(node, 7) == {"0000:a0:1b.0": "switch"}
    assert node.devices[0].host_bytes_per_s == pytest.approx(15.754e9, rel=1e-4)  # as the file has it: PCIe 3


def test_pair_of_a100_on_a_bridge():
    node = parse(sample("azure-nc48-a100.xml"))
    assert fabric(node) == {(0, 1): 12}
    assert [device.architecture for device in node.devices] == ["sm_80", "sm_80"]
    assert node.devices[0].host_bytes_per_s is None  # a virtual machine that does not say
    assert [(nic.kind, nic.bytes_per_s, nic.gpudirect) for nic in node.nics] == [("ethernet", 12.5e9, False)]


def test_nvswitches_that_a_virtual_machine_does_not_see_join_all_devices():
    node = parse(sample("gcp-a3.xml"))
    assert fabric(node) == {(0, 1): 18}
    assert {link.path for link in node.links if link.nic} == {"host"}
    assert node.nics[0].bytes_per_s == 25e9


def two_hosts(*, links: int) -> str:
    """Two trays of two Grace Hopper devices each, joined by switches."""
    cpus = "".join(
        f"""<cpu host_hash="0x{host}" numaid="0"><pci busid="000{dev}:01:00.0" class="0x030200" vendor="0x10de"
            device="0x2941" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="{dev}" sm="100">
            <nvlink target="fffffff:ff:ff" count="{links}" tclass="0x068000"/><c2c bw="44712" count="10"/>
            </gpu></pci></cpu>"""
        for host in ("a", "b")
        for dev in (0, 1)
    )
    return f'<system version="1">{cpus}</system>'


def test_fabric_over_several_hosts_is_one_node_and_the_size_of_the_domain():
    node = parse(two_hosts(links=18))
    assert len(node.devices) == 2
    assert node.devices_per_domain == 4
    assert fabric(node) == {(0, 1): 18}
    assert node.devices[0].host_bytes_per_s == pytest.approx(447.12e9)  # NVLink-C2C rather than PCIe


def test_speeds_that_the_kernel_does_not_know_are_left_open():
    text = sample("gcp-a3.xml").replace("16.0 GT/s PCIe", "Unknown").replace('"16"', '"255"')
    assert [device.host_bytes_per_s for device in parse(text).devices] == [None, None]


def test_links_that_failed_count_no_more():
    text = sample("gcp-a3.xml").replace('count="18"', 'count="17"', 1)
    assert fabric(parse(text)) == {(0, 1): 17}


def test_every_pair_of_links_is_counted_once_though_both_ends_tell_it():
    one_end = sample("azure-nc48-a100.xml").replace('<nvlink target="0001:00:00.0" count="12" tclass="0x030200"/>', "")
    assert fabric(parse(one_end)) == {(0, 1): 12}


TEXT = sample("gcp-a3.xml")
BOMB = '<!DOCTYPE system [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><system>&b;</system>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"not valid XML: no element found \(line 1"),
        ("\x00\x01\x02", r"not valid XML: not well-formed .*\(line 1"),
        (TEXT[:700], r"not valid XML: .* \(line \d+, column \d+\)"),
        (TEXT.replace("</gpu>", ""), r"not valid XML: mismatched tag \(line \d+, column \d+\)"),
        (BOMB, "line 1, column .*: declares a document type"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><system/>', "neither a device"),
        ("<system>" + "<a>" * 200, "line 1, column .*: elements are nested more than 100 deep"),
        ("<system>" + "<a/>" * 50_001 + "</system>", "more than 50,000 elements"),
        ("<system>" + "word\n" * 50_000 + "</system>", "more than 100,000 characters of text"),
        ("<topology/>", "must be <system>, got 'topology'"),
        ("<system/>", "holds neither a device nor a network adapter"),
        (TEXT.replace('count="18"', 'count="1e3"', 1), r"line 11: count of nvlink must be a whole number .* '1e3'"),
        (TEXT.replace('count="18"', f'count="{10**30}"', 1), "line 11: count of nvlink must be"),
        (TEXT.replace('speed="200000"', f'speed="{10**11}"'), "line 5: speed of net must be"),
        (TEXT.replace("16.0 GT/s", "fast", 1), "line 8: link_speed of pci must be like 16.0 GT/s, got 'fast PCIe'"),
        (TEXT.replace('dev="1" sm', 'dev="0" sm'), r"line 15: two devices of one host have dev 0"),
        (TEXT.replace('numaid="0"', 'numaid="zero"'), "line 2: numaid of cpu must be a whole number"),
        (TEXT.replace('name="eth0"', 'name=""').replace("0000:00:0c.0", "here"), "line 5: the adapter's name"),
    ],
)
def test_malformed_file_gives_one_line_with_the_place(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200

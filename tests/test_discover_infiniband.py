import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.discover.infiniband import parse
from topology_samples import sample


def test_tools_name_kind_and_rate():
    assert [(nic.name, nic.kind, nic.bytes_per_s) for nic in parse(sample("connectx6dx.ibstat.txt")).nics] == [
        ("mlx5_0", "roce", 12.5e9),
        ("mlx5_1", "roce", 12.5e9),
    ]
    assert parse(sample("connectx.ibstatus.txt")).nics == parse(sample("connectx6dx.ibstat.txt")).nics


def test_efa_is_told_by_its_maker_though_it_calls_itself_infiniband():
    for tool in ("efa.ibv_devinfo.txt", "efa.fi_info.txt"):
        assert [(nic.name, nic.kind, nic.bytes_per_s) for nic in parse(sample(tool)).nics] == [("efa_0", "efa", None)]


def test_slingshot():
    node = parse(sample("slingshot.cxi_stat.txt"))
    assert [(nic.name, nic.kind, nic.bytes_per_s, nic.pci) for nic in node.nics] == [
        ("cxi0", "slingshot", 25e9, "0000:21:00.0"),
        ("cxi1", "slingshot", 25e9, "0000:a1:00.0"),
    ]
    assert {nic.bytes_per_s for nic in parse(sample("slingshot.cxi_stat.txt").replace("BS_200", "CK_400")).nics} == {
        50e9
    }


STATUS = """Infiniband device 'mlx5_0' port {port} status:
\tstate:\t\t {state}
\trate:\t\t 400 Gb/sec (4X NDR)
\tlink_layer:\t InfiniBand
"""


def test_ports_of_one_adapter_add_up_and_those_that_are_down_do_not_count():
    up, down = STATUS.format(port=1, state="4: ACTIVE"), STATUS.format(port=2, state="1: DOWN")
    assert [(nic.kind, nic.bytes_per_s) for nic in parse(up + down).nics] == [("infiniband", 50e9)]
    assert [nic.bytes_per_s for nic in parse(up + up.replace("port 1", "port 2")).nics] == [100e9]
    assert parse(down).nics == ()


def test_rates_of_verbose_output():
    devinfo = """hca_id: mlx5_3
        vendor_id:  0x02c9
            port:   1
                state:          PORT_ACTIVE (4)
                active_width:   4X (2)
                active_speed:   100.0 Gbps (128)
                link_layer:     InfiniBand
    """
    assert [(nic.name, nic.kind, nic.bytes_per_s) for nic in parse(devinfo).nics] == [("mlx5_3", "infiniband", 50e9)]
    older = devinfo.replace("100.0 Gbps (128)", "invalid speed (128)")  # a tool that does not know the adapter yet
    assert parse(older) == parse(devinfo)
    libfabric = """fi_info:
    domain: 0x0
    nic:
        fi_device_attr:
            name: rdmap79s0
            device_id: 0xefa1
            vendor_id: 0x1d0f
        fi_link_attr:
            speed: 100000000000
            state: FI_LINK_UP
    """
    assert [(nic.name, nic.kind, nic.bytes_per_s) for nic in parse(libfabric * 3).nics] == [
        ("rdmap79s0", "efa", 12.5e9)
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line names a device"),
        ("\x00\xff" * 99, "no line names a device"),
        ("CA 'mlx5_0'\n\tPort 1:\n", "line 2: 'mlx5_0' has a port without a state"),
        ("CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 4e2\n", "line 2: the rate must be in Gb/s.*'4e2'"),
        (f"CA 'mlx5_0'\nPort 1:\nState: Active\nRate: {10**30}\n", "line 2: the rate must be in Gb/s"),
        ("provider: efa\n", "line 1: a device without a name or domain"),
        ("Device: cxi0\nLink speed: quick\nLink state: up\n", "line 1: the rate must be like BS_200G, got 'quick'"),
        ("hca_id: a\nport: 1\nstate: PORT_ACTIVE\nactive_speed: 5\n", "line 2: the rate must be a width"),
        (f"fi_device_attr:\nname: efa_0\nstate: FI_LINK_UP\nspeed: {10**20}\n", "line 1: the rate must be a whole"),
        ("hca_id: a\n" * 257, "line 257: more than 256 devices"),
    ],
)
def test_malformed_output_gives_one_line_with_the_place(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(text)
    assert str(caught.value).isprintable()

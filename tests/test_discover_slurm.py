import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.hostlist import expand_hosts
from autoplan.profiler.discover.slurm import parse


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[001-003,020],login", ["node001", "node002", "node003", "node020", "login"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("gpu[9-11]-ib", ["gpu9-ib", "gpu10-ib", "gpu11-ib"]),
        ("[1,3]", ["1", "3"]),
        ("a,,b,", ["a", "b"]),
    ],
)
def test_host_lists(text, names):
    assert expand_hosts(text) == names


@given(st.integers(0, 99_000), st.integers(0, 900), st.integers(1, 6))
@settings(max_examples=20)
def test_range_holds_every_number_once_with_its_zeros(first, more, width):
    names = expand_hosts(f"n[{first:0{width}d}-{first + more:0{width}d}]")
    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))
    assert all(len(name) >= width + 1 for name in names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        (",,", "names no host"),
        ("a[1-2", "column 5: a bracket is not closed"),
        ("a1-2]", "column 5: a bracket that does not match"),
        ("a[[1]]", "column 3: a bracket that does not match"),
        ("a[5-1]", "column 2: '5-1' is no range"),
        ("a[x]", "column 2: 'x' is no range"),
        ("a[]", "column 2: '' is no range"),
        ("b,a[1-999999999]", "column 4: names more than 100,000 hosts"),
        ("a[1-99999999999999]", "column 2: .* is no range"),
        ("a[1-1000]b[1-1000]c[1-1000]", "column 1: names more than 100,000 hosts"),
        ("a b", "column 1: 'a b' is no part of a host name"),
    ],
)
def test_wrong_host_list_names_the_column(text, message):
    with pytest.raises(InputError, match=message):
        expand_hosts(text)


TREE = """# three leaves below one spine, as in topology.conf(5)
SwitchName=s0 Nodes=dev[0-5]
SwitchName=s1 Nodes=dev[6-11]  # rack 2
switchname=s2 nodes=dev[12-17] LinkSpeed=100
SwitchName=s3 Switches=s[0-2]
"""


def test_tree_leaves_out_the_switch_that_joins_all():
    tree = parse(TREE)
    assert [(group.switches, len(group.names)) for group in tree.groups] == [(("s0",), 6), (("s1",), 6), (("s2",), 6)]
    assert tree.tier_nodes == (6,)
    allocation = tree.of(["dev4", "dev5", "dev12", "dev0"])
    assert [(group.names, group.switches) for group in allocation] == [
        (("dev4", "dev5"), ("s0",)),
        (("dev12",), ("s2",)),
        (("dev0",), ("s0",)),  # in the order of the allocation
    ]


def test_line_goes_on_after_a_backslash():
    assert parse(TREE.replace(" Nodes=dev[6-11]", " \\\n  Nodes=dev[6-11]")) == parse(TREE)


def test_tree_of_three_tiers_and_one_of_halls_without_a_common_root():
    tree = parse(
        "SwitchName=root Switches=grp[10,11]\n"
        "SwitchName=grp10 Switches=leaf[100-101]\nSwitchName=grp11 Switches=leaf[110-111]\n"
        + "".join(f"SwitchName=leaf{at} Nodes=peta{at}[00-19]\n" for at in (100, 101, 110, 111))
    )
    assert tree.tier_nodes == (20, 40)
    assert tree.of(["peta10119"])[0].switches == ("leaf101", "grp10")
    halls = parse(
        "SwitchName=spineA Switches=leafA[1-2]\nSwitchName=leafA1 Nodes=node[1-8]\nSwitchName=leafA2 Nodes=node[9-16]\n"
        "SwitchName=leafC Nodes=node[33-40]\n"
    )
    assert halls.tier_nodes == (8, 16)
    assert halls.of(["node33"])[0].switches == ("leafC", "leafC")  # hangs higher than the others


def test_blocks_and_the_larger_ones_of_their_neighbours():
    blocks = "".join(f"BlockName=b{at + 1} Nodes=node[{at * 4 + 1:02d}-{at * 4 + 4:02d}]\n" for at in range(4))
    assert parse(blocks).of(["node05"])[0].switches == ("b2",)
    tree = parse(blocks + "BlockSizes=4,8\n")
    assert [group.switches for group in tree.groups] == [
        ("b1", "8-node block 1"),
        ("b2", "8-node block 1"),
        ("b3", "8-node block 2"),
        ("b4", "8-node block 2"),
    ]
    assert tree.tier_nodes == (4, 8)
    assert parse(blocks + "BlockSizes=4,16\n").tier_nodes == (4,)  # one block of sixteen joins all


YAML = """---
- topology: topo1
  cluster_default: true
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
      - switch: s1
        nodes: node[01-02]
      - switch: s2
        nodes: node[03-04]
- topology: topo2
  cluster_default: false
  block:
    block_sizes:
      - 4
      - 16
    blocks:
      - block: b1
        nodes: node[01-04]
      - block: b2
        nodes: node[05-08]
- topology: topo3
  cluster_default: false
  flat: true
"""


def test_yaml_of_the_manual_page():
    assert [group.switches for group in parse(YAML).groups] == [("s1",), ("s2",)]
    other = YAML.replace("cluster_default: true", "cluster_default: false", 1)
    other = other.replace("topology: topo2\n  cluster_default: false", "topology: topo2\n  cluster_default: true")
    assert [group.switches for group in parse(other).groups] == [("b1",), ("b2",)]
    lines = [line for line in YAML.splitlines(keepends=True) if "cluster_default" not in line]
    with pytest.raises(InputError, match=r"name the topology .*: 'topo1', 'topo2'"):
        parse("".join(lines))


def test_both_formats_of_one_tree_agree():
    conf = "SwitchName=sw_root Switches=s[1-2]\nSwitchName=s1 Nodes=node[01-02]\nSwitchName=s2 Nodes=node[03-04]\n"
    assert parse(conf) == parse(YAML)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be lines of a topology.conf, or the list"),
        ("\x00\x01", "not valid YAML"),
        ("SwitchName=s0 Nodes=a[1-\n", r"line 1: 'a\[1-': column 4: a bracket is not closed"),
        ("SwitchName=s0 Nodes=a Speed=9\n", "line 1: 'speed' is no key"),
        ("SwitchName=s0 Nodes=a and b\n", "line 1: must be pairs .* got 'and b'"),
        ("SwitchName=s0 Nodes=a\nSwitchName=s0 Nodes=b\n", "line 2: 's0' is described twice"),
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=a\n", "line 2: 'a' is below 's0' and 's1'"),
        ("SwitchName=s0 Switches=s1\n", "'s0' is above 's1', which is not described"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=n\n", "or a loop"),
        (
            "SwitchName=a Switches=c\nSwitchName=b Switches=c\nSwitchName=c Nodes=n\n",
            "'c' is below 'a' and 'b'",
        ),
        ("BlockName=a Nodes=n\nBlockName=b Nodes=n\n", "line 2: 'n' is below 'a' and 'b'"),
        ("BlockName=a Nodes=n\nBlockSizes=4,6\n", "must be multiples of the first"),
        ("BlockName=a Nodes=n\nBlockSizes=1e9\n", "line 2: a size of BlockSizes must be a whole number"),
        ("BlockName=a Nodes=n\nSwitchName=b Nodes=m\n", "has switches and blocks"),
        ("RingName=r Nodes=n[1-4]\n", "line 1: 'ringname' is no key of topology/tree or topology/block"),
        ("BlockSizes=4\n", "holds no node"),
        ("SwitchName=a Nodes=a[1-99999]\nSwitchName=b Nodes=b[1-9]\n", "line 2: more than 100,000 names"),
        ("- topology: a\n  tree:\n    switches:\n      - 2026-99-99: n1\n", "not valid YAML: .*month"),
        ("a: [", r"not valid YAML: .*\(line \d, column \d\)"),
        ("a: &x [1]\nb: *x\n", "line 2: an alias"),
        ("[" * 200, "line 1: nested more than 20 deep"),
        ("- topology: t\n  ring: {}\n", "trees and blocks here: none"),
        ("- topology: t\n  tree: {switches: [{switch: s, nods: a}]}\n", "unknown key 'nods'"),
        ("- topology: t\n  tree: {switches: [{switch: s, true: a}]}\n", "unknown key of type bool"),
        ("- topology: t\n  tree: {switches: [{switch: 3}]}\n", "Expected `str`, got `int`"),
        ("a" * 2**21, "more than 1,048,576 characters"),
    ],
)
def test_malformed_file_gives_one_line(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


def test_node_that_the_file_does_not_know():
    with pytest.raises(InputError, match="node 'other' is not in the topology of Slurm"):
        parse(TREE).of(["dev1", "other"])

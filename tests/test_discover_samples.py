"""Laws of all parsers of `profiler.discover`, on the samples of real machines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.profiler.discover import hwloc, infiniband, nccl_xml, nvidia_smi, rocm_smi
from topology_samples import FOLDER, sample

PARSERS = {
    ".hwloc.xml": hwloc,
    ".xml": nccl_xml,
    ".rocm.txt": rocm_smi,
    ".ibstat.txt": infiniband,
    ".ibstatus.txt": infiniband,
    ".ibv_devinfo.txt": infiniband,
    ".fi_info.txt": infiniband,
    ".cxi_stat.txt": infiniband,
    ".txt": nvidia_smi,
}
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".md")
SHORT = [name for name in NAMES if len(sample(name)) < 3000]


def parser_of(name):
    return next(parser for suffix, parser in PARSERS.items() if name.endswith(suffix))


def test_every_sample_has_its_source():
    listed = [line.split("`")[1] for line in sample("SOURCES.md").splitlines() if line.startswith("| `")]
    assert sorted(listed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_is_joined_once(name):
    node = parser_of(name).parse(sample(name))
    indices = [device.index for device in node.devices]
    assert indices == list(range(len(indices)))
    pairs = [(link.a, link.b) for link in node.links if link.b is not None]
    assert sorted(pairs) == [(a, b) for a in indices for b in indices if a < b]
    to_nics = [(link.a, link.nic) for link in node.links if link.b is None]
    assert sorted(to_nics) == sorted((a, nic.name) for a in indices for nic in node.nics)


JUNK = ["", "\0", "X", "-1", "9" * 20, "<", '"', "&x;", "[", "\t", "\n", "GPU0", "NaN", "\u202e", "=", "NV0", ":"]


@given(
    st.sampled_from(SHORT),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), st.sampled_from(JUNK)), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_damage_gives_one_line_or_another_machine_but_no_crash(name, damages):
    text = sample(name)
    for where, lost, junk in damages:
        at = int(where * len(text))
        text = text[:at] + junk + text[at + lost :]
    message = ""
    try:
        parser_of(name).parse(text)
    except InputError as error:
        message = str(error)
    assert message.isprintable()
    assert len(message) < 300

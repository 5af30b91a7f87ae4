from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.errors import InputError
from autoplan.hostlist import compress_hosts, expand_hosts


# The forms that Slurm's manual of scontrol shows for hostlists.
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login1", ("login1",)),
        ("gpu[001-003,007],login1", ("gpu001", "gpu002", "gpu003", "gpu007", "login1")),
        ("n[8-10]", ("n8", "n9", "n10")),
        ("r[1-2]n[1-2]-ib", ("r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib")),
        ("", ()),
    ],
)
def test_a_host_list_stands_for_names_in_order(text: str, names: tuple[str, ...]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["gpu001", "gpu002", "gpu003", "gpu007", "login1"], "gpu[001-003,007],login1"),
        (["n8", "n9", "n10"], "n[8-9,10]"),
        (["b2", "b1"], "b[2,1]"),
        (["one", "two"], "one,two"),
        (["r1n1-ib", "r1n2-ib"], "r1n[1-2]-ib"),
    ],
)
def test_names_that_count_up_become_ranges(names: list[str], text: str) -> None:
    assert compress_hosts(names) == text


NAMES = st.from_regex(r"[a-z]{1,2}[0-9]{0,3}(-[a-z])?", fullmatch=True)


@settings(max_examples=60)
@given(st.lists(NAMES, max_size=12))
def test_names_come_back_as_they_were(names: list[str]) -> None:
    assert list(expand_hosts(compress_hosts(names))) == names


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu[1-", "brackets do not match"),
        ("gpu1]", "brackets do not match"),
        ("gpu[3-1]", "'3-1' is no number or range"),
        ("gpu[a]", "'a' is no number or range"),
        ("a,,b", "has an empty name"),
        ("n[0-999999999]", "names more than 1,000,000 hosts"),
    ],
)
def test_what_is_no_host_list_is_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError, match="host list") as caught:
        expand_hosts(text)
    assert says in str(caught.value)

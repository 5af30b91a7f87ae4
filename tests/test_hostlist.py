from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.hostlist import compress_hosts, expand_hosts


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
    assert expand_hosts(text) == names


NAMES = st.from_regex(r"[a-z]{1,2}[0-9]{0,3}(-[a-z])?", fullmatch=True)


@settings(max_examples=60)
@given(st.lists(NAMES, min_size=1, max_size=12))
def test_names_come_back_as_they_were(names: list[str]) -> None:
    assert expand_hosts(compress_hosts(names)) == names

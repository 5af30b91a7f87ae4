"""Messages of errors, as a terminal shows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import MAX_ECHOED, MAX_MESSAGE, InputError, OutOfRangeError, readable


def test_a_long_value_is_cut_and_the_rule_stays() -> None:
    text = str(InputError(f"unknown device {'1' * 5000!r}: known: a100, h100"))
    assert text == f"unknown device '{'1' * MAX_ECHOED}...': known: a100, h100"
    assert readable("x.toml: " + "9" * 5000 + " is too large") == "x.toml: " + "9" * MAX_ECHOED + "... is too large"


def test_paths_and_usual_messages_are_left_alone() -> None:
    path = "/data/" + "a" * 200 + "/cluster.toml"
    assert str(InputError(f"{path}: cannot be read: no such file")) == f"{path}: cannot be read: no such file"
    assert str(OutOfRangeError("tdp_w", -1.0, "must be positive")) == "tdp_w must be positive, got -1"
    assert str(InputError("cluster \u2018b\u00e4r\u2019 has 3 µs")) == "cluster \u2018b\u00e4r\u2019 has 3 µs"


@pytest.mark.parametrize("letter", ["\x1b", "\x07", "\u202e", "\x9b", "\udc80", "\u2028", "\u2029"])
def test_what_steers_a_terminal_is_escaped(letter: str) -> None:
    assert str(InputError(f"model {letter}[31m is not known")) == f"model {ascii(letter)[1:-1]}[31m is not known"


@given(st.text(max_size=6000))
def test_every_message_can_be_shown(text: str) -> None:
    shown = str(InputError(text))
    assert len(shown) <= MAX_MESSAGE + 3
    assert all(
        line.isprintable() or not line.encode("utf-8", "replace").startswith(b"\x1b") for line in shown.split("\n")
    )
    assert readable(shown) == shown or len(shown) > MAX_MESSAGE

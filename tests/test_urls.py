"""Does nothing that is shown hold the password of a database URL, however the URL was written?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.urls import is_url, redact_arguments, redact_url


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ada:geheim@db.lab:5432/timings", "postgresql://ada@db.lab:5432/timings"),
        ("postgresql+psycopg://ada:geh%40im@db/timings", "postgresql+psycopg://ada@db/timings"),
        ("postgresql://ada@db/timings?password=geheim&sslmode=require", "postgresql://ada@db/timings"),
        ("postgresql://ada:geheim@[::1]:5432/timings", "postgresql://ada@[::1]:5432/timings"),
        ("postgresql:///timings?host=/run&user=ada&password=geheim", "postgresql:///timings"),
        ("postgresql://ada@db/timings", "postgresql://ada@db/timings"),
        ("sqlite:////data/timings.db", "sqlite:////data/timings.db"),
        ("/data/timings.db", "/data/timings.db"),
        ("C:\\data\\timings.db", "C:\\data\\timings.db"),
        ("timings.db", "timings.db"),
        ("h100-sxm:16x8", "h100-sxm:16x8"),
    ],
)
def test_what_is_shown_of_a_url(text: str, shown: str) -> None:
    assert redact_url(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://ada:geh@im@db/timings",
        "postgresql://ada:geh/im@db/timings",
        "postgresql://ada:geh?im@db/timings",
        "postgresql://ada:geh#im@db/timings",
        "postgresql://ada:geh im@db/timings",
        "postgresql://ada@db/timings?password=geh@im",
        "postgresql://db:geheim/timings",
        "ada:geheim@db/timings",
        "host=db user=ada password=geheim",
        "host=db PASSWORD = geheim",
    ],
)
def test_of_a_url_that_may_be_read_in_two_ways_nothing_is_shown(text: str) -> None:
    assert not is_url(text)
    assert redact_url(text) == "an unreadable database URL"


@given(st.text(min_size=4).filter(lambda text: "secret" not in text))
def test_no_password_gets_through(rest: str) -> None:
    for text in (
        f"postgresql://ada:{rest}secret@db/timings",
        f"postgresql://ada:secret{rest}@db/timings",
        f"postgresql://ada@db/timings?password=secret{rest}",
        f"postgresql://ada@db/timings?x=1&password={rest}secret",
    ):
        assert "secret" not in redact_url(text)


def test_arguments_are_parsed_without_passwords_and_remembered_whole() -> None:
    url, other = "postgresql://ada:geheim@db/timings", "postgresql://bob:secret@db/timings"
    shown, whole = redact_arguments(["push", url, f"--db={other}", "--json", "a=b", "--reason", "x y"])
    redacted = ["postgresql://ada@db/timings", "--db=postgresql://bob@db/timings"]
    assert shown == ["push", *redacted, "--json", "a=b", "--reason", "x y"]
    assert whole == {"postgresql://ada@db/timings": url, "postgresql://bob@db/timings": other}


def test_one_url_with_two_passwords_is_refused() -> None:
    with pytest.raises(InputError, match="two passwords"):
        redact_arguments(["postgresql://ada:one@db/x", "--db", "postgresql://ada:two@db/x"])

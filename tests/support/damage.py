"""Launch files as people damage them: with a piece taken out, doubled or replaced by something else."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, texts: list[str]) -> str:
    """A text of several with a piece of it taken out, doubled or replaced."""
    text = draw(st.sampled_from(texts))
    first, length = draw(st.integers(0, len(text))), draw(st.integers(0, 60))
    piece = text[first : first + length]
    pieces = (
        "",
        piece * 2,
        "{",
        ")",
        "[1, 2]",
        "-1",
        "1e400",
        "9" * 30,
        "None",
        "'",
        '"',
        "\n",
        "\x00",
        "é",
        "x.y",
        "*",
    )
    put = draw(st.one_of(st.sampled_from(pieces), st.text(max_size=8)))
    return text[:first] + put + text[first + length :]

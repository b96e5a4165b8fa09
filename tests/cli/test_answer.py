"""Drafted tokens and the target's own are told apart."""

from __future__ import annotations

import io

from rich.console import Console

from d3d_jax.cli.answer import DRAFTED, OWN, coloured, legend


def test_each_piece_has_the_colour_of_who_made_it():
    text = coloured(["The", " answer", " [bold]is", " 72"], (0, 3))
    assert text.plain == "The answer [bold]is 72"  # what looks like markup is text
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("The", OWN),
        (" answer", DRAFTED),
        (" [bold]is", DRAFTED),
        (" 72", OWN),
    ]
    assert legend(4, (0, 3)).plain.startswith("2 drafted and accepted, 2 by the target itself")


def test_no_colour_codes_where_no_terminal_is_or_none_are_wanted(monkeypatch):
    def printed(**settings) -> str:
        console = Console(file=io.StringIO(), **settings)
        console.print(coloured(["a", "b"], (0,)))
        return console.file.getvalue()

    assert printed() == "ab\n"
    assert "\x1b[" in printed(force_terminal=True, color_system="truecolor")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "35" not in printed(force_terminal=True, color_system="truecolor")

"""`d3d chat`: answers as they come, what was said before is known, and slips end nothing."""

from __future__ import annotations

import io

import pytest

from d3d_jax.cli.main import main


def chat(monkeypatch, pair, said: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    models = ["--model-path", str(pair.target), "--draft-model-path", str(pair.drafter)]
    return main(["chat", *models, "--max-new-tokens", "9", *words])


def test_turns_are_answered_and_figures_given(monkeypatch, pair, capsys):
    assert chat(monkeypatch, pair, "How many 0?\n/stats\nHow many 1?\n/dance\n/reset\nHow many 0?\n/quit\n") == 0
    printed = capsys.readouterr()
    first, second, again = printed.out.splitlines()
    assert first == again and second
    assert "async: " in printed.err and "tokens a round" in printed.err
    assert "unknown command /dance" in printed.err and "forgotten" in printed.err


def test_a_turn_that_does_not_fit_is_told_and_the_chat_goes_on(monkeypatch, pair, capsys):
    said = "How many 0? " * 40 + "\nHow many 0?\n"
    assert chat(monkeypatch, pair, said, "--max-len", "128") == 0
    printed = capsys.readouterr()
    assert "there is room for" in printed.err.replace("\n", " ") and "/reset makes room" in printed.err.replace(
        "\n", " "
    )
    assert len(printed.out.splitlines()) == 1


def test_without_a_drafter_the_target_talks_alone(monkeypatch, pair, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("How many 0?\n/stats\n"))
    assert main(["chat", "--model-path", str(pair.target), "--max-new-tokens", "5"]) == 0
    assert "ar: 5 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--mode", "sync", "--miss", "keep"], "for --mode async"), (["--max-len", "16"], "leaves no room")],
)
def test_flags_that_make_no_sense_are_one_line(monkeypatch, pair, capsys, words, said):
    assert chat(monkeypatch, pair, "", *words) == 2
    assert said in capsys.readouterr().err

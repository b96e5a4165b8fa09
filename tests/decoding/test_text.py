"""Text in pieces: no character is ever cut in two, and nothing is lost."""

from __future__ import annotations

import pytest

from d3d_jax.data.chat import encode_text, load_tokenizer
from d3d_jax.data.tokenizer_training import train_tokenizer
from d3d_jax.decoding.text import TextStream, pieces

TEXTS = [
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "한국어 문장은 바이트로 나뉜다",
    "👩‍👩‍👧 and 🇨🇿, 😀!",
    "plain, then ď at the end: ď",
    " leading space\n\n  and lines\t",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Knows English words and bytes, so that every other letter is two to four tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(train_tokenizer(["and then the end is at the end of lines"] * 3, 280, folder))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_decoded_text(tokenizer, text):
    ids = encode_text(tokenizer, text)
    found = pieces(tokenizer, ids)
    assert text.isascii() or "" in found  # characters are of several tokens here
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in found)


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_gives_the_text_of_what_stands_before_it(tokenizer, text):
    ids = encode_text(tokenizer, text)
    for cut in range(len(ids) + 1):
        stream = TextStream(tokenizer)
        streamed = "".join(stream.push(token) for token in ids[:cut])
        assert text.startswith(streamed)  # so no half character was shown
        assert streamed + stream.finish() == tokenizer.decode(ids[:cut]) == "".join(pieces(tokenizer, ids[:cut]))


def test_bytes_that_are_no_character_come_out_as_the_decoder_shows_them(tokenizer):
    lone = encode_text(tokenizer, "ď")[1:]
    ids = [*lone, *encode_text(tokenizer, "the end"), *lone, *lone, *encode_text(tokenizer, "ď"), *lone]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_are_shown_or_not_as_asked(tokenizer):
    ids = encode_text(tokenizer, "the end<|im_end|>")
    assert pieces(tokenizer, ids)[-1] == "<|im_end|>"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=True)) == "the end"


def test_no_ids_are_no_pieces(tokenizer):
    assert pieces(tokenizer, []) == []

"""Token ids to text, piece by piece, without ever cutting a character in two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from d3d_jax.decoding.state import Completion

_UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no whole character, or not yet


class TextStream:
    """Turns ids into text as they come. Bytes of an unfinished character are held back until it is complete.

    Made for byte-level tokenizers such as Qwen3's, where the text of a sequence is the joined bytes of its tokens.

    Args:
        skip_special_tokens: special tokens, such as the end of a turn, give no text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = False):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._held.append(int(token))
        text = self._decode()
        if text.endswith(_UNFINISHED):
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """The text of what is still held back, at the end of the sequence."""
        text = self._decode() if self._held else ""
        self._held.clear()
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._held, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)


def pieces(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
    """The text that each id adds; joined, they are the decoded text of all `ids`.

    The piece of a token that leaves a character unfinished is empty, and the token that completes it has it all.
    """
    stream = TextStream(tokenizer, skip_special_tokens)
    texts = [stream.push(token) for token in ids]
    if texts:
        texts[-1] += stream.finish()
    return texts


@dataclass(frozen=True)
class Piece:
    """Text as it comes, never half a character; with the last piece comes the whole completion.

    parts: the text of each token, and whether the target supplied it itself; the others were drafted and accepted.
    """

    parts: tuple[tuple[str, bool], ...]
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)

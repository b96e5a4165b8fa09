"""Drafters that follow a script, not their own mind: to find out what is the loop's fault and what the drafter's.

A scripted drafter still runs its model, and so costs what it costs, but what it drafts depends on row and position
alone. An oracle's drafts are all accepted: any that is not is a fault of cache, position or bookkeeping, and its speed
is the most that drafting can bring. An adversary's are all refused: no token may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from d3d_jax.decoding.state import Odds

SURE, UNSURE, OTHERS = 0.9, 0.1, 0.05  # the odds it gives to right drafts, to wrong ones, and to other candidates


@dataclass(frozen=True, eq=False)
class Script:
    """What to draft in each row at each position of prompt and output together.

    tokens: int32 [rows, positions]; a position past them is drafted as the last one. sure: bool, of the same shape,
    whether the drafter claims to be. num_token_ids: ids that the tokenizer knows.
    """

    tokens: np.ndarray
    sure: np.ndarray
    num_token_ids: int

    @classmethod
    def of_texts(
        cls,
        texts: Sequence[Sequence[int]],
        num_token_ids: int,
        wrong: Callable[[int], bool] = lambda position: False,
        slack: int = 64,
    ) -> Self:
        """Drafts the rows' own `texts` (prompt and output of each), but another token wherever `wrong(position)`.

        slack: positions past the longest text that drafts may reach: two blocks.
        """
        width = max(map(len, texts)) + slack
        right = np.zeros((len(texts), width), np.int32)
        for row, text in enumerate(texts):
            right[row, : len(text)] = text
        errs = np.broadcast_to([bool(wrong(position)) for position in range(width)], right.shape)
        return cls(np.where(errs, (right + 1) % num_token_ids, right), ~errs, num_token_ids)

    @classmethod
    def oracle(cls, texts: Sequence[Sequence[int]], num_token_ids: int) -> Self:
        """Never errs."""
        return cls.of_texts(texts, num_token_ids)

    @classmethod
    def adversary(cls, texts: Sequence[Sequence[int]], num_token_ids: int) -> Self:
        """Always errs."""
        return cls.of_texts(texts, num_token_ids, wrong=lambda position: True)

    def drafts(self, row_B: jax.Array, start_BR: jax.Array, size: int, candidates: int) -> tuple[jax.Array, Odds]:
        """Tokens int32 [B, R, G] of blocks of `size` that begin at `start`, and their odds."""
        position = jnp.minimum(start_BR[:, :, None] + jnp.arange(size), self.tokens.shape[1] - 1)
        tokens = jnp.asarray(self.tokens)[row_B[:, None, None], position]
        sure = jnp.where(jnp.asarray(self.sure)[row_B[:, None, None], position], SURE, UNSURE)
        others = (tokens[..., None] + 1 + jnp.arange(candidates, dtype=jnp.int32)) % self.num_token_ids
        return tokens, Odds(sure.astype(jnp.float32), others, jnp.full(others.shape, OTHERS, jnp.float32))

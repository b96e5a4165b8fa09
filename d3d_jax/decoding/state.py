"""What passes between target, drafter and host in a round, and what a request gets in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from d3d_jax.acceptance.metrics import Round
from d3d_jax.models.cache import KVCache


class Outcome(NamedTuple):
    """Result of verifying a block: 12 bytes a row, all that the drafter ever learns of the target.

    accepted: drafts accepted, 0..G-1, int32 [B]. bonus: the target's own next token, int32 [B].
    done: the row has reached a stop token or its budget, or is free; rounds leave it as it is, bool [B].
    """

    accepted: jax.Array
    bonus: jax.Array
    done: jax.Array

    @classmethod
    def of_free_rows(cls, batch: int) -> Outcome:
        nothing = jnp.zeros(batch, jnp.int32)
        return cls(nothing, nothing, jnp.ones(batch, bool))

    def with_row(self, slot: jax.Array, bonus: jax.Array, done: jax.Array) -> Outcome:
        """Of a row that has just been prefilled: its first token plays the bonus."""
        return Outcome(self.accepted.at[slot].set(0), self.bonus.at[slot].set(bonus), self.done.at[slot].set(done))


class Successors(NamedTuple):
    """What was drafted ahead, R blocks a row: tokens int32 [B, R, G], the outcome each is for, int32 [B, R] (-1: none),
    and whether its first token was given rather than drafted, bool [B, R].

    `tokens[:, r, o]` stands o positions after the bonus token of its outcome.
    """

    tokens: jax.Array
    outcome: jax.Array
    anchored: jax.Array


class Odds(NamedTuple):
    """What the drafter makes of its own drafts, arrays [B, G] of one block or [B, R, G] of many.

    confidence: its probability of each token, float32. candidates: the k next best tokens there, int32 [..., k], and
    their chances float32 [..., k]. All are 0 where nothing is chosen by them; k may be 0.
    """

    confidence: jax.Array
    candidates: jax.Array
    chances: jax.Array


class Stop(NamedTuple):
    """When a row ends: any of its `ids` int32 [B, E], or reaching its `limit` int32 [B], prompt + new tokens."""

    ids: jax.Array
    limit: jax.Array

    def ends(self, tokens_BT: jax.Array) -> jax.Array:
        """Which tokens end their row, bool [B, T]."""
        return jnp.any(tokens_BT[..., None] == self.ids[:, None, :], axis=-1)


class DraftState(NamedTuple):
    """What the drafter keeps: its cache, whose length is that of the last in-flight block's start, and the odds of
    the successors, arrays [B, R, G].
    """

    cache: KVCache
    odds: Odds


class PromptChunk(NamedTuple):
    """The next tokens of one row's prompt.

    tokens int32 [1, P], the first `count` of which count; slot: the row; first, last: whether the prompt begins or
    ends with them. All but `tokens` are scalars.
    """

    tokens: jax.Array
    count: jax.Array
    slot: jax.Array
    first: jax.Array
    last: jax.Array


@dataclass
class Progress:
    """What the host read of a row: new tokens with their log-probabilities, the rounds that gave them, and
    whether the row has ended.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    done: bool = False

    def own(self) -> list[bool]:
        """Which tokens the target supplied itself: each round's last, or, where nothing was drafted, all."""
        if not self.rounds:
            return [True] * len(self.tokens)
        return [last for verified in self.rounds for last in [False] * verified.accepted + [True]]


@dataclass(frozen=True)
class Completion:
    """What one prompt gave.

    ids: tokens after the prompt, the stop token included. finish_reason: `stop`, `length`, `cancelled` or `error`.
    rounds: the verifications, in order; a last one may reach past the end. The first token comes from
    prefill and belongs to no round. prefill_s, decode_s: wall-clock seconds to the first token, and from there.
    text: of the ids, cut before a stop text; None where the engine has no tokenizer. logprobs: of each id, under
    the target's unfiltered distribution at temperature 1; None unless asked for.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...] = field(default=())
    prefill_s: float = 0.0
    decode_s: float = 0.0
    text: str | None = None
    logprobs: tuple[float, ...] | None = None

    @property
    def drafted_rounds(self) -> int:
        """Rounds that had drafts to verify; in the others the target went alone."""
        return sum(verified.drafted for verified in self.rounds)

    @property
    def bonus_positions(self) -> tuple[int, ...]:
        """Indices into `ids` of tokens that the target itself supplied: the first, and each round's last."""
        places, at = [0], 0
        for verified in self.rounds:
            at += verified.accepted + 1
            places.append(at)
        return tuple(place for place in places if place < len(self.ids))

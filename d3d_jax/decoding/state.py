"""What passes between target, drafter and host in a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from d3d_jax.models.cache import KVCache


class Outcome(NamedTuple):
    """Result of verifying a block: 12 bytes a row, all that the drafter ever learns of the target.

    accepted: drafts accepted, 0..G-1, int32 [B]. bonus: the target's own next token, int32 [B].
    done: the row has reached a stop token or its budget; later rounds leave it as it is, bool [B].
    """

    accepted: jax.Array
    bonus: jax.Array
    done: jax.Array


class Successors(NamedTuple):
    """What was drafted for every outcome: tokens int32 [B, G, G], and which outcomes were drafted, bool [B, G].

    `tokens[:, a, o]` stands o positions after the bonus token of outcome a.
    """

    tokens: jax.Array
    drafted: jax.Array


class Stop(NamedTuple):
    """When rows end: any of `ids` int32 [E], or reaching `limit` int32 [B], prompt + new tokens."""

    ids: jax.Array
    limit: jax.Array


class DraftState(NamedTuple):
    """What the drafter keeps: its cache, whose length is that of the last in-flight block's start, and its
    confidence float32 [B, G, G] in each drafted token.
    """

    cache: KVCache
    confidence: jax.Array


@dataclass(frozen=True)
class Round:
    """One verification: drafts accepted, whether the bonus token had been foreseen, whether its tail was
    drafted again. `hit` is None where nothing was foreseen (synchronous drafting).
    """

    accepted: int
    hit: bool | None = None
    redrafted: bool = False


@dataclass(frozen=True)
class Decoded:
    """What a mode gives for a batch: tokens and rounds of each row, not yet cut at stop token or budget."""

    tokens: list[list[int]]
    rounds: list[tuple[Round, ...]]
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Completion:
    """What one prompt gave.

    ids: tokens after the prompt, the stop token included. finish_reason: `stop` or `length`.
    rounds: the verifications, in order; a last one may reach past the end. The first token comes from
    prefill and belongs to no round. prefill_s, decode_s: wall-clock seconds.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...] = field(default=())
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def bonus_positions(self) -> tuple[int, ...]:
        """Indices into `ids` of tokens that the target itself supplied: the first, and each round's last."""
        places, at = [0], 0
        for verified in self.rounds:
            at += verified.accepted + 1
            places.append(at)
        return tuple(place for place in places if place < len(self.ids))

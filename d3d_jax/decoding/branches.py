"""Which successors a packed pass drafts, and which of them the round's outcome picks (docs/algorithm.md 3).

A branch is one successor: a block for one outcome, whose first token, the bonus, is either left open to the drafter
(masked) or given (anchored on a candidate). Pure functions of device values; the number of branches is fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from d3d_jax.config import DecodeConfig
from d3d_jax.decoding.policies import Tactic, tactics
from d3d_jax.decoding.state import Odds, Outcome, Successors

NO_OUTCOME = -1


class Branches(NamedTuple):
    """What to draft: the outcome of each branch int32 [B, R], its first token int32 [B, R] (the mask id when open),
    and whether that was given, bool [B, R].
    """

    outcome: jax.Array
    first: jax.Array
    anchored: jax.Array


def num_masked(decode: DecodeConfig, tactic: Tactic) -> int:
    """Branches whose bonus is left open. With anchored ones alone there is still one, for the outcome in which all
    drafts are accepted: the token after it has no candidates yet.
    """
    if decode.bonus == "anchored":
        return 1
    return decode.block_size if tactic.outcomes == "all" else tactic.outcomes


def num_branches(decode: DecodeConfig, tactic: Tactic | None = None) -> int:
    """R, of a tactic or (None) the most that any has: as many as there can be, or as the budget of rows allows, each
    branch being a block of them.
    """
    if tactic is None:
        return max(num_branches(decode, each) for each in tactics(decode) if each.drafts_ahead)
    possible = num_masked(decode, tactic) + (decode.block_size - 1) * tactic.candidates
    return possible if decode.row_budget is None else min(possible, decode.row_budget // decode.block_size)


def choose_branches(odds: Odds, decode: DecodeConfig, tactic: Tactic, mask_token_id: int) -> Branches:
    """The branches of a tactic, for a block in flight whose drafts have these `odds` ([B, G] each)."""
    batch, size = odds.confidence.shape
    reached, stopped = outcome_odds(odds.confidence)
    if decode.bonus == "anchored":
        outcome = jnp.full((batch, 1), size - 1, jnp.int32)
    elif tactic.outcomes == "all":
        outcome = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    else:
        outcome = jax.lax.top_k(reached * stopped, tactic.outcomes)[1].astype(jnp.int32)
    masked = Branches(outcome, jnp.full_like(outcome, mask_token_id), jnp.zeros(outcome.shape, bool))
    count = num_branches(decode, tactic) - num_masked(decode, tactic)
    if count == 0:
        return masked
    # After outcome a the bonus stands where draft a+1 stood; `chances` already leave that draft itself out.
    joint = reached[:, : size - 1, None] * odds.chances[:, 1:, : tactic.candidates]
    picked = jax.lax.top_k(joint.reshape(batch, -1), count)[1]
    candidates = odds.candidates[:, 1:, : tactic.candidates].reshape(batch, -1)
    first = jnp.take_along_axis(candidates, picked, axis=1)
    anchored = Branches((picked // tactic.candidates).astype(jnp.int32), first, jnp.ones((batch, count), bool))
    return Branches(*(jnp.concatenate(pair, axis=1) for pair in zip(masked, anchored, strict=True)))


def outcome_odds(confidence_BG: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For a = 0..G-1: how likely the first a drafts are accepted, and how likely it ends there then; float32 [B, G].

    From the confidences `q`: `q_1 ... q_a` and `1 - q_{a+1}`, which is 1 after the last draft.
    """
    drafts = confidence_BG[:, 1:]
    one = jnp.ones_like(drafts[:, :1])
    return jnp.cumprod(jnp.concatenate([one, drafts], axis=1), axis=1), jnp.concatenate([1 - drafts, one], axis=1)


def pick(successors: Successors, outcome: Outcome) -> tuple[jax.Array, jax.Array]:
    """The branch that each row goes on with, int32 [B], -1 for none, and whether it foresaw the bonus token, bool [B].

    A branch that foresaw it comes first, best one that was anchored on it: its tail was drafted in the right context.
    Else one that left the bonus open, then one anchored on another token.
    """
    fits = successors.outcome == outcome.accepted[:, None]
    foreseen = fits & (successors.tokens[:, :, 0] == outcome.bonus[:, None])
    rank = jnp.where(foreseen, 3 + successors.anchored, jnp.where(fits, 2 - successors.anchored, 0))
    best = jnp.argmax(rank, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(fits, axis=1), best, -1), jnp.any(foreseen, axis=1)


def select(successors: Successors, outcome: Outcome) -> tuple[jax.Array, jax.Array]:
    """The next block `[bonus, S[r][1:]]`, int32 [B, G], and whether the bonus had been foreseen, bool [B].

    Without a branch for the outcome, the drafts are tokens 0.
    """
    branch, hit = pick(successors, outcome)
    return _of_branch(successors.tokens, branch).at[:, 0].set(outcome.bonus), hit


def selected_odds(odds: Odds, successors: Successors, outcome: Outcome) -> Odds:
    """The drafter's odds [B, ...] of the block that `select` gives, from those [B, R, ...] of all."""
    branch, _ = pick(successors, outcome)
    return jax.tree.map(lambda leaf: _of_branch(leaf, branch), odds)


def _of_branch(leaf: jax.Array, branch_B: jax.Array) -> jax.Array:
    """[B, ...] of a leaf [B, R, ...]; 0 where there is no branch."""
    picked = leaf[jnp.arange(branch_B.shape[0]), branch_B]
    return jnp.where(branch_B.reshape(-1, *[1] * (picked.ndim - 1)) < 0, jnp.zeros_like(picked), picked)

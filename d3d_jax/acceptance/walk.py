"""The rounds that decoding would have run over stored text, from blocks drafted everywhere (`acceptance.oracle`)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from d3d_jax.acceptance.metrics import Round, Sample
from d3d_jax.acceptance.oracle import Everywhere, Tail
from d3d_jax.config import DecodeConfig
from d3d_jax.errors import ConfigError

_UNDRAFTED = 0  # what stands in a block whose outcome was not drafted ahead


class _At(NamedTuple):
    """A `Tail` at one place."""

    accepted: int
    rejected: int
    rank: int


def samples(found: Everywhere, decode: DecodeConfig) -> list[Sample]:
    """What decoding with the settings of `decode` would have done with each response, in order of rows and documents.

    `found` must be on the host, and `decode.block_size` the drafter's. Where the text was sampled the same holds, as
    long as drafts are the likeliest tokens.

    Raises:
        ConfigError: for settings whose rounds depend on more than the text.
    """
    if decode.mode == "ar" or decode.draft_sampling != "argmax":
        raise ConfigError(
            f"mode {decode.mode!r} with draft_sampling {decode.draft_sampling!r} cannot be told from text alone; "
            "use mode 'sync' or 'async' with draft_sampling 'argmax'"
        )
    if decode.bonus != "masked" or "auto" in (decode.miss, decode.outcomes, decode.drafting):
        raise ConfigError(
            f"bonus {decode.bonus!r}, miss {decode.miss!r} and outcomes {decode.outcomes!r} cannot be told from blocks "
            "drafted everywhere; use bonus 'masked', and miss, outcomes and drafting without 'auto'"
        )
    walked = []
    for row, count in enumerate(np.asarray(found.count)):
        entries = jax.tree.map(lambda x, row=row, count=count: np.asarray(x[row, :count]), found._replace(count=None))
        edges = np.flatnonzero(np.diff(entries.document)) + 1
        for piece in np.split(np.arange(count), edges):
            if len(piece):
                one = jax.tree.map(lambda x, piece=piece: x[piece], entries)
                walked.append(Sample(tuple(_walk(one, decode)), len(piece)))
    return walked


def _walk(text: Everywhere, decode: DecodeConfig) -> list[Round]:
    """The rounds that lie wholly inside one response; entry 0 is the token that prefill gives."""
    rounds: list[Round] = []
    limit = decode.outcomes if isinstance(decode.outcomes, int) else decode.block_size
    at, rejected, drafted = 0, None, True
    while True:
        hit, redraft = None, False
        if decode.mode == "sync":
            tail = _at(text.anchored, at)
        else:
            banned = decode.ban_rejected and text.first[at] == rejected
            foreseen = (text.second if banned else text.first)[at]
            hit = bool(drafted and foreseen == text.token[at])
            redraft = decode.miss == "redraft" and not hit
            if drafted or redraft:
                tail = _at(text.anchored if redraft else text.masked, at)
            else:
                tail = _undrafted(text, at, decode.block_size)
        after = at + tail.accepted + 1
        if after >= len(text.token):
            return rounds
        rounds.append(Round(tail.accepted, hit, redraft))
        rejected = tail.rejected if tail.accepted < decode.block_size - 1 else None
        drafted = tail.rank < limit
        at = after


def _at(tail: Tail, at: int) -> _At:
    return _At(*(int(field[at]) for field in tail))


def _undrafted(text: Everywhere, at: int, block_size: int) -> _At:
    """A block that nobody drafted is verified all the same; the drafter has no confidence in it."""
    following = text.token[at + 1 : at + block_size]
    accepted = int(np.cumprod(following == _UNDRAFTED).sum())
    return _At(accepted, _UNDRAFTED, accepted)

"""A prompt cut into chunks of a few fixed sizes, each of which has programs of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from d3d_jax.decoding.state import PromptChunk

SIZES = (64, 128, 256, 512)  # the largest bounds how long a prompt can hold up the rows that are under way


def sizes_for(max_len: int) -> tuple[int, ...]:
    """Chunk sizes of a cache of `max_len` slots; one that is no multiple of them ends in a size of its own."""
    fitting = tuple(size for size in SIZES if size <= max_len)
    return fitting or (max_len,)


def plan(length: int, max_len: int) -> list[tuple[int, int]]:
    """The chunks of a prompt: how many of its tokens each takes, and its padded size.

    No chunk, its padding included, reaches past the cache, where a write would be clamped over valid slots.
    """
    sizes, start, chunks = sizes_for(max_len), 0, []
    while start < length:
        rest, room = length - start, max_len - start
        size = next((size for size in sizes if size >= rest), sizes[-1])
        if size > room:
            size = max((size for size in sizes if size <= room), default=room)
        chunks.append((min(rest, size), size))
        start += size
    return chunks


def chunks_of(prompt: Sequence[int], slot: int, max_len: int) -> Iterator[PromptChunk]:
    """The chunks of a prompt for a row, as numpy arrays."""
    start, planned = 0, plan(len(prompt), max_len)
    for number, (count, size) in enumerate(planned):
        tokens = np.zeros((1, size), np.int32)
        tokens[0, :count] = prompt[start : start + count]
        start += count
        first, last = np.bool_(number == 0), np.bool_(number == len(planned) - 1)
        yield PromptChunk(tokens, np.int32(count), np.int32(slot), first, last)  # pyright: ignore[reportArgumentType]


def one_of_each_size(lengths: Sequence[int] | None, longest: int, max_len: int) -> list[int]:
    """A few prompt lengths, none above `longest`, whose chunks have every size that those of `lengths` have, or any."""
    several = sizes_for(max_len) if lengths is None else lengths
    of_size = {size: min(n, longest) for n in several for _, size in plan(min(n, longest), max_len)}
    return sorted(set(of_size.values()))

"""Tile sizes and splits, as data. Computed from the compilers' schedules and the machines' ratios; none is measured."""

from __future__ import annotations

from typing import NamedTuple


class AttentionTiles(NamedTuple):
    """(queries, keys) of a tile in the forward pass and in the two kernels of the backward pass."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    least: int  # no tile is made smaller than this for a short row


class DecodeTiles(NamedTuple):
    """Rows are the queries of all heads that share a key head."""

    rows: int  # at most so many rows in a tile
    row_multiple: int  # a tile's rows are a multiple of this, or a power of two where it is 0
    keys: tuple[int, int]  # at most so many in a tile: beside few rows, and beside more than `few_rows`
    few_rows: int
    least_keys: int  # a short source gets the largest power of two that it fills, from here on; 0: just its own size
    cores: int  # programs that run at one time; 1: splitting the keys gains nothing


ATTENTION_TILES = {
    "mosaic_tpu": AttentionTiles((512, 512), (512, 512), 128),
    "triton": AttentionTiles((128, 64), (64, 64), 16),
}
DECODE_TILES = {
    # 64 rows x 1,024 keys takes about as long to compute as its keys and values take to arrive (v5e)
    "mosaic_tpu": DecodeTiles(512, 16, (1024, 512), 256, 0, 1),
    "triton": DecodeTiles(64, 0, (64, 64), 64, 16, 132),
    "mosaic_gpu": DecodeTiles(64, 64, (128, 128), 64, 128, 132),
}
# (warps, stages of the loads' pipeline) of the Triton kernels
TRITON_FORWARD, TRITON_BACKWARD, TRITON_DECODE = (8, 2), (8, 2), (4, 3)

# Mosaic GPU decode: key tiles in flight, and registers of a thread that multiplies and of one that loads
MOSAIC_GPU_STAGES, MOSAIC_GPU_REGISTERS = 2, (240, 40)

MAX_SPLITS = 32
USUAL_SHARE = 8  # a cache is taken to be filled to this part of its capacity when splits are chosen


def tile_for(size: int, tile: int, least: int) -> int:
    """The largest halving of `tile`, not below `least`, that pads `size` by less than an eighth."""
    while tile > least and -size % tile * 8 >= size:
        tile //= 2
    return max(tile, least)


def even_tile(size: int, most: int, multiple: int) -> int:
    """A tile of at most `most` that cuts `size` into parts as equal as `multiple` allows."""
    if multiple == 0:
        return min(most, max(16, 1 << (size - 1).bit_length()))
    parts = -(-size // most)
    share = -(-size // parts)
    return min(most, -(-share // multiple) * multiple)


def key_tile(table: DecodeTiles, row_tile: int, num_keys: int) -> int:
    """Keys of a decode tile, over a source of `num_keys`."""
    most = table.keys[row_tile > table.few_rows]
    if num_keys >= most:
        return most
    return max(table.least_keys, 1 << num_keys.bit_length() - 1) if table.least_keys else num_keys


def splits_for(programs: int, num_tiles: int, cores: int) -> int:
    """In how many parts to cut the keys, for the least time until the last part is done, in units of a key tile.

    Each part pays one unit more: it writes its result in float32 and the merge reads it.
    """
    tiles = num_tiles / USUAL_SHARE

    def time(splits: int) -> float:
        return -(-programs * splits // cores) * (tiles / splits + 1)

    return min(range(1, max(1, min(MAX_SPLITS, num_tiles)) + 1), key=time)

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
    key_multiple: int  # a tile that holds all keys has exactly their number (1), or this multiple or power of two (0)
    cores: int  # programs that run at one time; 1: splitting the keys gains nothing


ATTENTION_TILES = {
    "mosaic_tpu": AttentionTiles((512, 512), (512, 512), 128),
}
DECODE_TILES = {
    # 64 rows x 1,024 keys takes about as long to compute as its keys and values take to arrive (v5e)
    "mosaic_tpu": DecodeTiles(512, 16, (1024, 512), 256, 1, 1),
}
MAX_SPLITS = 32  # partial results are written in float32 and read again: more of them cost more than idle cores do


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
    return most if num_keys > most else even_tile(num_keys, most, table.key_multiple)


def splits_for(programs: int, num_tiles: int, cores: int) -> int:
    """In how many parts to cut the keys: least `ceil(programs * s / cores) / s`, the time until the last is done."""
    most = max(1, min(MAX_SPLITS, num_tiles))
    return min(range(1, most + 1), key=lambda s: (-(-programs * s // cores) / s, s))

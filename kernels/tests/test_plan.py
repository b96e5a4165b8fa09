"""Tile plans against the dense mask: nothing visible is left out, and what is called full is full."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_kernels import Intervals, dense_mask, training_intervals
from d3d_kernels.plan import Tiles, in_phases, key_tiles, query_tiles, split, within
from d3d_kernels.rows import pack, pack_intervals, unpack
from d3d_kernels.tuning import ATTENTION_TILES, DECODE_TILES, even_tile, key_tile, splits_for, tile_for

BATCH = 2


def random_intervals(seed: int, num_queries: int, num_keys: int) -> Intervals:
    """Bounds of every kind: long, short, empty, the wrong way round, before 0 and past the end."""
    rng = np.random.default_rng(seed)
    bounds = rng.integers(-5, num_keys + 6, (4, BATCH, num_queries))
    smooth = np.sort(bounds, axis=2)  # neighbouring queries that see much the same
    if seed % 4 == 1:  # wide ones, so that full tiles occur
        smooth[0], smooth[1] = (
            rng.integers(-5, 6, smooth[0].shape),
            rng.integers(num_keys // 2, num_keys + 6, smooth[1].shape),
        )
    return Intervals(*jnp.asarray(np.where(seed % 2, smooth, bounds), jnp.int32))


def listed(tiles: Tiles) -> list[list[list[tuple[int, bool]]]]:
    """(tile, full) of every list, as Python values."""
    count, entry = np.asarray(tiles.count), np.asarray(tiles.entry)
    return [
        [[(e >> 1, bool(e & 1)) for e in row[:n]] for n, row in zip(counts, rows, strict=True)]
        for counts, rows in zip(count, entry, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def plans(intervals: Intervals, num_keys: int, query_tile: int, key_tile: int) -> tuple[Tiles, Tiles, jax.Array]:
    """Key tiles of query tiles, query tiles of key tiles, and the dense mask."""
    by_query = key_tiles(within(intervals, num_keys), [(num_keys, key_tile)], query_tile)
    return by_query, query_tiles(intervals, num_keys, query_tile, key_tile), dense_mask(intervals, num_keys)


@pytest.mark.parametrize(("query_tile", "key_tile", "num_queries", "num_keys"), [(4, 8, 24, 61), (1, 2, 5, 16)])
def test_a_plan_covers_every_visible_key_and_full_means_full(query_tile, key_tile, num_queries, num_keys):
    seen_full = 0
    for seed in range(12):
        by_query, by_key, mask = plans(random_intervals(seed, num_queries, num_keys), num_keys, query_tile, key_tile)
        plan, transposed, mask = listed(by_query), listed(by_key), np.asarray(mask)
        for b, i, j in np.ndindex(BATCH, num_queries // query_tile, -(-num_keys // key_tile)):
            tile = mask[b, i * query_tile : (i + 1) * query_tile, j * key_tile : (j + 1) * key_tile]
            full = dict(plan[b][i]).get(j)
            assert full is not None or not tile.any()
            if full:
                assert tile.all() and tile.shape[1] == key_tile
                seen_full += 1
            assert dict(transposed[b][j]).get(i) == full
    assert seen_full > 10


def test_a_causal_plan_is_a_triangle_whose_inside_is_full():
    end = jnp.arange(1, 33)[None]
    plan, _, _ = plans(Intervals(end * 0, end, end * 0, end * 0), 32, 8, 8)
    assert listed(plan)[0] == [[(j, j < i) for j in range(i + 1)] for i in range(4)]
    assert np.asarray(plan.entry)[0, 1].tolist() == [1, 2, 2, 2]  # the tail repeats the last entry


def test_masked_blocks_touch_their_context_and_themselves():
    @jax.jit
    def plan(document, start):
        return key_tiles(training_intervals(document, start, 16), [(96, 16)], 16)

    found = listed(plan(jnp.zeros((1, 64), jnp.int32), jnp.asarray([[3, 40]])))[0]
    assert found[4:] == [[(0, False), (4, True)], [(0, True), (1, True), (2, False), (5, True)]]


def test_sources_are_numbered_through_and_a_source_that_ends_inside_a_tile_has_no_full_tile_there():
    row = jnp.asarray([[0, 0]])
    intervals = Intervals(row, row + 20, row + 20, row + 26)  # a cache of 20 in tiles of 8, then 6 keys in tiles of 4
    plan = jax.jit(lambda intervals: key_tiles(within(intervals, 26), [(20, 8), (6, 4)], 2))(intervals)
    assert listed(plan)[0] == [[(0, True), (1, True), (2, False), (3, True), (4, False)]]


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
def test_splits_share_a_list_and_lose_nothing(num_splits):
    intervals = random_intervals(3, 8, 60)
    plan, _, _ = plans(intervals, 60, 4, 4)
    parts = jax.jit(split, static_argnums=1)(plan, num_splits)
    assert parts.entry.shape == (BATCH, 2 * num_splits, -(-15 // num_splits))
    for whole, row in zip(listed(plan), listed(parts), strict=True):
        for i, entries in enumerate(whole):
            own = row[i * num_splits : (i + 1) * num_splits]
            assert [entry for part in own for entry in part] == entries
            assert max(map(len, own)) <= -(-len(entries) // num_splits)


def test_phases_reorder_a_list_and_lose_nothing():
    intervals = random_intervals(1, 8, 60)
    plan, _, _ = plans(intervals, 60, 4, 4)
    phases = jax.jit(in_phases, static_argnums=1)(plan, 10)
    for entries, ends, row in zip(
        [row for batch in listed(plan) for row in batch],
        np.asarray(phases.count).reshape(-1, 3).tolist(),
        np.asarray(phases.entry).reshape(4, -1).tolist(),
        strict=True,
    ):
        kinds = [[], [], []]
        for tile, full in entries:
            kinds[2 if tile >= 10 else int(full)].append(2 * tile + full)
        assert ends == np.cumsum([len(kind) for kind in kinds]).tolist()
        assert row[: ends[2]] == [*kinds[0], *kinds[1], *kinds[2]]


def test_new_bounds_compile_nothing_again():
    traced = []

    @jax.jit
    def plan(intervals):
        traced.append(1)
        return key_tiles(within(intervals, 32), [(32, 8)], 8)

    for seed in range(3):
        plan(random_intervals(seed, 16, 32))
    assert len(traced) == 1


def test_rows_of_a_key_head_keep_neighbouring_queries_together():
    q = jnp.arange(2 * 6 * 5 * 3).reshape(2, 6, 5, 3)
    rows = pack(q, 2, 8)
    assert rows.shape == (2, 2, 16, 3)
    assert np.array_equal(rows[1, 1, 2 * 3 + 1], q[1, 1 * 3 + 1, 2])
    assert np.array_equal(unpack(rows, 6, 5), q) and not np.asarray(rows[:, :, 15:]).any()
    bounds = pack_intervals(Intervals(*[jnp.arange(5)[None]] * 4), 3, 8)
    assert bounds.lo1.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4]]


def test_tiles_fit_short_rows_and_waste_little():
    assert [tile_for(size, 512, 128) for size in (8192, 608, 130, 40)] == [512, 128, 128, 128]
    assert [even_tile(rows, 512, 16) for rows in (64, 100, 1088)] == [64, 112, 368]
    assert [even_tile(rows, 64, 0) for rows in (1, 20, 300)] == [16, 32, 64]
    table = DECODE_TILES["mosaic_tpu"]
    found = [key_tile(table, *case) for case in ((64, 32768), (64, 600), (368, 32768), (64, 17))]
    assert found == [1024, 600, 512, 17]
    assert [key_tile(DECODE_TILES["triton"], 64, size) for size in (5, 40, 900)] == [16, 32, 64]
    for table in ATTENTION_TILES.values():
        assert all(size % table.least == 0 for shape in (table.forward, table.backward) for size in shape)


def test_splits_fill_the_device_and_stop_at_the_tiles():
    assert splits_for(8, 256, 132) == 16  # 8 heads, one sequence
    assert splits_for(132, 256, 132) == 1 and splits_for(8, 4, 132) == 4 and splits_for(1, 1000, 1) == 1

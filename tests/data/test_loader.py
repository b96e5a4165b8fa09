import threading

import numpy as np
import pytest

from d3d_jax.data.loader import Batches, BlockArguments
from d3d_jax.data.packing import pack
from d3d_jax.errors import DataError

BLOCKS = BlockArguments(block_size=8, num_blocks=20)


@pytest.fixture
def rows(documents):
    return pack(documents, 64, seed=0)[0]


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def test_an_epoch_visits_every_row_once_and_the_next_in_another_order(rows):
    rows = rows[:16]
    batches = Batches(rows, 4, seed=3)
    assert batches.steps_per_epoch == 4
    epochs = [np.concatenate([batch["tokens"] for batch in take(batches, 4)]) for _ in range(2)]
    whole = sorted(rows.tokens.tolist())
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist()) == whole
    assert not np.array_equal(epochs[0], epochs[1])


def test_rows_that_do_not_fill_a_batch_are_left_out_of_the_epoch(rows):
    batches = Batches(rows[:11], 4, seed=0)
    assert batches.steps_per_epoch == 2
    assert all(batch["tokens"].shape == (4, 64) for batch in take(batches, 5))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("step", [0, 1, 3, 4, 5, 8])
def test_resuming_gives_the_exact_next_batches_also_at_the_end_of_an_epoch(rows, prefetch, step):
    with Batches(rows[:16], 4, 5, blocks=BLOCKS, prefetch=prefetch) as first:
        take(first, step)
        state = first.state()
        wanted = take(first, 5)
    assert state == step and type(state) is int
    with Batches(rows[:16], 4, 5, blocks=BLOCKS, prefetch=prefetch) as second:
        take(second, 2)
        second.restore(state)
        assert second.state() == step
        assert all(map(same, take(second, 5), wanted))


def test_batches_follow_their_seed(rows):
    first, again, other = (take(Batches(rows, 4, seed, blocks=BLOCKS), 3) for seed in (1, 1, 2))
    assert all(map(same, first, again))
    assert not any(map(same, first, other))


def test_the_same_rows_get_other_blocks_in_another_step(rows):
    batches = Batches(rows[:4], 4, seed=0, blocks=BLOCKS)
    plans = []
    for batch in take(batches, 2):
        order = np.lexsort(batch["tokens"].T)
        plans.append(batch["block_start"][order])
    assert not np.array_equal(*plans)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_hold_disjoint_parts_of_one_and_the_same_global_batch(rows, count):
    whole = Batches(rows, 4, seed=2, blocks=BLOCKS)
    parts = [Batches(rows, 4, 2, index, count, BLOCKS) for index in range(count)]
    for _ in range(5):
        batch = next(whole)
        pieces = [next(part) for part in parts]
        assert all(len(piece["tokens"]) == 4 // count for piece in pieces)
        assert same(batch, {key: np.concatenate([piece[key] for piece in pieces]) for key in batch})


def test_block_arrays_come_only_with_block_arguments(rows):
    assert "block_start" not in next(Batches(rows, 4, seed=0))
    batch = next(Batches(rows, 4, seed=0, blocks=BLOCKS))
    for key in ("block_start", "block_visible", "block_length"):
        assert batch[key].shape == (4, 20) and batch[key].dtype == np.int32
    row, place = np.nonzero(batch["block_start"] >= 0)
    assert batch["response"][row, batch["block_start"][row, place]].all()


def test_prefetching_changes_nothing_and_its_thread_ends(rows):
    before = threading.active_count()
    with Batches(rows, 4, 0, blocks=BLOCKS, prefetch=True) as ahead:
        assert all(map(same, take(ahead, 9), take(Batches(rows, 4, 0, blocks=BLOCKS), 9)))
    assert threading.active_count() == before
    ahead.close()
    assert same(next(ahead), Batches(rows, 4, 0, blocks=BLOCKS).at(9))


def test_an_error_of_the_background_thread_reaches_the_caller(rows):
    with (
        Batches(rows, 4, 0, blocks=BlockArguments(8, 20, "random"), prefetch=True) as batches,
        pytest.raises(DataError, match="'random'"),
    ):
        next(batches)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 6, "process_count": 4}, "batch_size 6 does not divide by 4 processes; use 4"),
        ({"batch_size": 1000}, "rows, batch_size 1000"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 4, "process_index": 2, "process_count": 2}, "process 2 of 2"),
        ({"batch_size": 4, "seed": -1}, "seed is -1"),
    ],
)
def test_a_batch_that_cannot_be_made_is_refused(rows, arguments, words):
    with pytest.raises(DataError, match=words):
        Batches(rows, **{"seed": 0, **arguments})


@pytest.mark.parametrize("state", [-1, 1.5, None, True])
def test_a_state_that_is_no_step_is_refused(rows, state):
    with pytest.raises(DataError, match="expected a step"):
        Batches(rows, 4, seed=0).restore(state)

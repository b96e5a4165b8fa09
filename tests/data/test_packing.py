import time

import numpy as np
import pytest

from d3d_jax.data.packing import Document, block_starts, max_blocks, pack
from d3d_jax.errors import DataError


def doc(prompt: int, response: int) -> Document:
    return Document(np.arange(1, prompt + response + 1, dtype=np.int32), prompt)


def unpacked(rows):
    """(ids, prompt_length) of every document, read back from the rows."""
    for row in range(len(rows)):
        for index in range(rows.document[row].max() + 1):
            slots = np.flatnonzero(rows.document[row] == index)
            yield tuple(rows.tokens[row, slots].tolist()), int((~rows.response[row, slots]).sum())


def blocks(rows, plan):
    """(row, start, visible, length) of every block, as ints."""
    for row, place in np.argwhere(plan.start >= 0):
        yield tuple(int(x) for x in (row, plan.start[row, place], plan.visible[row, place], plan.length[row, place]))


def test_every_document_comes_back_whole(documents):
    rows, report = pack(documents, 64, seed=0)
    assert report.documents == 60 and report.dropped_long == report.skipped_empty == 0
    assert sorted(unpacked(rows)) == sorted((tuple(d.ids.tolist()), d.prompt_length) for d in documents)


def test_documents_lie_side_by_side_and_each_counts_its_own_positions(documents):
    rows, _ = pack(documents, 64, seed=0)
    slot = np.arange(64)
    real = rows.document >= 0
    assert np.array_equal(np.where(real, rows.position, 0), np.where(real, slot - rows.start, 0))
    assert (rows.document[:, 1:][real[:, 1:]] - rows.document[:, :-1][real[:, 1:]] >= 0).all()
    assert (np.diff(real.astype(int), axis=1) <= 0).all(), "padding only behind the documents"
    assert np.array_equal(rows.response, real & (slot >= rows.response_start))
    pad = ~real
    assert (rows.tokens[pad] == 0).all() and (rows.response_start[pad] == -1).all() and not rows.response[pad].any()
    assert np.array_equal(rows.start[pad], np.broadcast_to(slot, rows.start.shape)[pad])
    assert {name: array.dtype.name for name, array in rows.arrays().items()} == {
        **dict.fromkeys(["tokens", "document", "start", "position", "response_start"], "int32"),
        "response": "bool",
    }


def test_the_report_adds_up_and_nothing_is_cut(documents):
    odd = [doc(60, 5), doc(3, 0), doc(0, 64), doc(63, 1)]
    rows, report = pack([*documents, *odd], 64, seed=0)
    assert (report.documents, report.dropped_long, report.skipped_empty) == (62, 1, 1)
    assert report.rows == len(rows) == rows.tokens.shape[0]
    assert report.tokens == (rows.document >= 0).sum()
    kept = [*documents, *odd[2:]]
    assert report.response_tokens == rows.response.sum() == sum(len(d.ids) - d.prompt_length for d in kept)
    assert report.fill == report.tokens / (len(rows) * 64) > 0.9


def test_packing_follows_its_seed(documents):
    first, again, other = (pack(documents, 64, seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first.tokens, again.tokens)
    assert first.tokens.shape == other.tokens.shape and not np.array_equal(first.tokens, other.tokens)


def test_documents_that_cannot_be_packed_are_refused_by_reason():
    with pytest.raises(DataError, match=r"none of 2 documents.*1 are longer than row_length 8, 1 have no response"):
        pack([doc(4, 5), doc(4, 0)], 8, seed=0)
    with pytest.raises(DataError, match=r"document 0: prompt_length is 5; expected 0\.\.4"):
        pack([Document(np.zeros(4, np.int32), 5)], 8, seed=0)
    with pytest.raises(DataError, match="document 0: ids are float64"):
        pack([Document(np.zeros(4), 1)], 8, seed=0)
    with pytest.raises(DataError, match="row_length is 0"):
        pack([doc(1, 1)], 0, seed=0)


@pytest.mark.parametrize("starts", ["partition", "anchors"])
@pytest.mark.parametrize("num_blocks", [6, 40])
def test_blocks_start_in_responses_and_no_label_crosses_into_another_document(documents, starts, num_blocks):
    rows, _ = pack(documents, 64, seed=0)
    plan = block_starts(rows, 8, num_blocks, np.random.default_rng(0), starts)
    assert plan.start.shape == plan.visible.shape == plan.length.shape == (len(rows), num_blocks)
    found = list(blocks(rows, plan))
    assert len({(row, start) for row, start, _, _ in found}) == len(found) > len(rows)
    for row, start, visible, length in found:
        assert rows.response[row, start]
        assert 0 <= visible < length <= 8
        inside = rows.document[row, start : start + length]
        assert len(inside) == length and (inside == inside[0]).all()
        behind = start + length
        ends = behind == 64 or rows.document[row, behind] != inside[0]
        assert length == 8 or ends
    unused = plan.start < 0
    assert (plan.length[unused] == 0).all() and (plan.visible[unused] == 0).all()
    ordered = np.where(unused, 10**6, plan.start)
    assert (np.diff(ordered, axis=1) >= 0).all(), "ordered by start, unused places last"


def test_a_partition_starts_at_every_first_response_token_and_covers_the_rest_once(documents):
    rows, _ = pack(documents, 64, seed=0)
    plan = block_starts(rows, 8, max_blocks(rows, 8), np.random.default_rng(3))
    assert plan.dropped == 0
    found = set((row, start) for row, start, _, _ in blocks(rows, plan))
    first = {(row, rows.response_start[row, slot]) for row, slot in np.argwhere(rows.response)}
    assert first <= found
    for row, begin in first:
        index = rows.document[row, begin]
        later = sorted(s for r, s in found if r == row and s > begin and rows.document[row, s] == index)
        assert (np.diff(later) == 8).all()
        assert not later or later[0] - begin <= 8
        end = int(np.flatnonzero(rows.document[row] == index)[-1]) + 1
        assert end - (later[-1] if later else begin) <= 8, "the last block reaches the end"


def test_the_phase_of_a_partition_is_uniform():
    rows, _ = pack([doc(3, 40)] * 2000, 43, seed=0)
    plan = block_starts(rows, 8, max_blocks(rows, 8), np.random.default_rng(0))
    second = np.bincount(plan.start[:, 1] - 3, minlength=9)
    assert second[0] == 0 and second[1:].min() > 190 and second[1:].sum() == 2000


def test_max_blocks_is_reached_and_never_passed():
    for response in range(1, 40):
        rows, _ = pack([doc(2, response)] * 40, response + 2, seed=0)
        most = max_blocks(rows, 8)
        plan = block_starts(rows, 8, most + 3, np.random.default_rng(0))
        assert (plan.start >= 0).sum(axis=1).max() == most


def test_a_row_with_too_few_places_keeps_first_response_tokens_and_counts_the_rest(documents):
    rows, _ = pack(documents, 64, seed=0)
    whole = block_starts(rows, 8, 40, np.random.default_rng(0))
    plan = block_starts(rows, 8, 6, np.random.default_rng(0))
    assert plan.dropped == (whole.start >= 0).sum() - (plan.start >= 0).sum() > 0
    for row in range(len(rows)):
        first = set(rows.response_start[row][rows.response[row]].tolist())
        assert len(first) > 6 or first <= set(plan.start[row].tolist())


@pytest.mark.parametrize("starts", ["partition", "anchors"])
def test_a_response_shorter_than_a_block_still_has_one_at_its_first_token(starts):
    # Supervision only in the last G-1 tokens; a single token; exactly one block.
    rows, _ = pack([doc(20, 7), doc(5, 1), doc(9, 8)], 64, seed=0)
    plan = block_starts(rows, 8, 12, np.random.default_rng(0), starts)
    first = set(rows.response_start[0][rows.response[0]].tolist())
    assert len(first) == 3 and first <= set(plan.start[0].tolist())
    single = [b for b in blocks(rows, plan) if b[3] == 1]
    assert all(visible == 0 for _, _, visible, _ in single)


def test_anchors_are_shared_by_response_length_and_starve_no_document():
    rows, _ = pack([doc(5, 200), doc(5, 40), doc(5, 5)], 300, seed=0)
    counts = np.zeros(3)
    for seed in range(20):
        plan = block_starts(rows, 8, 49, np.random.default_rng(seed), "anchors")
        assert (plan.start >= 0).all()
        counts += np.bincount(rows.document[0, plan.start[0]], minlength=3)
    assert (counts / 20).tolist() == [39, 8, 2]
    tight = block_starts(rows, 8, 3, np.random.default_rng(0), "anchors")
    assert sorted(rows.document[0, tight.start[0]].tolist()) == [0, 1, 2]
    assert block_starts(rows, 8, 2, np.random.default_rng(0), "anchors").dropped == 1
    assert (block_starts(rows, 8, 260, np.random.default_rng(0), "anchors").start >= 0).sum() == 245


def test_anchors_reach_every_response_token():
    rows, _ = pack([doc(5, 50), doc(5, 20)], 90, seed=0)
    seen = np.zeros(90, int)
    for seed in range(200):
        plan = block_starts(rows, 8, 14, np.random.default_rng(seed), "anchors")
        seen[plan.start[0]] += 1
    assert (seen[rows.response[0]] > 15).all() and seen[~rows.response[0]].sum() == 0


def test_visible_prefixes_follow_their_probabilities():
    rows, _ = pack([doc(2, 400)] * 60, 402, seed=0)
    plan = block_starts(rows, 8, 60, np.random.default_rng(0))
    visible = plan.visible[plan.length == 8]
    share = np.bincount(visible, minlength=8) / len(visible)
    assert share[:3] == pytest.approx([0.7, 0.2, 0.09], abs=0.03)
    assert share[2:].sum() == pytest.approx(0.1, abs=0.02)
    flat = block_starts(rows, 8, 60, np.random.default_rng(0), visible_probabilities=(0.0, 0.0), geometric=0.1)
    assert set(flat.visible[flat.length == 8].tolist()) == {2, 3, 4, 5, 6, 7}
    none = block_starts(rows, 8, 60, np.random.default_rng(0), visible_probabilities=(1.0, 0.0))
    assert none.visible.max() == 0


def test_a_block_plan_with_senseless_arguments_is_refused(documents):
    rows, _ = pack(documents, 64, seed=0)
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="'random'; expected one of partition, anchors"):
        block_starts(rows, 8, 8, rng, "random")
    with pytest.raises(DataError, match="block_size 1"):
        block_starts(rows, 1, 8, rng)
    with pytest.raises(DataError, match="visible_probabilities"):
        block_starts(rows, 8, 8, rng, visible_probabilities=(0.9, 0.2))


def test_a_plan_for_a_batch_takes_a_few_milliseconds():
    rng = np.random.default_rng(0)
    rows, _ = pack([doc(int(p), int(n)) for p, n in rng.integers(5, 60, (400, 2))], 512, seed=0)
    rows = rows[:16]
    for starts in ("partition", "anchors"):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            block_starts(rows, 8, 64, rng, starts)
            times.append(time.perf_counter() - began)
        assert min(times) < 0.015  # about 1 ms on an idle core

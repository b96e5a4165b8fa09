"""Uniform noise: what of a block is masked, what its loss counts; held-out blocks stay as drafting has them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from d3d_jax.data.loader import Batches, BlockArguments
from d3d_jax.data.packing import Document, pack
from d3d_jax.training import loss as losses
from d3d_jax.training.loop import train
from d3d_jax.training.loss import d3d_inputs
from d3d_jax.training.plan import plan_run
from tests.training.toy import BLOCKS, MASK

SIZE, GAMMA = 8, 4.0
UNIFORM = BlockArguments(SIZE, 40, noise="uniform")


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(0, MASK, 200).astype(np.int32), 20) for _ in range(64)]
    return pack(documents, 256, 0)[0]


def test_a_share_of_each_block_is_masked_and_the_shares_are_uniform(rows):
    batch = Batches(rows, 64, 0, blocks=UNIFORM).at(3)
    rate, masked = batch["block_rate"], batch["block_masked"]
    assert rate.shape == (64, 40) and masked.shape == (64, 40, SIZE)
    assert rate.min() == np.float32(1 / SIZE) and rate.max() <= 1
    assert np.mean(rate > 0.5) == pytest.approx(0.5, abs=0.03)
    for low in (0.2, 0.5, 0.8):
        near = (rate > low - 0.05) & (rate < low + 0.05)
        assert masked[near].mean() == pytest.approx(low, abs=0.04)


def test_noise_is_a_function_of_seed_and_step_and_is_dealt_out_with_its_rows(rows):
    whole = Batches(rows, 64, 0, blocks=UNIFORM)
    parts = [Batches(rows, 64, 0, index, 2, blocks=UNIFORM).at(3) for index in range(2)]
    for name, array in whole.at(3).items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), array), name
    assert not np.array_equal(whole.at(3)["block_masked"], whole.at(4)["block_masked"])
    plain = Batches(rows, 64, 0, blocks=dataclasses.replace(UNIFORM, noise="full")).at(3)
    assert all(np.array_equal(array, whole.at(3)[name]) for name, array in plain.items())
    assert not {"block_rate", "block_masked"} & set(plain)


def test_tokens_that_are_not_masked_show_and_the_others_count_by_the_inverse_of_their_share(rows):
    batch = Batches(rows, 64, 0, blocks=UNIFORM).at(0)
    inputs = {name: np.asarray(array) for name, array in d3d_inputs(batch, SIZE, MASK).items()}
    plain = {name: array for name, array in batch.items() if name not in ("block_rate", "block_masked")}
    full = {name: np.asarray(array) for name, array in d3d_inputs(plain, SIZE, MASK).items()}
    shown = ~batch["block_masked"] | (full["tokens"] != MASK)
    assert np.array_equal(inputs["tokens"], np.where(shown, full["labels"], MASK))
    assert np.array_equal(inputs["supervised"], full["supervised"] & batch["block_masked"])
    weights = np.asarray(losses._block_weights(inputs, GAMMA))
    expected = np.asarray(losses._block_weights(full, GAMMA)) * batch["block_masked"] / batch["block_rate"][..., None]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    # In expectation it is the loss of full noise: every position counts as often as it would there.
    assert weights.sum() == pytest.approx(np.asarray(losses._block_weights(full, GAMMA)).sum(), rel=0.05)


def test_a_run_with_uniform_noise_learns_and_is_validated_without(config, corpus):
    run = config(
        steps=30, batch_size=16, save_every=30, log_every=10, validation_data=str(corpus), validate_every=15,
        blocks=dataclasses.replace(BLOCKS, noise="uniform"), acceptance_every=None,
    )  # fmt: skip
    plan = plan_run(run)
    assert plan.validation is not None
    assert "block_masked" in plan.train.at(0) and "block_masked" not in plan.validation.at(0)
    last = train(run, jax.devices()[:1])
    assert last["loss"] < 4.0 and last["accuracy_3"] > 0.8  # log 24 = 3.2, twice

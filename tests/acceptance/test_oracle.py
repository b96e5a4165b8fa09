"""Acceptance without the target is that of decoding, round for round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from d3d_jax.acceptance import oracle as oracles
from d3d_jax.acceptance.metrics import Sample
from d3d_jax.acceptance.oracle import Everywhere, draft_everywhere
from d3d_jax.acceptance.walk import samples
from d3d_jax.config import AttentionConfig, DecodeConfig, DrafterConfig, MeshConfig, SamplingParams
from d3d_jax.data.packing import Document, PackedRows, pack
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.devices.sharding import BATCH, on_mesh, replicated, tree_shardings
from d3d_jax.errors import ConfigError
from d3d_jax.models.qwen3 import parameter_table
from tests.decoding.conftest import CONFIG, GREEDY, MASK, PROMPTS, SAMPLED, TOKEN_IDS, random_model, run, shared

BLOCK, NEW, ROW = 4, 40, 96
POLICIES = {
    "sync": DecodeConfig(mode="sync", block_size=BLOCK),
    "redraft": DecodeConfig(block_size=BLOCK),
    "keep": DecodeConfig(block_size=BLOCK, miss="keep"),
    "keep, nothing banned": DecodeConfig(block_size=BLOCK, miss="keep", ban_rejected=False),
    "two outcomes": DecodeConfig(block_size=BLOCK, outcomes=2),
    "one outcome, kept": DecodeConfig(block_size=BLOCK, outcomes=1, miss="keep"),
}


def documents(sampling: SamplingParams = GREEDY, decode: DecodeConfig = POLICIES["sync"]) -> list[Document]:
    """PROMPTS with what the target says after them, of three lengths."""
    outputs = [run(shared(0, decode), [prompt], NEW - 9 * i, (), sampling)[0] for i, prompt in enumerate(PROMPTS)]
    return [Document(np.array([*one.prompt_ids, *one.ids], np.int32), len(one.prompt_ids)) for one in outputs]


def alike(rows: PackedRows) -> dict[str, np.ndarray]:
    return {name: array for name, array in rows.arrays().items() if name != "response_start"}


def fresh(kind: str = "bidirectional", layers: int = 2) -> Any:
    """A function of its own: programs are kept by function, and tests change what one is traced with."""
    model, drafter = dataclasses.replace(CONFIG, num_hidden_layers=layers), DrafterConfig(BLOCK, MASK, kind)
    return lambda *args, **gates: draft_everywhere(*args, model, drafter, TOKEN_IDS, **gates)


@cache
def oracle() -> Any:
    return jax.jit(fresh())


def in_order(rows: PackedRows, found: list[Sample], texts: Sequence[Document]) -> list[Sample]:
    """The samples of `texts` in their order; packing has one of its own."""
    keys = []
    for row in range(len(rows)):
        for number in range(rows.document[row].max() + 1):
            keys.append(tuple(rows.tokens[row][rows.document[row] == number].tolist()))
    return [found[keys.index(tuple(text.ids.tolist()))] for text in texts]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_trace_is_that_of_decoding_round_for_round(name, sampling):
    decode = POLICIES[name]
    texts = documents(sampling)
    rows, _ = pack(texts, ROW, 0)
    assert rows.document.max() == 1, "two responses share a row"
    found = samples(jax.device_get(oracle()(random_model(CONFIG, 0).params, alike(rows))), decode)
    told = in_order(rows, found, texts)
    for text, sample in zip(texts, told, strict=True):
        prompt, response = text.ids[: text.prompt_length].tolist(), text.ids[text.prompt_length :].tolist()
        real = run(shared(0, decode), [prompt], len(response), (), sampling)[0]
        assert list(real.ids) == response
        assert sample.num_tokens == len(response)
        assert sample.rounds == Sample(real.rounds, len(real.ids)).whole_rounds()
    rounds = [one for sample in told for one in sample.rounds]
    assert {one.accepted for one in rounds} >= {0, 1} and len(rounds) > 20, "nothing much to compare"
    assert decode.mode == "sync" or {one.hit for one in rounds} == {True, False}


@pytest.fixture(scope="module")
def packed() -> tuple[dict[str, np.ndarray], Everywhere]:
    """Four rows, so that they can be dealt out, and what a drafter of other weights than the target's makes of them."""
    rows = alike(pack(documents(), ROW, 0)[0])
    rows = {name: np.concatenate([array, array[::-1]]) for name, array in rows.items()}
    return rows, jax.device_get(oracle()(random_model(CONFIG, 0).params, rows))


def assert_alike(one: Everywhere, other: Everywhere) -> None:
    """Equal up to what is undefined: entries behind the last response token, and a draft rejected after the last."""
    used = np.arange(ROW) < np.asarray(one.count)[:, None]

    def defined(found: Everywhere) -> Everywhere:
        found = jax.tree.map(np.asarray, found)
        tails = [
            tail._replace(rejected=np.where(tail.accepted < BLOCK - 1, tail.rejected, 0))
            for tail in (found.masked, found.anchored)
        ]
        return found._replace(masked=tails[0], anchored=tails[1])

    for a, b in zip(jax.tree.leaves(defined(one)), jax.tree.leaves(defined(other)), strict=True):
        assert np.array_equal(a if a.ndim == 1 else a[used], b if b.ndim == 1 else b[used])


def test_what_is_found_does_not_depend_on_how_much_is_worked_on_at_once(packed, monkeypatch):
    rows, whole = packed
    monkeypatch.setattr(oracles, "TOKENS_AT_ONCE", 7 * 2 * BLOCK * len(rows["tokens"]))  # 7 does not divide the row
    monkeypatch.setattr(oracles, "LOGITS_BYTES", 11 * 4 * len(rows["tokens"]) * CONFIG.vocab_size)
    assert_alike(whole, jax.jit(fresh())(random_model(CONFIG, 0).params, rows))


def test_a_mesh_finds_the_same(packed):
    rows, whole = packed
    mesh = make_mesh(MeshConfig(2, 2, 2), jax.devices())
    places = tree_shardings(mesh, parameter_table(CONFIG)), jax.sharding.NamedSharding(mesh, BATCH)

    def on_it(params, rows):
        with on_mesh(mesh):
            return fresh()(params, rows)

    found = jax.jit(on_it, in_shardings=places, out_shardings=replicated(mesh))(random_model(CONFIG, 0).params, rows)
    assert_alike(whole, found)


def test_a_layer_that_is_switched_off_is_as_good_as_gone_and_compiles_nothing(packed):
    rows, whole = packed
    params = random_model(CONFIG, 0).params
    one, traced = jax.jit(fresh(layers=1)), []

    def watched(*args, **gates):
        traced.append(1)
        return fresh()(*args, **gates)

    gated = jax.jit(watched)
    assert_alike(whole, gated(params, rows, gates_L=np.ones(2, np.float32)))
    for kept in (0, 1):
        without = {**params, "layers": jax.tree.map(lambda w, kept=kept: w[kept : kept + 1], params["layers"])}
        assert_alike(one(without, rows), gated(params, rows, gates_L=np.eye(2, dtype=np.float32)[kept]))
    assert len(traced) == 1


def test_an_attention_that_is_causal_within_the_block_is_another_drafter(packed):
    rows, whole = packed
    causal = jax.device_get(jax.jit(fresh("causal"))(random_model(CONFIG, 0).params, rows))
    decode = DecodeConfig(mode="sync", block_size=BLOCK)
    assert np.array_equal(causal.token, whole.token)
    assert [sample.rounds for sample in samples(causal, decode)] != [s.rounds for s in samples(whole, decode)]


@pytest.mark.slow
def test_interpreted_kernels_find_the_same(packed):
    """Queries that are fewer than the keys of context and own pass together, on the kernels that training uses."""
    rows, whole = packed
    attention = AttentionConfig("triton", interpret=True)
    found = jax.jit(lambda *args: fresh()(*args, attention=attention))(random_model(CONFIG, 0).params, rows)
    used = np.arange(ROW) < whole.count[:, None]
    for name in ("token", "document"):
        assert np.array_equal(np.asarray(getattr(found, name))[used], getattr(whole, name)[used])
    for one, other in (
        (found.first, whole.first),
        (found.masked.accepted, whole.masked.accepted),
        (found.anchored.accepted, whole.anchored.accepted),
    ):
        assert np.mean(np.asarray(one)[used] == other[used]) > 0.99  # two tokens may be as likely up to rounding


@pytest.mark.parametrize(
    "decode",
    [
        DecodeConfig(mode="ar"),
        DecodeConfig(draft_sampling="gumbel"),
        DecodeConfig(bonus="both"),
        DecodeConfig(miss="auto"),
        DecodeConfig(outcomes="auto"),
        DecodeConfig(drafting="auto"),
    ],
)
def test_a_mode_whose_rounds_do_not_follow_from_the_text_is_refused(packed, decode):
    with pytest.raises(ConfigError, match="cannot be told from"):
        samples(packed[1], decode)

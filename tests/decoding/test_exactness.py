"""Every mode, drafter, block size, policy and batch gives AR's tokens; overlapping changes no round."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from d3d_jax.config import DecodeConfig, SamplingParams
from d3d_jax.models.cache import empty_cache
from d3d_jax.models.qwen3 import append, for_decoding, logits

from .conftest import CONFIG, PROMPTS, SAMPLED, TOKEN_IDS, build, random_model, run, scripted, shared

GREEDY = SamplingParams()
POLICIES = [
    {"mode": "sync"},
    {"mode": "async", "miss": "keep"},
    {"mode": "async", "miss": "redraft"},
    {"mode": "async", "miss": "redraft", "outcomes": 2},
    {"mode": "async", "miss": "keep", "outcomes": 1, "ban_rejected": False},
    {"mode": "async", "miss": "keep", "bonus": "both", "candidates": 2, "outcomes": 2},
    {"mode": "async", "miss": "redraft", "bonus": "anchored", "candidates": 3, "row_budget": 20},
]


def policy_name(policy: dict) -> str:
    return "-".join(str(value) for value in policy.values())


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("policy", POLICIES, ids=policy_name)
def test_a_random_drafter_changes_no_token(ar_tokens, policy, devices):
    engine = shared(3, DecodeConfig(block_size=4, **policy), devices)
    for sampling in (GREEDY, SAMPLED):
        expected = ar_tokens(sampling)
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            assert run(engine, [prompt], 40, (), sampling)[0].ids == ids


@pytest.mark.parametrize("block_size", [2, 3, 16])
@pytest.mark.parametrize("policy", POLICIES[:3], ids=policy_name)
def test_no_block_size_changes_a_token(ar_tokens, policy, block_size):
    engine = shared(3, DecodeConfig(block_size=block_size, **policy), 2)
    expected = ar_tokens(SAMPLED)
    for prompt, ids in zip(PROMPTS, expected, strict=True):
        assert run(engine, [prompt], 40, (), SAMPLED)[0].ids == ids


@pytest.mark.slow
@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[2]], ids=policy_name)
def test_two_hundred_prompts_through_eight_rows(target, policy):
    """Greedy, drafts from the target's own weights, in company that changes all the time."""
    prompts = [[(11 * n + k * k) % TOKEN_IDS for k in range(1 + 7 * n % 30)] for n in range(200)]
    ar = build(target, None, DecodeConfig(mode="ar"), rows=8)
    expected = [completion.ids for completion in run(ar, prompts, 12)]
    for block_size in (2, 4, 8, 16):
        decode = DecodeConfig(block_size=block_size, **policy)
        engine = build(target, random_model(CONFIG, 0, block_size), decode, 2, rows=8)
        assert [completion.ids for completion in run(engine, prompts, 12)] == expected


@pytest.mark.parametrize("policy", POLICIES, ids=policy_name)
def test_a_row_of_a_batch_is_as_it_is_alone(ar_tokens, policy):
    engine = shared(3, DecodeConfig(block_size=4, **policy), 2, rows=3)
    for sampling in (GREEDY, SAMPLED):
        batch = run(engine, PROMPTS, 40, (), sampling)
        assert [c.ids for c in batch] == ar_tokens(sampling)


@pytest.mark.parametrize("policy", POLICIES[:4:3], ids=policy_name)
def test_gumbel_drafts_change_no_token(ar_tokens, policy):
    engine = shared(3, DecodeConfig(block_size=4, draft_sampling="gumbel", **policy))
    assert [run(engine, [p], 40, (), SAMPLED)[0].ids for p in PROMPTS] == ar_tokens(SAMPLED)


@pytest.mark.parametrize("policy", POLICIES, ids=policy_name)
def test_a_perfect_drafter_has_every_draft_accepted(target, ar_tokens, policy):
    """Anything less than full acceptance would be a fault in cache, position or bookkeeping."""
    expected = ar_tokens(GREEDY, new=60)
    drafter = scripted(PROMPTS, expected, 4)
    engine = build(target, drafter, DecodeConfig(block_size=4, **policy), 2, rows=3)
    for completion, ids in zip(run(engine, PROMPTS, 40, (), GREEDY), expected, strict=True):
        assert completion.ids == ids[:40]
        assert all(r.accepted == 3 for r in completion.rounds)
        assert all(r.hit in (None, True) for r in completion.rounds)
        assert len(completion.rounds) == 10  # 1 token from prefill, then 4 a round, to 41


@pytest.mark.parametrize("period", [2, 5])
@pytest.mark.parametrize("policy", POLICIES, ids=policy_name)
def test_ragged_acceptance_is_exactly_what_the_drafts_deserve(target, ar_tokens, policy, period):
    """Rows of unequal prompts err at unlike places; each round's count must be that of its own row."""
    expected = ar_tokens(GREEDY, new=70)
    drafter = scripted(PROMPTS, expected, 6, wrong=lambda position: position % period == 0)
    engine = build(target, drafter, DecodeConfig(block_size=6, **policy), 2, rows=3)
    for prompt, completion, ids in zip(PROMPTS, run(engine, PROMPTS, 50, (), GREEDY), expected, strict=True):
        assert completion.ids == ids[:50]
        position = len(prompt)  # of the anchor
        for verified in completion.rounds:
            if (
                policy.get("outcomes") != 1 and "bonus" not in policy
            ):  # an outcome that was not drafted has no drafts to accept
                right = next((n for n in range(5) if (position + n + 1) % period == 0), 5)
                assert verified.accepted == right
            position += verified.accepted + 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES[1:], ids=policy_name)
def test_overlapped_and_step_by_step_have_the_same_rounds(policy, sampling):
    """The drafter has the target's own weights, so that acceptance varies."""
    overlapped = shared(0, DecodeConfig(block_size=4, **policy), 2)
    stepped = shared(0, DecodeConfig(block_size=4, step_by_step=True, **policy), 2)
    one_device = shared(0, DecodeConfig(block_size=4, **policy), 1)
    for prompt in PROMPTS:
        a, b, c = (run(e, [prompt], 60, (), sampling)[0] for e in (overlapped, stepped, one_device))
        assert a.ids == b.ids == c.ids
        assert a.rounds == b.rounds == c.rounds


def test_synchronous_in_one_program_and_in_two_has_the_same_rounds():
    engines = [
        shared(0, DecodeConfig(mode="sync", block_size=4), 1),
        shared(0, DecodeConfig(mode="sync", block_size=4), 2),
        shared(0, DecodeConfig(mode="sync", block_size=4, step_by_step=True), 1),
    ]
    for prompt in PROMPTS:
        a, b, c = (run(engine, [prompt], 60, (), SAMPLED)[0] for engine in engines)
        assert a.ids == b.ids == c.ids
        assert a.rounds == b.rounds == c.rounds


@pytest.mark.parametrize("policy", POLICIES[:3], ids=policy_name)
def test_in_bfloat16_outputs_part_at_near_ties_alone(policy):
    """Products of one row and of a block round unlike there. Where a text parts from AR's, the target's two best
    tokens must be within a few steps of bfloat16; a wider gap would be a fault that rounding is blamed for.
    """
    target, prompts = random_model(CONFIG, 0), [[(5 * n + 3 * k) % TOKEN_IDS for k in range(4 + n)] for n in range(24)]
    dtype = jnp.bfloat16
    ar = build(target, None, DecodeConfig(mode="ar"), rows=8, dtype=dtype)
    drafter = random_model(CONFIG, 0, 4)
    engine = build(target, drafter, DecodeConfig(block_size=4, **policy), 2, rows=8, dtype=dtype)
    params, parted = for_decoding(target.params, dtype), 0
    for prompt, alone, found in zip(prompts, run(ar, prompts, 60), run(engine, prompts, 60), strict=True):
        same = next((at for at, (a, b) in enumerate(zip(alone.ids, found.ids, strict=True)) if a != b), None)
        if same is None:
            continue
        parted += 1
        text = jnp.array([[*prompt, *alone.ids[:same]]])
        hidden, _ = append(params, text, empty_cache(CONFIG, 1, text.shape[1], dtype), CONFIG)
        best = jnp.sort(logits(params, hidden[:, -1:])[0, 0].astype(jnp.float32))[::-1]
        step = 2.0 ** (jnp.floor(jnp.log2(jnp.abs(best[0]))) - 7)  # bfloat16 has 8 bits
        assert best[0] - best[1] <= 8 * step, f"{best[:2]} at token {same}"
    assert parted < len(prompts)

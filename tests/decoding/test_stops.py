"""Stop tokens and budgets cut every mode's output where AR's is cut."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from d3d_jax.config import DecodeConfig, SamplingParams
from d3d_jax.errors import CapacityError, CompatibilityError, ConfigError

from .conftest import CONFIG, GREEDY, MAX_LEN, PROMPTS, SAMPLED, SMALL, build, random_model, run, scripted, shared

MODES = [{"mode": "sync"}, {"mode": "async", "miss": "keep"}, {"mode": "async", "miss": "redraft"}]


@pytest.mark.parametrize("policy", MODES, ids=lambda policy: "-".join(policy.values()))
def test_a_stop_token_ends_the_row_wherever_it_stands(target, ar_tokens, policy):
    """With true drafts every offset in a block is met, the bonus too; other rows of the batch go on."""
    whole = ar_tokens(SAMPLED)
    drafter = scripted(PROMPTS, whole, 4, wrong=lambda position: position % 9 == 0)
    engine = build(target, drafter, DecodeConfig(block_size=4, **policy), 2, rows=3)
    for at in range(12):
        stop = whole[0][at]
        expected = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in whole]
        completions = run(engine, PROMPTS, 40, (stop, 71), SAMPLED)
        assert [c.ids for c in completions] == expected
        assert [c.finish_reason for c in completions] == ["stop" if stop in ids else "length" for ids in whole]


@pytest.mark.parametrize("policy", MODES, ids=lambda policy: "-".join(policy.values()))
def test_the_budget_is_met_to_the_token(ar_tokens, policy):
    engine = shared(0, DecodeConfig(block_size=4, **policy), 2, rows=3)
    whole = ar_tokens(SAMPLED)
    for budget in (1, 2, 3, 4, 5, 9):
        completions = run(engine, PROMPTS, budget, (), SAMPLED)
        assert [c.ids for c in completions] == [ids[:budget] for ids in whole]
        assert all(c.finish_reason == "length" for c in completions)


@pytest.mark.parametrize("policy", MODES, ids=lambda policy: "-".join(policy.values()))
def test_a_request_may_fill_the_cache_to_its_last_slot(ar_tokens, policy):
    """One token more is refused before anything runs."""
    engine = shared(0, DecodeConfig(block_size=4, **policy), 2)
    room = MAX_LEN - 2 * 4 - len(PROMPTS[1])
    expected = ar_tokens(SAMPLED, new=room)[1]
    assert run(engine, [PROMPTS[1]], room, (), SAMPLED)[0].ids == expected
    with pytest.raises(CapacityError, match=f"has 40 tokens; with max_tokens={room + 1}"):
        run(engine, [PROMPTS[1]], room + 1, (), SAMPLED)


def test_the_mask_id_in_the_prompt_or_the_output_is_a_token_like_any_other(ar_tokens):
    engine = shared(0, DecodeConfig(mode="async", block_size=4, miss="redraft"), 2)
    alone = shared(0, DecodeConfig(mode="ar", block_size=4))
    prompt = [5, 64, 9, 64]
    assert run(engine, [prompt], 30, (), SAMPLED)[0].ids == run(alone, [prompt], 30, (), SAMPLED)[0].ids


def test_the_seed_alone_decides_a_sampled_text(ar_tokens):
    engine = shared(0, DecodeConfig(mode="async", block_size=4), 2)
    texts = {run(engine, [PROMPTS[0]], 12, (), SamplingParams(1.0, seed=seed))[0].ids for seed in range(10)}
    assert len(texts) >= 9
    repeated = [run(engine, [PROMPTS[0]], 12, (), SamplingParams(1.0, seed=7))[0].ids for _ in range(2)]
    assert repeated[0] == repeated[1]


def test_top_k_1_is_greedy_at_any_temperature(ar_tokens):
    engine = shared(0, DecodeConfig(mode="async", block_size=4), 2)
    greedy = ar_tokens(SamplingParams())
    for setting in (SamplingParams(1.0, top_k=1), SamplingParams(1.0, top_p=1e-4)):
        assert [run(engine, [p], 40, (), setting)[0].ids for p in PROMPTS] == greedy


def test_nothing_compiles_after_warm_up_whatever_length_budget_seed_or_filter():
    import jax

    engine = build(
        random_model(CONFIG, 0), random_model(SMALL, 3, 4), DecodeConfig(mode="async", block_size=4, miss="redraft"), 2
    )
    engine.warm_up()
    compiled: list[str] = []
    count = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(count)
    for length in (1, 5, 63, 64, 65, 120):
        for sampling in (SamplingParams(), SAMPLED, SamplingParams(1.3, top_k=3, seed=5)):
            run(engine, [[1] * length], 7, (3,), sampling)
            run(engine, [[2] * length], 20, (3,), sampling)
    assert compiled == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_pair_that_does_not_fit_is_refused_by_name(target, mode):
    import dataclasses

    with pytest.raises(CompatibilityError, match="needs a trained drafter"):
        build(target, None, DecodeConfig(mode=mode, block_size=4))
    with pytest.raises(CompatibilityError, match="without d3d_config"):
        build(target, random_model(SMALL, 3), DecodeConfig(mode=mode, block_size=4))
    with pytest.raises(CompatibilityError, match="trained for 4; use --block-size 4"):
        build(target, random_model(SMALL, 3, 4), DecodeConfig(mode=mode, block_size=8))
    wide = dataclasses.replace(SMALL, vocab_size=80)
    with pytest.raises(CompatibilityError, match="72 and 80 vocabulary rows"):
        build(target, random_model(wide, 3, 4), DecodeConfig(mode=mode, block_size=4))


def test_malformed_requests_are_refused_before_anything_runs():
    engine = shared(0, DecodeConfig(mode="ar", block_size=4))
    for prompts, message in (([], "0 prompts"), ([[]], "prompt 0 is empty"), ([[1], [72]], "prompt 1 holds id 72")):
        with pytest.raises(CapacityError, match=message):
            run(engine, prompts, 5, ())
    with pytest.raises(ConfigError, match="max_tokens must be at least 1"):
        run(engine, [[1]], 0, ())
    with pytest.raises(ConfigError, match="temperature=0 is greedy and ignores"):
        SamplingParams(temperature=0, top_k=5)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_beyond_the_context_of_the_drafter_the_text_goes_on_with_one_warning(target, ar_tokens, mode):
    drafter = random_model(dataclasses.replace(SMALL, max_position_embeddings=24), 3, block_size=4)
    engine = build(target, drafter, DecodeConfig(mode=mode, block_size=4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [run(engine, [prompt], 40)[0] for prompt in PROMPTS]
    assert [one.ids for one in found] == ar_tokens(GREEDY)
    [warning] = [str(one.message) for one in told]
    assert "prompt 0 may reach 43 tokens, and the drafter knows 24" in warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(build(target, drafter, DecodeConfig(mode=mode, block_size=4)), [PROMPTS[0]], 20)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_row_past_the_context_of_the_drafter_leaves_its_company_and_its_successor_alone(target, mode):
    """The drafter has the target's weights but knows 48 tokens; one row crosses that, one does not."""
    drafter = random_model(dataclasses.replace(CONFIG, max_position_embeddings=48), 0, block_size=4)
    settings = [SamplingParams(max_tokens=most) for most in (30, 60)]

    def decode(prompts, params, rows=1):
        engine = build(target, drafter, DecodeConfig(mode=mode, block_size=4), 2, rows=rows)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            return engine, engine.generate(prompts, params), len(told)

    _, [short], _ = decode([PROMPTS[0]], settings[0])
    engine, together, told = decode([PROMPTS[0], PROMPTS[1]], settings, rows=2)
    assert told == 1
    assert together[0] == dataclasses.replace(short, prefill_s=together[0].prefill_s, decode_s=together[0].decode_s)
    [ar] = run(build(target, None, DecodeConfig(mode="ar")), [PROMPTS[1]], 60)
    assert together[1].ids == ar.ids
    [after] = engine.generate([PROMPTS[0]], settings[0])
    assert (after.ids, after.rounds) == (short.ids, short.rounds)

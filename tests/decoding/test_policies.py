"""Policies know numbers alone: what they choose follows from what they were told."""

from __future__ import annotations

import dataclasses
import time

import pytest

from d3d_jax.acceptance.metrics import Sample
from d3d_jax.config import DecodeConfig, SamplingParams
from d3d_jax.decoding import policies
from d3d_jax.decoding.policies import PLAIN, WITH_BONUS, Fastest, InTurn, Tactic, break_even_tau, policy_for, tactics

from .conftest import GREEDY, PROMPTS, SAMPLED, build, run, scripted, shared

KEEP, REDRAFT = Tactic(False, "all"), Tactic(True, "all")


def told(policy: Fastest, rounds: int, speed: dict[Tactic, tuple[int, float]]) -> list[Tactic]:
    """The tactics of so many rounds, each of which gives and takes what `speed` says."""
    used = []
    for _ in range(rounds):
        used.append(policy.next())
        policy.observe(used[-1], *speed[used[-1]])
    return used


def test_candidates_are_left_open_too():
    decode = DecodeConfig(bonus="both", candidates="auto", block_size=8)
    assert tactics(decode) == tuple(Tactic(True, "all", count) for count in (4, 2, 1))
    narrower = dataclasses.replace(decode, outcomes="auto")
    assert tactics(narrower) == (Tactic(True, "all", 4), Tactic(True, 4, 2), Tactic(True, 2, 1))
    assert decode.num_candidates == 4  # room for any


def test_drafting_may_be_left_open():
    decode = DecodeConfig(drafting="auto")
    assert tactics(decode) == (REDRAFT, WITH_BONUS, PLAIN)
    assert tactics(dataclasses.replace(decode, mode="sync")) == (WITH_BONUS, PLAIN)
    assert tactics(dataclasses.replace(decode, mode="sync", drafting="always")) == (WITH_BONUS,)


def test_a_plain_round_is_tried_less_long():
    policy = Fastest([REDRAFT, PLAIN], trial=12, stretch=50)
    used = told(policy, 16, {REDRAFT: (4, 1.0), PLAIN: (16, 8.0)})
    assert used == [REDRAFT] * 12 + [PLAIN] * 3 + [REDRAFT]


def test_break_even_is_where_both_ways_are_as_fast():
    assert break_even_tau(4.0, drafted_rate=200.0, plain_rate=100.0) == 2.0  # a round takes two plain steps


def test_what_the_settings_leave_open():
    assert tactics(DecodeConfig(miss="keep", outcomes=3)) == (Tactic(False, 3),)
    assert tactics(DecodeConfig(miss="auto")) == (KEEP, REDRAFT)
    found = tactics(DecodeConfig(miss="auto", outcomes="auto", block_size=8))
    assert found == tuple(Tactic(again, count) for count in ("all", 4, 2) for again in (False, True))
    assert tactics(DecodeConfig(miss="keep", outcomes="auto", block_size=2)) == (KEEP, Tactic(False, 1))
    assert isinstance(policy_for([KEEP]), InTurn) and isinstance(policy_for([KEEP, REDRAFT]), Fastest)


def test_the_faster_tactic_is_used_but_for_the_trials():
    policy = Fastest([KEEP, REDRAFT], trial=5, stretch=50)
    used = told(policy, 500, {KEEP: (3, 1.0), REDRAFT: (5, 1.2)})
    assert used[:10] == [KEEP] * 5 + [REDRAFT] * 5
    assert used[10:60] == [REDRAFT] * 50 and used[60:65] == [KEEP] * 5
    assert used.count(REDRAFT) >= 440
    assert policy.rate(REDRAFT) == pytest.approx(5 / 1.2) and policy.rate(KEEP) == pytest.approx(3)


def test_it_is_the_rule_of_the_algorithm():
    """Redraft when T_redraft < T_round (tau_anchored - 1 - extra_if_kept) / tau, all misses being redrafted."""
    hit_rate, t_round, tau_hit, kept, anchored = 0.6, 1.0, 4.0, 1.2, 3.0
    tau = hit_rate * tau_hit + (1 - hit_rate) * (1 + kept)
    even = t_round * (anchored - 1 - kept) / tau
    for t_redraft, better in ((0.9 * even, REDRAFT), (1.1 * even, KEEP)):
        policy = Fastest([KEEP, REDRAFT], trial=10, stretch=100)
        misses = iter([i % 5 in (1, 3) for i in range(10_000)])
        for _ in range(2000):
            tactic, missed = policy.next(), next(misses)
            again = missed and tactic.redraft
            gained = tau_hit if not missed else anchored if again else 1 + kept
            policy.observe(tactic, gained, t_round + t_redraft * again)
        assert max((KEEP, REDRAFT), key=policy.rate) == better


def test_it_turns_when_the_world_does():
    policy = Fastest([KEEP, REDRAFT], trial=5, stretch=40, memory=20)
    told(policy, 200, {KEEP: (4, 1.0), REDRAFT: (3, 1.0)})
    used = told(policy, 400, {KEEP: (2, 1.0), REDRAFT: (3, 1.0)})
    assert used[-100:].count(REDRAFT) >= 80


def test_the_first_round_after_a_change_tells_nothing():
    policy = Fastest([KEEP, REDRAFT], trial=3)
    for seconds in (1.0, 1.0, 1.0, 99.0, 1.0, 1.0):
        policy.observe(policy.next(), 2, seconds)
    assert policy.rate(REDRAFT) == pytest.approx(2.0)


def test_a_round_whose_time_cannot_be_told_still_parts_two_stretches():
    policy = Fastest([KEEP, REDRAFT], trial=3)
    told(policy, 3, {KEEP: (2, 1.0)})
    policy.observe(REDRAFT, 2, None)
    policy.observe(KEEP, 2, 99.0)  # holds the end of the one before
    policy.observe(REDRAFT, 2, None)
    policy.observe(REDRAFT, 2, None)
    assert policy.rate(KEEP) == pytest.approx(2.0) and policy.rate(REDRAFT) == 0


class Script:
    """Decides by the number of the round alone, so that two runs can be compared round by round."""

    def __init__(self, choices):
        self.choices, self.rounds, self.seen = choices, 0, []

    def next(self):
        self.rounds += 1
        return self.choices[(self.rounds + self.rounds // 4) % len(self.choices)]

    def observe(self, tactic, tokens, seconds):
        self.seen.append((tactic, tokens, seconds))


@pytest.fixture
def scripts(monkeypatch) -> list[Script]:
    made: list[Script] = []

    def make(choices):
        made.append(Script(choices))
        return made[-1]

    monkeypatch.setattr(policies, "policy_for", make)
    shared.cache_clear()
    yield made
    shared.cache_clear()


@pytest.mark.parametrize(
    "decode",
    [
        DecodeConfig(block_size=4, miss="auto", outcomes="auto"),
        DecodeConfig(block_size=4, bonus="both", outcomes="auto", candidates="auto"),
        DecodeConfig(block_size=4, miss="auto", drafting="auto"),
    ],
    ids=["outcomes", "candidates", "drafting"],
)
def test_tactics_change_from_round_to_round_and_no_token_does(ar_tokens, scripts, decode):
    """Overlapped and step by step, the same decisions give the very same rounds."""
    engines = [shared(0, how, 2) for how in (decode, dataclasses.replace(decode, step_by_step=True))]
    for prompt, ids in zip(PROMPTS, ar_tokens(GREEDY), strict=True):
        for script in scripts:
            script.rounds = 0
        overlapped, stepped = (run(engine, [prompt], 40)[0] for engine in engines)
        assert overlapped.ids == stepped.ids == ids
        assert overlapped.rounds == stepped.rounds
        assert overlapped.drafted_rounds < len(overlapped.rounds) or decode.drafting == "always"
    redrafted = [verified.redrafted for verified in overlapped.rounds]
    assert any(redrafted) and not all(redrafted)
    for script in scripts:
        assert {tactic for tactic, _, _ in script.seen} == set(tactics(decode))
        assert all(tokens >= 0 and (seconds is None or seconds > 0) for _, tokens, seconds in script.seen)


def test_a_stream_that_is_read_slowly_says_nothing_about_a_tactic(scripts):
    engine = shared(0, DecodeConfig(block_size=4, miss="auto"), 2)
    run(engine, [PROMPTS[0]], 30)
    [script] = scripts
    assert script.seen[0][2] is None and any(seconds is not None for _, _, seconds in script.seen)  # after a prompt
    script.seen.clear()
    request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=30))
    while not request.finished:
        time.sleep(0.05)
        engine.step()
    assert len(script.seen) > 5 and all(seconds is None for _, _, seconds in script.seen)


def test_a_warm_up_that_fails_leaves_the_policy_as_it_was(scripts):
    runner = shared(0, DecodeConfig(block_size=4, miss="auto"), 2)._scheduler._runner
    with pytest.raises(RuntimeError), runner.rehearsal() as rounds:
        assert rounds == 2 and runner.steering.policy not in scripts
        raise RuntimeError
    assert runner.steering.policy in scripts


def test_warm_up_runs_every_tactic_and_leaves_the_policy_as_it_was(scripts):
    from d3d_jax.benchmarks.compile_counter import CompileCounter

    engine = shared(0, DecodeConfig(block_size=4, miss="auto", outcomes="auto"), 2)
    engine.warm_up(prompt_lengths=[3])
    [script] = scripts
    assert script.rounds == 0
    with CompileCounter() as counter:
        run(engine, PROMPTS[:1], 40)
    assert script.rounds > 6 and counter.count == 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_going_alone_for_a_while_leaves_the_drafter_fed(target, ar_tokens, scripts, mode, devices, sampling):
    """A drafter that knows the whole text goes on being right after rounds that it took no part in: in mode `sync` and
    wherever a miss is drafted again, at once."""
    drafter = scripted(PROMPTS, ar_tokens(sampling), 4)
    decode = DecodeConfig(mode=mode, block_size=4, drafting="auto", miss="redraft")
    engine = build(target, drafter, decode, devices, rows=3)
    completions = run(engine, PROMPTS, 40, sampling=sampling)
    assert [completion.ids for completion in completions] == ar_tokens(sampling)
    for completion in completions:
        assert 0 < completion.drafted_rounds < len(completion.rounds)
        whole = Sample(completion.rounds, len(completion.ids)).whole_rounds()
        assert all(verified.accepted == 3 for verified in whole if verified.drafted)
        assert len(completion.bonus_positions) > completion.drafted_rounds


def test_the_target_goes_alone_where_drafts_are_worthless(target, ar_tokens):
    """A drafter that errs everywhere: soon most rounds are plain, and no token changes."""
    drafter = scripted(PROMPTS[:1], ar_tokens(GREEDY, 110)[:1], 8, wrong=lambda position: True)
    engine = build(target, drafter, DecodeConfig(mode="sync", block_size=8, drafting="auto"))
    engine.warm_up([len(PROMPTS[0])], [GREEDY])
    for _ in range(6):
        [found] = run(engine, PROMPTS[:1], 110)
        assert found.ids == ar_tokens(GREEDY, 110)[0]
    assert found.drafted_rounds < 30

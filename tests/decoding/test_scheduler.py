"""Which request has which row, and what is launched when: the host alone, with a runner that only notes."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from d3d_jax.config import SamplingParams
from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.prompt_chunks import SIZES
from d3d_jax.decoding.request import Request
from d3d_jax.decoding.rounds import Launched
from d3d_jax.decoding.scheduler import LISTENING_ROUNDS, NEVER, Scheduler
from d3d_jax.decoding.state import Progress

MAX_LEN = 4096


class Notes:
    """A runner without a device: every launch gives each row one token, the launch's number."""

    def __init__(self, rows: int, compiled_loop: bool = False):
        self.rows, self.compiled_loop = rows, compiled_loop
        self.log: list[tuple] = []
        self.untils: list[tuple[int, int]] = []

    def prefill(self, chunk, settings):
        slot, first = int(chunk.slot), Progress([1000], [0.0])
        self.log.append(("chunk", slot, int(chunk.count)))
        return Launched((), lambda _: [Progress() for _ in range(slot)] + [first]), ()

    def launch(self, number, settings, until, observer):
        count = sum(kind == "round" for kind, *_ in self.log)
        self.log.append(("round", count))
        self.untils.append((int(until.rounds), int(until.rows_done)))
        return Launched((), lambda _: [Progress([count], [0.0]) for _ in range(self.rows)])

    def release(self, slot):
        self.log.append(("release", slot))


def ask(length: int, tokens: int, listens: bool = False) -> Request:
    return Request([1] * length, SamplingParams(), (), tokens, listens=listens)


def made(rows: int, lookahead: int = 2, compiled_loop: bool = False) -> tuple[Scheduler, Notes]:
    notes = Notes(rows, compiled_loop)
    return Scheduler(lambda: notes, rows, MAX_LEN, lookahead), notes


def run(scheduler: Scheduler) -> None:
    for _ in range(10_000):
        if scheduler.idle:
            return
        scheduler.step(Observer())
    raise AssertionError("it never ends")


def test_a_long_prompt_holds_up_the_others_for_one_chunk_at_a_time():
    scheduler, notes = made(rows=2)
    scheduler.submit(ask(3, 40))
    scheduler.step(Observer())
    scheduler.submit(ask(2000, 5))
    run(scheduler)
    kinds = [kind for kind, *_ in notes.log]
    chunks = [place for place, kind in enumerate(kinds) if kind == "chunk"]
    assert len(chunks) == 1 + -(-2000 // SIZES[-1])
    assert all("round" in kinds[a:b] for a, b in itertools.pairwise(chunks))
    assert sum(entry[2] for entry in notes.log if entry[0] == "chunk" and entry[1] == 1) == 2000


@pytest.mark.parametrize("lookahead", [1, 2, 5])
def test_a_row_read_late_is_never_credited_to_its_next_request(lookahead):
    scheduler, notes = made(rows=1, lookahead=lookahead)
    first, second = ask(3, 4), ask(3, 4)
    scheduler.submit(first)
    scheduler.submit(second)
    run(scheduler)
    assert first.completion().ids == (1000, 0, 1, 2)
    taken = second.completion().ids[1:]
    # Rounds launched before the host knew of the first one's end belong to nobody.
    chunk = [entry[0] for entry in notes.log].index("chunk", 1)
    before = sum(entry[0] == "round" for entry in notes.log[:chunk])
    assert before == 3 + lookahead - 1
    assert taken == (before, before + 1, before + 2)


def test_a_request_cancelled_anywhere_leaves_the_others_alone():
    scheduler, notes = made(rows=1)
    running, filling, waiting, last = ask(3, 9), ask(2000, 3), ask(3, 3), ask(3, 3)
    for request in (running, waiting, filling, last):
        scheduler.submit(request)
    scheduler.step(Observer())
    scheduler.cancel(waiting)
    scheduler.cancel(running)
    assert ("release", 0) in notes.log
    scheduler.step(Observer())
    scheduler.cancel(filling)
    scheduler.cancel(filling)
    run(scheduler)
    assert [r.finish_reason for r in (running, waiting, filling, last)] == ["cancelled"] * 3 + ["length"]
    assert waiting.completion().ids == filling.completion().ids == () and len(last.completion().ids) == 3


def test_a_loop_on_the_device_runs_as_long_as_the_host_has_nothing_else_to_do():
    scheduler, notes = made(rows=2, compiled_loop=True)
    scheduler.submit(ask(3, 9))
    scheduler.step(Observer())
    assert notes.untils == [(NEVER, NEVER)]  # alone: to its end
    scheduler.submit(ask(2000, 9))
    for _ in range(4):
        scheduler.step(Observer())
    assert notes.untils[1:4] == [(1, NEVER)] * 3  # between the chunks of the other
    assert notes.untils[4] == (NEVER, NEVER)
    scheduler.submit(ask(3, 9))
    scheduler.step(Observer())
    assert notes.untils[5] == (NEVER, 1)  # somebody waits for a row: to the first end
    run(scheduler)
    scheduler.submit(ask(3, 9, listens=True))
    scheduler.step(Observer())
    assert notes.untils[-1] == (LISTENING_ROUNDS, NEVER)
    run(scheduler)


def test_a_runner_that_fails_without_a_fallback_ends_its_requests_and_serves_the_next():
    scheduler, notes = made(rows=1)
    under_way, waiting = ask(3, 9), ask(3, 3)
    scheduler.submit(under_way)
    scheduler.submit(waiting)
    scheduler.step(Observer())
    works, notes.launch = notes.launch, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        scheduler.step(Observer())
    assert under_way.finish_reason == "error" and not waiting.finished
    notes.launch = works
    run(scheduler)
    assert waiting.finish_reason == "length"


def test_a_transfer_that_is_not_written_out_is_refused():
    """A numpy array that slips into a program in the middle of service would make each round wait for its copy."""

    class Careless(Notes):
        def launch(self, number, settings, until, observer):
            jax.jit(lambda x: x + 1)(np.ones(3))
            return super().launch(number, settings, until, observer)

    scheduler = Scheduler(lambda: Careless(1), 1, MAX_LEN, 2)
    scheduler.submit(ask(3, 5))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run(scheduler)

"""Which request has which row, and what is launched next: continuous batching on the host.

Requests wait until a row is free, are prefilled chunk by chunk between the rounds of the rows that are under way,
and leave as soon as the host has read their end. Launches are read late, so that no device waits for the host.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from d3d_jax.decoding.observer import Observer
from d3d_jax.decoding.placement import Settings
from d3d_jax.decoding.policies import Tactic
from d3d_jax.decoding.prompt_chunks import chunks_of
from d3d_jax.decoding.request import Request
from d3d_jax.decoding.rounds import Launched, Runner, Until
from d3d_jax.decoding.state import PromptChunk
from d3d_jax.errors import DeviceError

LISTENING_ROUNDS = 4  # of a loop on the device, while somebody waits for its text
NEVER = np.int32(2**31 - 1)
POLL_S = 1e-4


class _InFlight(NamedTuple):
    """A launch not read yet, and the requests whose rows it advanced."""

    launched: Launched
    owners: tuple[Request | None, ...]


class Scheduler:
    """Rows of one runner, and the requests that want them.

    Args:
        make: a runner with free rows; called again when one is lost to a failure.
        rows: of the runner.
        max_len: slots of each row's cache.
        lookahead: launches in flight before the host reads the oldest; a loop on the device needs but one.
        fallback: the runner that takes over from one that failed; None to raise instead.
        try_again: a runner that had given something since it was made is made anew before the fallback takes over.
        stall_s: seconds without a result after which the devices count as failed; None to wait for ever.
    """

    def __init__(
        self,
        make: Callable[[], Runner],
        rows: int,
        max_len: int,
        lookahead: int,
        fallback: Callable[[], Runner] | None = None,
        stall_s: float | None = None,
        try_again: bool = False,
    ):
        self._try_again, self._fruitful = try_again, False
        self._stall_s = stall_s
        self._make, self._fallback, self._max_len, self._ahead = make, fallback, max_len, lookahead
        self._runner = make()
        self._settings = Settings(rows)
        self._rows: list[Request | None] = [None] * rows
        self._waiting: deque[Request] = deque()
        self._filling: tuple[Request, int, Iterator[PromptChunk]] | None = None
        self._unread: deque[_InFlight] = deque()
        self._launches = 0

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing waits."""
        return not (self._waiting or self._filling or self._unread or any(self._rows))

    def submit(self, request: Request) -> None:
        """Queue a request; `step` does the rest."""
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is; its row is free at once."""
        if request.finished:
            return
        request.finish("cancelled")
        if request in self._waiting:
            self._waiting.remove(request)
        elif self._filling is not None and self._filling[0] is request:
            self._settings.free_row(self._filling[1])
            self._filling = None  # no chunk but the last makes a row active
        elif request in self._rows:
            slot = self._rows.index(request)
            self._free(slot)
            self._runner.release(slot)

    def rehearsal(self) -> AbstractContextManager[int]:
        """See :meth:`Runner.rehearsal`."""
        return self._runner.rehearsal()

    def rates(self) -> dict[Tactic, float]:
        """See :meth:`Runner.rates`."""
        return self._runner.rates()

    def step(self, observer: Observer) -> None:
        """One chunk of a prompt, one launch for the rows under way, and the reading of what is due.

        Raises:
            Exception: whatever a program or a device raised, when there is no fallback. The requests under way end
                with it; those that wait stay, and the next step serves them from fresh caches.
        """
        try:
            self._step(observer)
        except Exception as error:
            if not self._recover(error):
                raise

    def _step(self, observer: Observer) -> None:
        with jax.transfer_guard("disallow"):  # only the transfers that are written out
            chunk_launched = self._fill(observer)
            active = any(self._rows)
            if active:
                launched = self._runner.launch(self._launches, self._settings, self._until(), observer)
                self._enqueue(launched)
                self._launches += 1
        lookahead = 1 if self._runner.compiled_loop else self._ahead
        while self._unread and (len(self._unread) >= lookahead or not (active or chunk_launched)):
            self._read()

    def _recover(self, error: Exception) -> bool:
        """Go on without the runner that failed: its caches are lost, but every request knows its tokens so far."""
        under_way = [request for request in self._rows if request is not None]
        under_way += [self._filling[0]] if self._filling is not None else []
        self._rows, self._filling = [None] * len(self._rows), None
        self._unread.clear()
        if self._fallback is None:
            for request in under_way:
                request.finish("error")
            self._runner = self._make()
            return False
        if self._try_again and self._fruitful:
            said, self._runner = "drafting begins again from fresh caches", self._make()
        else:
            said = "the target decodes alone from here on"
            self._runner, self._make, self._fallback = self._fallback(), self._fallback, None
        self._fruitful = False
        warnings.warn(f"drafting failed ({error}); {said}", RuntimeWarning, stacklevel=4)
        self._waiting.extendleft(reversed(under_way))
        return True

    def _fill(self, observer: Observer) -> bool:
        """One chunk of the next prompt, if a row is free for it."""
        if self._filling is None:
            if not self._waiting or None not in self._rows:
                return False
            request, slot = self._waiting.popleft(), self._rows.index(None)
            self._settings.set_row(slot, request.params, request.stop_ids, request.limit)
            request.start()
            self._filling = request, slot, chunks_of(request.committed, slot, self._max_len)
        request, slot, chunks = self._filling
        chunk = next(chunks)
        alone = not any(self._rows)
        first, done = self._runner.prefill(chunk, self._settings)
        if chunk.last:
            self._filling = None
            self._rows[slot] = request
            self._enqueue(first)
            if alone:
                # Nobody is held up by waiting, and the time to the first token is a true one.
                self._wait_for(done)
                while self._unread:
                    self._read()
                self._launches = 0
                observer.restart()
        return True

    def _until(self) -> Until:
        """How long a loop on the device may run before the host has something else to do."""
        rounds, rows_done = NEVER, NEVER
        if any(row is not None and row.listens for row in self._rows):
            rounds = np.int32(LISTENING_ROUNDS)
        if self._filling is not None or (self._waiting and None in self._rows):
            rounds = np.int32(1)
        elif self._waiting:
            rows_done = np.int32(self._rows.count(None) + 1)
        return Until(rounds, rows_done)

    def _enqueue(self, launched: Launched) -> None:
        for array in jax.tree.leaves(launched.arrays):
            array.copy_to_host_async()
        self._unread.append(_InFlight(launched, tuple(self._rows)))

    def _read(self) -> None:
        """The oldest launch. Rows that have another request by now, or none, are not concerned."""
        (arrays, read), owners = self._unread.popleft()
        self._wait_for(arrays)
        found: Any = read(jax.device_get(arrays))
        for slot, progress in enumerate(found):
            request = owners[slot]
            if request is None or request.finished:
                continue
            request.take(progress)
            self._fruitful |= bool(progress.rounds)
            if request.finished:
                self._free(slot)
                if not progress.done:  # a stop text: the device does not know of it
                    self._runner.release(slot)

    def _wait_for(self, arrays: Any) -> None:
        """Until the devices have made them. Raises DeviceError when nothing comes."""
        if self._stall_s is None:
            jax.block_until_ready(arrays)
            return
        waiting, deadline = jax.tree.leaves(arrays), time.monotonic() + self._stall_s
        while waiting:
            waiting = [array for array in waiting if not array.is_ready()]
            if waiting and time.monotonic() > deadline:
                raise DeviceError(
                    f"the devices have given nothing for {self._stall_s:g} s (stall_s); one of them hangs, or the "
                    "limit is too short for a round and a chunk of a prompt"
                )
            time.sleep(POLL_S if waiting else 0)

    def _free(self, slot: int) -> None:
        self._rows[slot] = None
        self._settings.free_row(slot)

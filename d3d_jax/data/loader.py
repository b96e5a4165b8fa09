"""Batches of packed rows, a pure function of seed and step.

The whole state is one integer, so a run that resumes at step n sees exactly the batches that it would have seen, also
on another number of processes. grain's loaders keep a state for each process and shard the rows, not the batch: there
the same step holds other rows as soon as the processes are more or fewer, so none of them stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from d3d_jax.data.packing import PackedRows, block_starts
from d3d_jax.data.rows import Rows
from d3d_jax.errors import DataError

# Separate streams of random numbers from one seed.
_SHUFFLE, _BLOCKS, _NOISE = 0, 1, 2


@dataclass(frozen=True)
class BlockArguments:
    """How the masked blocks of a batch are drawn; see :func:`d3d_jax.data.packing.block_starts`.

    noise: `full` or `uniform`, as `config.BlockConfig` says.
    """

    block_size: int
    num_blocks: int
    starts: str = "partition"
    visible_probabilities: tuple[float, float] = (0.7, 0.2)
    geometric: float = 0.9
    noise: str = "full"


class Batches:
    """An endless iterator of batches of this process, as dicts of numpy arrays.

    Keys: the arrays of :class:`PackedRows`, [B, S] with B = batch_size / process_count, and, with
    `blocks`, ``block_start``, ``block_visible`` and ``block_length`` int32[B, C] of the :class:`BlockPlan`; with
    `uniform` noise also ``block_rate`` float32[B, C], the share t that is masked, and ``block_masked`` bool[B, C, G].
    Each epoch visits the rows in an order of its own; the rows that do not fill a last batch are left out of
    that epoch. The processes of a step hold neighbouring parts of one global batch, which does not depend on
    how many they are.

    batch_size counts the rows of all processes. prefetch prepares the next batch in one background thread; `close`,
    or leaving a ``with`` block, ends it.
    Raises DataError if batch_size does not divide by process_count, exceeds the rows, or is not positive.
    """

    def __init__(
        self,
        rows: PackedRows | Rows,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        blocks: BlockArguments | None = None,
        prefetch: bool = False,
    ):
        if batch_size < 1 or process_count < 1 or not 0 <= process_index < process_count:
            raise DataError(
                f"batch_size {batch_size}, process {process_index} of {process_count}; expected a positive size "
                "and a process_index below process_count"
            )
        if batch_size % process_count:
            raise DataError(
                f"batch_size {batch_size} does not divide by {process_count} processes; "
                f"use {batch_size - batch_size % process_count or process_count}, or other processes"
            )
        if len(rows) < batch_size:
            raise DataError(f"{len(rows)} rows, batch_size {batch_size}; expected a batch to fit: add data or lower it")
        if seed < 0:
            raise DataError(f"seed is {seed}; expected 0 or more")
        self.steps_per_epoch = len(rows) // batch_size
        self._rows, self._batch_size, self._seed, self._blocks = rows, batch_size, seed, blocks
        local = batch_size // process_count
        self._part = slice(process_index * local, (process_index + 1) * local)
        self._step = 0
        self._order: tuple[int, np.ndarray] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches") if prefetch else None
        self._ahead: tuple[int, Future[dict[str, np.ndarray]]] | None = None

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        step = self._step
        if self._thread is None:
            batch = self.at(step)
        else:
            ahead, self._ahead = self._ahead, None
            if ahead is None or ahead[0] != step:
                ahead = (step, self._thread.submit(self.at, step))
            batch = ahead[1].result()
            self._ahead = (step + 1, self._thread.submit(self.at, step + 1))
        self._step = step + 1
        return batch

    def at(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step, whatever was read before."""
        numbers = self._numbers(step)
        batch = self._rows[numbers[self._part]].arrays()
        if self._blocks is None:
            return batch
        blocks = self._blocks
        plan = block_starts(  # of the whole batch, whose random numbers no process can draw for its part alone
            self._rows.structure(numbers),
            blocks.block_size,
            blocks.num_blocks,
            np.random.default_rng([self._seed, _BLOCKS, step]),
            starts=blocks.starts,
            visible_probabilities=blocks.visible_probabilities,
            geometric=blocks.geometric,
        )
        batch["block_start"] = plan.start[self._part]
        batch["block_visible"] = plan.visible[self._part]
        batch["block_length"] = plan.length[self._part]
        if blocks.noise == "uniform":
            rng = np.random.default_rng([self._seed, _NOISE, step])
            rate, masked = _noise(rng, plan.start.shape, blocks.block_size)
            batch["block_rate"], batch["block_masked"] = rate[self._part], masked[self._part]
        return batch

    def state(self) -> int:
        """The step of the batch that comes next; batches prepared ahead do not count."""
        return self._step

    def restore(self, step: int) -> None:
        """Go on with the batch of `step`, as returned by :meth:`state`."""
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
            raise DataError(f"the loader's state is {step!r}; expected a step, 0 or more")
        self._step = int(step)

    def close(self) -> None:
        """End the background thread; without one this does nothing. Batches are then made on demand."""
        thread, self._thread, self._ahead = self._thread, None, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _numbers(self, step: int) -> np.ndarray:
        """Row numbers of the global batch of a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = self._order
        if order is None or order[0] != epoch:
            rng = np.random.default_rng([self._seed, _SHUFFLE, epoch])
            self._order = order = (epoch, rng.permutation(len(self._rows)))
        return order[1][index * self._batch_size : (index + 1) * self._batch_size]


def _noise(rng: np.random.Generator, blocks: tuple[int, int], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Share t and masked positions of each block; t is at least 1/G, so that its inverse stays bounded."""
    rate = np.maximum(rng.random(blocks), 1 / block_size).astype(np.float32)
    return rate, rng.random((*blocks, block_size)) < rate[..., None]

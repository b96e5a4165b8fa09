"""Training checkpoints: asynchronous, complete or absent, and bound to the run's contract.

`RUN/checkpoints/STEP/` holds the items `state` (parameters, optimiser, step; the loader's place is the step) and
`contract` (what must not change between saving and resuming).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from d3d_jax.errors import TrainingError
from d3d_jax.training.step import TrainState


class Checkpoints:
    """The checkpoints of one run. Use as a context manager: leaving it waits for saves under way."""

    def __init__(self, folder: str | Path, keep_last: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep_last, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(
            Path(folder).absolute(), options=options, item_names=("state", "contract")
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, contract: dict[str, Any], *, wait: bool = False) -> None:
        """Save in the background; `wait` returns only when the checkpoint is complete."""
        if self._manager.latest_step() != step:
            items = {"state": ocp.args.StandardSave(state._asdict()), "contract": ocp.args.JsonSave(contract)}
            self._manager.save(step, args=ocp.args.Composite(**items))
        if wait:
            self._manager.wait_until_finished()

    def check_contract(self, contract: dict[str, Any]) -> None:
        """Refuse to resume from the newest complete state under another contract than the saved one.

        Raises:
            TrainingError: naming every entry that changed.
        """
        step = self.latest()
        saved = self._manager.restore(step, args=ocp.args.Composite(contract=ocp.args.JsonRestore()))["contract"]
        changed = [
            f"{key}: saved {saved.get(key)!r}, now {contract[key]!r}"
            for key in contract
            if saved.get(key) != contract[key]
        ]
        if changed:
            raise TrainingError(
                f"step {step} was saved under another contract ({'; '.join(changed)}); "
                "restore the old settings, or train into another output_dir"
            )

    def restore(self, state: TrainState, step: int | None = None) -> TrainState:
        """The state of `step`, or the newest complete one, laid out as `state` is (also on other devices)."""
        step = self.latest() if step is None else step
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state._asdict())
        items = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        return TrainState(**items["state"])

"""Training checkpoints: asynchronous, complete or absent, and bound to the run's contract.

`RUN/checkpoints/STEP/` holds the items `state` (parameters, optimiser, step; the loader's place is the step) and
`contract` (what must not change between saving and resuming). A step appears under its number only when it is
complete, and older ones are removed only after that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from d3d_jax.errors import TrainingError
from d3d_jax.training.state import TrainState


class Checkpoints:
    """The checkpoints of one run. Use as a context manager: leaving it waits for saves under way.

    What a process that was killed had begun to save is removed on opening.
    """

    def __init__(self, folder: str | Path, keep_last: int):
        self._folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=("state", "contract"))
        self._under_way: int | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._manager.close()
        except Exception as error:
            if kind is None:  # else the error on its way out is the one to tell
                raise self._failure(error) from error

    def latest(self) -> int | None:
        """The newest complete step, or None. Asked before the first save: later, one under way may be counted."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, contract: dict[str, Any], *, wait: bool = False) -> None:
        """Save in the background; `wait` returns only when the checkpoint is complete.

        Raises:
            TrainingError: when this save or the one before it has failed, such as on a full disk.
        """
        try:
            if self._under_way != step:
                # First see how the last one ended: orbax may count a step that never became complete.
                self._manager.wait_until_finished()
                self._under_way = step
                items = {"state": ocp.args.StandardSave(state.items()), "contract": ocp.args.JsonSave(contract)}
                self._manager.save(step, args=ocp.args.Composite(**items))
            if wait:
                self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error

    def check(self) -> None:
        """See whether the save in the background has failed; does not wait for one that is still under way.

        Raises:
            TrainingError: when it has. Nothing else tells: `latest` counts that step all the same.
        """
        if not self._manager.is_saving_in_progress():
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                raise self._failure(error) from error

    def _failure(self, error: Exception) -> TrainingError:
        self._manager.reload()
        latest = self._manager.latest_step()
        kept = "no step is complete" if latest is None else f"the last complete step is {latest}"
        if "No space left on device" in str(error):
            reason, remedy = f"the disk of {self._folder} is full", "free some space"
        else:
            reason, remedy = f"{type(error).__name__}: {error}", f"see to {self._folder}"
        return TrainingError(
            f"step {self._under_way} could not be saved: {reason}; {kept}; {remedy} and run the same command to go on"
        )

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
        """The state of `step`, or the newest complete one, read straight to where the abstract `state` lies.

        The devices may be others, and more or fewer, than those it was saved from.
        """
        step = self.latest() if step is None else step
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.items())
        items = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))
        return TrainState(**items["state"])

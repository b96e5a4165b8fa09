"""What a training run left behind, as parameters and configs that can be written for use.

``RUN/checkpoints/STEP/`` holds the orbax items `state` (with the key `params`) and `contract` (the model's
shape and what was trained for); ``RUN/config.yaml`` the settings of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from d3d_jax import config as configs
from d3d_jax.checkpoints.hf_config import carried_keys, has_drafter_config, read_drafter_config
from d3d_jax.checkpoints.orbax_io import restore_tree
from d3d_jax.config import DrafterConfig, ModelConfig, TrainConfig
from d3d_jax.errors import CheckpointError


@dataclass(frozen=True)
class TrainedModel:
    """One step of a run: `params` in the stacked form on the host, float32; `drafter` None for a plain model.

    The parameters are the run's average of them where it kept one.

    `tokenizer_folder` is None when the run names none that is still there; `extras` are further keys of the
    config.json that the run started from.
    """

    step: int
    params: dict[str, Any]
    config: ModelConfig
    drafter: DrafterConfig | None
    tokenizer_folder: Path | None
    extras: dict[str, Any]


def read_run(run_dir: str | Path, step: int | None = None) -> TrainedModel:
    """The parameters of a run at `step`, or at the newest complete step.

    Raises:
        CheckpointError: when the run or the step is not there, or the parameters are not those of the model
            that the contract describes.
        ConfigError: when ``config.yaml`` cannot be read.
    """
    run_dir = Path(run_dir)
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist; expected the output_dir of `d3d train`")
    run = configs.load(TrainConfig, run_dir / "config.yaml")
    with ocp.CheckpointManager(
        folder.absolute(), options=ocp.CheckpointManagerOptions(read_only=True), item_names=("state", "contract")
    ) as manager:
        steps = sorted(manager.all_steps())
        if not steps or (step is not None and step not in steps):
            found = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{folder}: no complete step {'' if step is None else step}; complete steps: {found}")
        step = steps[-1] if step is None else step
        contract = manager.restore(step, args=ocp.args.Composite(contract=ocp.args.JsonRestore()))["contract"]
    model = configs.from_mapping(ModelConfig, contract["model"], where="contract.model")
    averaged = contract.get("ema_decay") is not None
    start = Path(run.init) if run.init and Path(run.init).is_dir() else None
    tokenizer = Path(run.tokenizer) if run.tokenizer and Path(run.tokenizer).is_dir() else start
    return TrainedModel(
        step=step,
        params=restore_tree(folder / str(step) / "state", model, under="average" if averaged else "params"),
        config=model,
        drafter=_drafter(run, contract, start) if contract["objective"] == "d3d" else None,
        tokenizer_folder=tokenizer,
        extras=carried_keys(start) if start else {},
    )


def _drafter(run: TrainConfig, contract: dict[str, Any], start: Path | None) -> DrafterConfig:
    """The drafter's fields; layers that an earlier pruning kept are counted in the model it was pruned from."""
    parent = read_drafter_config(start) if start and has_drafter_config(start) else None
    kept, earlier = run.init_layers, parent.kept_layers if parent else None
    if earlier is not None:
        kept = earlier if kept is None else tuple(earlier[i] for i in kept)
    return DrafterConfig(
        block_size=contract["block_size"],
        mask_token_id=contract["mask_token_id"],
        block_attention=contract["block_attention"],
        kept_layers=kept,
        target_model=parent.target_model if parent else run.init,
    )

"""A toy run that the training tests share: its model, and looks at what a run left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from d3d_jax.config import BlockConfig, MeshConfig, ModelConfig, RopeConfig, TrainConfig
from d3d_jax.devices.mesh import make_mesh
from d3d_jax.training.checkpointing import Checkpoints
from d3d_jax.training.optimizer import make_optimizer
from d3d_jax.training.state import StatePlan, TrainState, abstract_state

VOCAB, MASK = 24, 20
MODEL = ModelConfig(VOCAB, 32, 48, 2, 4, 2, 16, RopeConfig(1e4))
BLOCKS = BlockConfig(block_size=4, blocks_per_row=6)
STEPS = 6


def state_plan(run: TrainConfig) -> StatePlan:
    """The form of the state of a run of the toy."""
    return StatePlan(MODEL, make_optimizer(run.optimizer, run.steps), run.frozen, run.ema_decay is not None)


def saved(run: TrainConfig, devices: int = 2, step: int | None = None, mesh: MeshConfig | None = None) -> TrainState:
    """A saved state, the newest one if no step is given, laid out on a mesh of so many devices."""
    where = make_mesh(mesh or MeshConfig(), jax.devices()[:devices])
    layout = abstract_state(state_plan(run), where)
    with Checkpoints(Path(run.output_dir) / "checkpoints", 9) as checkpoints:
        return checkpoints.restore(layout, step)


def assert_equal(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.array_equal(a, b)


def records(run: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()]

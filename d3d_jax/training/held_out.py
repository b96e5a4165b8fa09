"""The acceptance of a drafter in training, on held-out responses, without the target (docs/algorithm.md 8).

It is what decoding would reach on these texts if they are the target's own, greedy or sampled as in use.
"""

from __future__ import annotations

from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding

from d3d_jax.acceptance.metrics import measure
from d3d_jax.acceptance.oracle import draft_everywhere
from d3d_jax.acceptance.walk import samples
from d3d_jax.config import DecodeConfig, DrafterConfig, TrainConfig
from d3d_jax.data.loader import Batches
from d3d_jax.devices.distributed import compiled_together
from d3d_jax.devices.sharding import BATCH, on_mesh, replicated
from d3d_jax.errors import ConfigError
from d3d_jax.models.qwen3 import Params
from d3d_jax.training.plan import Plan
from d3d_jax.training.state import TrainState

FIELDS = ("tokens", "document", "start", "position", "response")


class HeldOut:
    """Acceptance on the same held-out rows every time it is asked for; drafts with one compiled program.

    The rows are `acceptance_rows` of the validation data, rounded up to what the mesh can deal out.

    Raises:
        ConfigError: when there are too few held-out rows to deal out.
    """

    def __init__(self, config: TrainConfig, plan: Plan, shardings: TrainState, mesh: Mesh):
        assert plan.held_out is not None and config.mask_token_id is not None
        parts = mesh.shape["data"] * mesh.shape["fsdp"]
        rows = min(-(-config.acceptance_rows // parts), len(plan.held_out) // parts) * parts
        if not rows:
            raise ConfigError(
                f"{config.validation_data} fills {len(plan.held_out)} rows, fewer than the {parts} parts of the mesh "
                f"{dict(mesh.shape)}; give more validation data, or set acceptance_every: null"
            )
        process = (jax.process_index(), jax.process_count())
        batch = Batches(plan.held_out, rows, config.seed + 1, *process).at(0)
        place = NamedSharding(mesh, BATCH)
        self._rows = {name: jax.make_array_from_process_local_data(place, batch[name]) for name in FIELDS}
        size, dtype = config.blocks.block_size, jax.numpy.dtype(config.dtype)
        drafter = DrafterConfig(size, config.mask_token_id, config.block_attention)
        draft = partial(
            draft_everywhere,
            model=plan.model,
            drafter=drafter,
            num_token_ids=plan.num_token_ids,
            dtype=dtype,
            attention=config.attention,
        )

        def on_it(params: Params, rows: dict[str, jax.Array]):
            with on_mesh(mesh):
                return draft(params, rows)

        drafted = jax.jit(on_it, in_shardings=(shardings.params, place), out_shardings=replicated(mesh))
        self._draft = compiled_together(drafted, "acceptance")
        self._policies = {
            "sync": DecodeConfig(mode="sync", block_size=size),
            "redraft": DecodeConfig(mode="async", block_size=size, miss="redraft"),
            "keep": DecodeConfig(mode="async", block_size=size, miss="keep"),
        }
        self._block_size = size

    def __call__(self, params: Params) -> dict[str, float]:
        """`tau_sync`, `tau_async` and `hit_rate` (missed blocks drafted again), `tau_async_keep`, `hit_rate_keep`.

        What no whole round was counted for is left out.
        """
        found = jax.device_get(self._draft(params, self._rows))
        of = {name: measure(samples(found, policy), self._block_size) for name, policy in self._policies.items()}
        said = {
            "tau_sync": of["sync"].tau,
            "tau_async": of["redraft"].tau,
            "hit_rate": of["redraft"].hit_rate,
            "tau_async_keep": of["keep"].tau,
            "hit_rate_keep": of["keep"].hit_rate,
        }
        return {name: value for name, value in said.items() if value is not None}

"""Optimiser and learning-rate schedule, from optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

from d3d_jax.config import OptimizerConfig


def schedule(peak: float, steps: int, config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up over `warmup_fraction` of the steps, then a cosine to `final_fraction` of `peak`."""
    warmup = max(1, round(config.warmup_fraction * steps))
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1), peak * config.final_fraction)


def _matrices(params: Any) -> Any:
    """Muon treats the layers' matrices, stacked [L, out, in]; embeddings, head and norms go to Adam."""
    muon = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    in_layers = jax.tree.map(lambda w: muon if w.ndim == 3 else None, params["layers"])
    return {**{name: None for name in params}, "layers": in_layers}


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Gradient clipping by global norm, then AdamW, or Muon (Jordan et al. 2024) with Adam for the rest."""
    rate = schedule(config.learning_rate, steps, config)
    if config.name == "adamw":
        update = optax.adamw(rate, config.b1, config.b2, weight_decay=config.weight_decay)
    else:
        update = optax.contrib.muon(
            schedule(config.matrix_learning_rate, steps, config),
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_learning_rate=rate,
            muon_weight_dimension_numbers=_matrices,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)

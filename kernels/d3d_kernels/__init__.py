"""Attention for block-diffusion drafting. Knows arrays and masks, never models."""

from d3d_kernels.attention import BACKENDS, interval_attention, interval_decode
from d3d_kernels.intervals import (
    Intervals,
    causal_intervals,
    dense_mask,
    packed_intervals,
    training_intervals,
    verify_intervals,
)

__all__ = [
    "BACKENDS",
    "Intervals",
    "causal_intervals",
    "dense_mask",
    "interval_attention",
    "interval_decode",
    "packed_intervals",
    "training_intervals",
    "verify_intervals",
]

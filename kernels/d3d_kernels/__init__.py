"""Attention for block-diffusion drafting. Knows arrays and masks, never models."""

from d3d_kernels.attention import attention_plan, interval_attention, interval_decode
from d3d_kernels.backends import BACKENDS
from d3d_kernels.intervals import (
    Intervals,
    causal_intervals,
    dense_mask,
    packed_intervals,
    training_intervals,
    verify_intervals,
)
from d3d_kernels.merge import merge_lse
from d3d_kernels.plan import AttentionPlan

__all__ = [
    "BACKENDS",
    "AttentionPlan",
    "Intervals",
    "attention_plan",
    "causal_intervals",
    "dense_mask",
    "interval_attention",
    "interval_decode",
    "merge_lse",
    "packed_intervals",
    "training_intervals",
    "verify_intervals",
]

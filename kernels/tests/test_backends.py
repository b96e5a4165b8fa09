"""Choosing a backend: by device or by name, and refused with the reason and the way out."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from d3d_kernels import BACKENDS, Intervals, attention_plan, interval_attention, interval_decode, merge_lse
from d3d_kernels.backends import ATTENTION, DECODE, choose

BF16 = [jnp.bfloat16] * 3


def on(monkeypatch, platform: str, capability: str | None = None) -> None:
    """Lets `auto` see a device of this platform."""
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


@pytest.mark.parametrize(
    ("platform", "capability", "operation", "expected"),
    [
        ("cpu", None, ATTENTION, "xla"),
        ("tpu", None, ATTENTION, "mosaic_tpu"),
        ("tpu", None, DECODE, "mosaic_tpu"),
        ("gpu", "9.0", DECODE, "mosaic_gpu"),
        ("gpu", "8.0", DECODE, "triton"),
        ("gpu", "8.0", ATTENTION, "triton"),
    ],
)
def test_auto_is_the_backend_of_the_device(monkeypatch, platform, capability, operation, expected):
    on(monkeypatch, platform, capability)
    assert choose("auto", operation, 128, BF16) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_named_backend_is_used_on_any_device(monkeypatch, backend):
    on(monkeypatch, "tpu")
    assert choose(backend, DECODE, 128, BF16) == backend


def test_auto_on_hopper_takes_float32_to_triton_since_wgmma_has_16_bits(monkeypatch):
    on(monkeypatch, "gpu", "9.0")
    assert choose("auto", DECODE, 64, [jnp.float32] * 3) == "triton"


def test_auto_is_never_another_kind_of_implementation_because_shapes_are_awkward(monkeypatch):
    on(monkeypatch, "tpu")
    with pytest.raises(
        ValueError, match=r"'auto' cannot take.*mosaic_tpu: it takes a head dim H of 64.*not 80.*can: xla$"
    ):
        choose("auto", ATTENTION, 80, BF16)


def test_a_named_backend_is_refused_with_its_limit_and_those_that_can():
    with pytest.raises(
        ValueError, match=r"mosaic_gpu: it takes q, k and v of one type.*not float32.*xla, triton, mosaic_tpu"
    ):
        choose("mosaic_gpu", DECODE, 64, [jnp.float32] * 3)
    with pytest.raises(ValueError, match=r"of one type.*not bfloat16, float32"):
        choose("triton", DECODE, 64, [jnp.float32, jnp.bfloat16])


def test_an_unknown_platform_has_no_auto(monkeypatch):
    on(monkeypatch, "abacus")
    with pytest.raises(ValueError, match=r"no kernels for platform 'abacus'"):
        choose("auto", ATTENTION, 64, BF16)


def operands() -> tuple:
    q, k = jnp.ones((1, 2, 4, 64)), jnp.ones((1, 1, 6, 64))
    return q, k, k, Intervals(*(jnp.full((1, 4), bound) for bound in (0, 3, 0, 0)))


def test_interpreting_is_for_kernels():
    with pytest.raises(ValueError, match="interpret is for kernels"):
        interval_attention(*operands(), interpret=True)


@pytest.mark.parametrize("backend", ["triton", "mosaic_tpu"])
def test_decoding_on_a_kernel_backend_refuses_to_be_differentiated(backend):
    q, _, _, intervals = operands()
    cache = jnp.ones((1, 1, 32, 64))

    def total(q, **chosen):
        return interval_decode(q, cache, cache, intervals, **chosen).sum()

    with pytest.raises(ValueError, match=f"'{backend}' has no gradients; differentiate interval_attention, or name"):
        jax.grad(total)(q, backend=backend, interpret=True)
    assert jax.grad(total)(q, backend="xla").shape == q.shape


def test_splits_start_at_one():
    with pytest.raises(ValueError, match="num_splits is 'auto' or at least 1, not 0"):
        interval_decode(*operands(), num_splits=0)


def test_new_keys_of_other_heads_are_refused():
    q, k, v, intervals = operands()
    with pytest.raises(ValueError, match="beside a cache of"):
        interval_decode(q, k, v, intervals, k_new_BKTH=k[..., :32], v_new_BKTH=v[..., :32])


def test_a_plan_for_other_shapes_is_refused():
    q, k, v, intervals = operands()
    longer = Intervals(*(jnp.pad(bound, ((0, 0), (0, 600))) for bound in intervals))
    plan = attention_plan(jnp.ones((1, 2, 604, 64)), k, longer, backend="mosaic_tpu")
    with pytest.raises(ValueError, match="make the plan by attention_plan"):
        interval_attention(q, k, v, intervals, plan=plan, backend="mosaic_tpu", interpret=True)
    assert attention_plan(q, k, intervals, backend="xla") is None


def test_attentions_over_parts_of_the_keys_merge_to_the_attention_over_all():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, heads, 9, 16)), jnp.float32) for heads in (4, 2, 2))
    lo, hi = (jnp.asarray(rng.integers(0, 9, (2, 9)), jnp.int32) for _ in range(2))
    hi = hi.at[0, 3].set(0)  # sees nothing at all
    whole = interval_attention(q, k, v, Intervals(lo, hi, lo * 0, lo * 0), return_lse=True)
    bounds = [(0, 4), (4, 5), (5, 9)]
    parts = []
    for first, last in bounds:
        part = Intervals(jnp.maximum(lo, first), jnp.minimum(hi, last), lo * 0, lo * 0)
        parts.append(interval_attention(q, k, v, part, return_lse=True))
    output, lse = merge_lse(*zip(*parts, strict=True))
    np.testing.assert_allclose(output, whole[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, whole[1], rtol=0, atol=1e-5)
    assert (np.asarray(output)[0, :, 3] == 0).all() and (np.asarray(lse)[0, :, 3] == -np.inf).all()
    score = np.einsum("h,sh->s", q[1, 3, 0], k[1, 1]) / 4
    seen = slice(int(lo[1, 0]), max(int(lo[1, 0]), int(hi[1, 0])))
    expected = np.log2(np.exp(score[seen]).sum()) if seen.stop > seen.start else -np.inf
    np.testing.assert_allclose(lse[1, 3, 0], expected, atol=1e-5)


def test_merging_needs_an_lse_for_each_output():
    with pytest.raises(ValueError, match="one lse for each output, got 1 and 2"):
        merge_lse([jnp.ones((2, 4))], [jnp.ones(2)] * 2)

"""What compiled text tells of memory: on a text written for it, and on programs that this machine's compiler made."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from d3d_kernels.compiled_text import collectives, copies, main_memory_bytes, parse

TEXT = """HloModule step
%fused_gather (param_0.1: bf16[1000,64], param_1.1: s32[4]) -> bf16[4,64] {
  %param_0.1 = bf16[1000,64]{1,0} parameter(0)
  %param_1.1 = s32[4]{0} parameter(1)
  ROOT %gather.1 = bf16[4,64]{1,0:S(1)} gather(%param_0.1, %param_1.1), offset_dims={1}
}
%fused_turn (param_0.2: bf16[64,32]) -> bf16[32,64] {
  %param_0.2 = bf16[64,32]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[32,64]{1,0} transpose(%param_0.2), dimensions={1,0}
}
%body (state: (bf16[8,128], s32[])) -> (bf16[8,128], s32[]) {
  %state = (bf16[8,128]{1,0}, s32[]) parameter(0)
  %cache = bf16[8,128]{1,0} get-tuple-element(%state), index=0
  %at = s32[]{:S(6)} get-tuple-element(%state), index=1
  %new = bf16[1,128]{1,0:S(1)} custom-call(%cache), custom_call_target="attend"
  %written = bf16[8,128]{1,0} dynamic-update-slice(%cache, %new, %at, %at)
  %sums = f32[4]{0:S(1)} all-reduce(%new), to_apply=%body
  %whole = (bf16[8,128]{1,0}, bf16[16,128]{1,0}) all-gather-start(%cache), dimensions={0}
  ROOT %turn = (bf16[8,128]{1,0}, s32[]) tuple(%written, %at)
}
%test (state.1: (bf16[8,128], s32[])) -> pred[] {
  %state.1 = (bf16[8,128]{1,0}, s32[]) parameter(0)
  ROOT %more = pred[]{:S(6)} constant(true)
}
ENTRY %main (table: bf16[1000,64], ids: s32[4], weight: bf16[64,32], cache.1: bf16[8,128]) -> (bf16[8,128], s32[]) {
  %table = bf16[1000,64]{1,0} parameter(0)
  %ids = s32[4]{0:S(1)} parameter(1)
  %weight = bf16[64,32]{1,0} parameter(2)
  %cache.1 = bf16[8,128]{1,0} parameter(3)
  %embedded = bf16[4,64]{1,0:S(1)} fusion(%table, %ids), kind=kCustom, calls=%fused_gather
  %ahead = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%weight)
  %here = bf16[64,32]{1,0:S(1)} copy-done(%ahead)
  %turned = bf16[32,64]{1,0} fusion(%weight), kind=kLoop, calls=%fused_turn
  %back = (bf16[64,32]{1,0}, bf16[64,32]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%here)
  %zero = s32[] constant(0)
  %begin = (bf16[8,128]{1,0}, s32[]) tuple(%cache.1, %zero)
  ROOT %loop = (bf16[8,128]{1,0}, s32[]) while(%begin), condition=%test, body=%body
}
"""


def test_traffic_counts_what_crosses_main_memory_once():
    weight, cache, row = 64 * 32 * 2, 8 * 128 * 2, 128 * 2
    fetched, back, turned = weight, weight, 2 * weight
    gathered, exchanged = 4 * 64 * 2, 4 * cache
    assert main_memory_bytes(parse(TEXT)) == gathered + fetched + back + turned + cache + row + exchanged


def test_copies_are_what_holds_nothing_new_and_is_no_fetch_into_the_chip():
    assert copies(parse(TEXT), 1000) == [("turned", 4096), ("back", 4096), ("whole", 4096)]
    assert copies(parse(TEXT), 5000) == []


def test_collectives_are_counted_in_loops_too():
    assert collectives(parse(TEXT)) == {"all-reduce": 1, "all-gather": 1}


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="this one has none"):
        parse("HloModule empty")


@pytest.mark.parametrize("donated", [True, False])
def test_a_cache_that_is_not_donated_is_seen_to_be_copied(donated):
    @partial(jax.jit, donate_argnums=(0,) if donated else ())
    def step(cache, new, at):
        return jax.lax.dynamic_update_slice(cache, new, (0, at, 0))

    shapes = jnp.zeros((4, 512, 64)), jnp.zeros((4, 1, 64)), jnp.int32(3)
    found = copies(parse(step.lower(*shapes).compile().as_text()), 4 * 512 * 64 * 2)
    assert bool(found) == (not donated)

"""How much device memory a pair needs, from its configs alone."""

from __future__ import annotations

from dataclasses import dataclass

from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.models.qwen3 import parameter_count

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes of one model on its device group.

    cache: keys and values of all rows. logits: the largest float32 scores of a round, those of a block for a target
    and those of the whole packed pass for a drafter. What the compiler keeps in between comes on top.
    """

    weights: int
    cache: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits


def plan(
    config: ModelConfig, drafter: DrafterConfig | None, *, block_size: int, max_len: int, batch: int, dtype: str
) -> Memory:
    """Memory of a target (`drafter` None) or a drafter.

    Args:
        block_size: G, tokens that the target verifies at once; 1 for plain decoding.
        max_len: cache slots of a row.
        batch: rows decoded together.
        dtype: of weights and cache, a key of :data:`BYTES`.
    """
    size = BYTES[dtype]
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    rows = block_size if drafter is None else drafter.block_size**2
    return Memory(
        weights=parameter_count(config) * size,
        cache=batch * max_len * slot,
        logits=batch * rows * config.vocab_size * 4,
    )

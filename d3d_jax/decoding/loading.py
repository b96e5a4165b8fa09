"""A pair of model folders: checked from their small files first, loaded afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from d3d_jax.checkpoints.convert import Source, as_dtype, fill
from d3d_jax.checkpoints.hf_config import has_drafter_config, read_drafter_config, read_model_config
from d3d_jax.checkpoints.special_tokens import check_mask_id, read_eos_ids, read_json, read_pad_ids
from d3d_jax.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingParams
from d3d_jax.data.chat import load_tokenizer
from d3d_jax.decoding.placement import Model, attention_of, check_pair
from d3d_jax.errors import CheckpointError, CompatibilityError, ConfigError


class LoadedPair(NamedTuple):
    """Target and drafter in host memory, with what the target's folder says of text.

    stop_ids: ids that end a text. num_token_ids: ids that the tokenizer knows, special ones included.
    """

    target: Model
    drafter: Model | None
    tokenizer: Any
    stop_ids: tuple[int, ...]
    num_token_ids: int


@dataclass(frozen=True)
class OpenedPair:
    """A pair that has passed every check; no tensor is loaded yet (see :func:`open_pair`)."""

    target: Source
    drafter: Source | None
    drafter_config: DrafterConfig | None
    tokenizer: Any
    stop_ids: tuple[int, ...]
    num_token_ids: int

    @property
    def block_size(self) -> int | None:
        """Tokens of a block, as the drafter was trained; None without a drafter."""
        return None if self.drafter_config is None else self.drafter_config.block_size

    def load(self, dtype: Any = "float32", on_tensor: Callable[[str], None] = lambda name: None) -> LoadedPair:
        """Read the tensors as `dtype` into host memory, from where an engine takes them to its devices."""
        host = _host_memory()
        models = []
        for source, drafter in ((self.target, None), (self.drafter, self.drafter_config)):
            if source is not None:
                params = fill(source, dtype=as_dtype(dtype), sharding_for=host, on_tensor=on_tensor)
                models.append(Model(source.config, params, drafter))
        drafter_model = models[1] if len(models) > 1 else None
        return LoadedPair(models[0], drafter_model, self.tokenizer, self.stop_ids, self.num_token_ids)

    def check_attention(self, decode: DecodeConfig, devices: tuple[jax.Device, jax.Device], dtype: Any) -> None:
        """Refuse a backend of attention that cannot serve a model on its device; both devices are of one kind.

        Raises:
            CompatibilityError: with the reason and the backends that can.
        """
        for source, device in zip((self.target, self.drafter), devices, strict=True):
            if source is not None:
                attention_of(source.config, decode, device, as_dtype(dtype))

    def tensor_count(self) -> int:
        """Stored tensors that loading reads, for a progress bar."""
        return sum(len(source.ledger.sources) for source in (self.target, self.drafter) if source is not None)


def open_pair(
    target_path: str | Path, draft_path: str | Path | None = None, *, block_size: int | None = None
) -> OpenedPair:
    """Check two model folders and how they go together, without loading a tensor or touching a device.

    Args:
        target_path: Hugging Face folder of the target, with its tokenizer.
        draft_path: folder of the drafter; None to decode with the target alone.
        block_size: the block size asked for; the drafter's own when None.

    Raises:
        CheckpointError: a folder or file that is missing or incomplete, or no drafter where one should be.
        ConfigError: a config.json that cannot be used, or a mask id that means something else.
        CompatibilityError: a pair, or a block size, that do not go together.
    """
    target_path = Path(target_path)
    config = read_model_config(target_path)
    target = Source(target_path)
    tokenizer = load_tokenizer(target_path)
    stop_ids, known = read_eos_ids(target_path), len(tokenizer)
    if not stop_ids:
        raise CheckpointError(f"{target_path} names no end of sequence; add eos_token_id to generation_config.json")
    drafter, drafter_config = None, None
    if draft_path is not None:
        draft_path = Path(draft_path)
        draft_config = read_model_config(draft_path)
        if not has_drafter_config(draft_path):
            raise CompatibilityError(
                f"{draft_path} is a plain model: its config.json has no d3d_config; name a trained drafter, or leave "
                "the drafter out and use mode 'ar'"
            )
        drafter_config = read_drafter_config(draft_path)
        _check_pair(config, draft_config, drafter_config, block_size, known)
        _check_vocabulary(target_path, draft_path)
        try:
            check_mask_id(drafter_config.mask_token_id, config.vocab_size, stop_ids, read_pad_ids(target_path))
        except ConfigError as error:
            raise ConfigError(f"{draft_path} with target {target_path}: {error}") from error
        drafter = Source(draft_path)
    else:
        check_pair(Model(config, {}), None, DecodeConfig(mode="ar"), known)
        if block_size is not None:
            raise CompatibilityError(f"block_size={block_size} is for drafting, but no drafter is given")
    return OpenedPair(target, drafter, drafter_config, tokenizer, stop_ids, known)


def load_pair(
    target_path: str | Path,
    draft_path: str | Path | None = None,
    *,
    dtype: Any = "float32",
    block_size: int | None = None,
) -> LoadedPair:
    """Open and load; arguments and errors are those of :func:`open_pair`."""
    return open_pair(target_path, draft_path, block_size=block_size).load(dtype)


def sampling_defaults(folder: str | Path) -> SamplingParams:
    """How a model's own generation_config.json says to sample; greedy where it says nothing.

    Raises:
        ConfigError: for settings that make no sense.
    """
    file = Path(folder) / "generation_config.json"
    stored = read_json(file) if file.is_file() else {}
    if not stored.get("do_sample", False):
        return SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p")
    found = {name: stored[name] for name in names if stored.get(name) is not None}
    return SamplingParams(**{"temperature": 1.0, **found})


def _check_pair(
    target: ModelConfig, drafter: ModelConfig, block: DrafterConfig, block_size: int | None, known: int
) -> None:
    """The engine's own checks, before there are weights."""
    asked = DecodeConfig(block_size=block_size or block.block_size)
    check_pair(Model(target, {}), Model(drafter, {}, block), asked, known)


def _check_vocabulary(target: Path, drafter: Path) -> None:
    """Refuse a drafter whose own tokenizer gives other ids. A drafter folder need not have one."""
    files = [folder / "tokenizer.json" for folder in (target, drafter)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    ids = [_token_ids(read_json(file)) for file in files]
    other = [token for token in ids[0].keys() | ids[1].keys() if ids[0].get(token) != ids[1].get(token)]
    if other:
        raise CompatibilityError(
            f"target and drafter have unlike tokenizers: {len(other)} tokens of {files[0]} and {files[1]} have "
            f"different ids, such as {min(other)!r}; a drafter must use its target's"
        )


def _token_ids(stored: dict[str, Any]) -> dict[str, int]:
    """Token -> id, from the contents of a tokenizer.json."""
    vocabulary = (stored.get("model") or {}).get("vocab")
    added = {token["content"]: token["id"] for token in stored.get("added_tokens") or ()}
    return {**(vocabulary if isinstance(vocabulary, dict) else {}), **added}


def _host_memory() -> Callable[..., jax.sharding.Sharding] | None:
    """Where leaves go: host memory, also beside an accelerator; the default device where JAX has no CPU."""
    try:
        host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return None
    return lambda path, shape, axes: host

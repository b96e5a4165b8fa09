"""Configuration: frozen dataclasses, read from YAML files by `config_files`.

Field names are those of the ecosystem (transformers for models, docs/algorithm.md for the rest).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from d3d_jax.config_files import from_mapping, load, to_mapping
from d3d_jax.errors import ConfigError

__all__ = [
    "AttentionConfig",
    "BlockConfig",
    "DecodeConfig",
    "DrafterConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RopeConfig",
    "SamplingParams",
    "TrainConfig",
    "from_mapping",
    "load",
    "to_mapping",
]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `theta` has no default: a guessed one is wrong without an error.

    `rope_type` is `default` or `yarn`; the remaining fields are YaRN's, as transformers names them.
    """

    theta: float
    rope_type: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ConfigError(f"rope.theta={self.theta} must be above 0")
        if self.rope_type == "yarn":
            if self.original_max_position_embeddings is None:
                raise ConfigError(
                    "rope_type 'yarn' needs original_max_position_embeddings, the context before stretching; "
                    "a guessed one gives other frequencies without an error"
                )
            return
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("theta", "rope_type")]
        given = [name for name in names if getattr(self, name) != getattr(RopeConfig, name)]
        if given:
            raise ConfigError(f"rope_type 'default' takes no {', '.join(given)}; did you mean rope_type 'yarn'?")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense Qwen3 model. Field names and meanings are transformers'."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; grouped-query attention needs one"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs of channels")


@dataclass(frozen=True)
class DrafterConfig:
    """What makes a Qwen3-shaped model a block-diffusion drafter (docs/algorithm.md 2).

    `block_attention`: masked tokens see their whole block (`bidirectional`) or its past (`causal`).
    `kept_layers`: indices of the layers kept from the model it was pruned from, in order.
    """

    block_size: int
    mask_token_id: int
    block_attention: Literal["bidirectional", "causal"] = "bidirectional"
    kept_layers: tuple[int, ...] | None = None
    target_model: str | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ConfigError(f"block_size={self.block_size}: a block is one anchor and at least one draft")


@dataclass(frozen=True)
class SamplingParams:
    """How the target chooses a token. `temperature=0` is greedy; then the other fields must be off.

    Filters are applied in transformers' order: temperature, top-k, top-p, min-p. `top_k=0`,
    `top_p=1` and `min_p=0` mean off. `seed` keys the noise by absolute position.

    `max_tokens`: most new tokens; None is as many as there is room for. `stop`: texts that end the output, which
    they are then cut from. `stop_token_ids`: ids that end it beside the model's own; `ignore_eos`: the model's own
    do not. The id that ends an output is part of it. `logprobs`: also give the log-probability of each token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop must be a list of texts, none of them empty; got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = (
            (self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be at least 1, or None for no limit"),
            (all(i >= 0 for i in self.stop_token_ids), "stop_token_ids must be token ids, 0 or above"),
            (self.temperature >= 0, "temperature must be 0 (greedy) or above"),
            (self.top_k >= 0, "top_k must be 0 (off) or above"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]; 1 is off"),
            (0 <= self.min_p < 1, "min_p must be in [0, 1); 0 is off"),
            (0 <= self.seed < 2**32, "seed must be in [0, 2**32)"),
        )
        for ok, text in checks:
            if not ok:
                raise ConfigError(f"{text}; got {self}")
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            raise ConfigError(
                f"temperature=0 is greedy and ignores top_k, top_p and min_p, yet they are set: {self}; "
                "set a temperature above 0, or leave the filters off"
            )


@dataclass(frozen=True)
class AttentionConfig:
    """What computes attention.

    `backend`: one of `d3d_kernels.BACKENDS`, which is used or refused, never replaced; `auto` is that of the device
    that the model lies on (on CPU `xla`). `interpret`: run the named kernels on the CPU, slowly and with the same
    arithmetic; for tests.
    """

    backend: Literal["auto", "xla", "mosaic_gpu", "triton", "mosaic_tpu"] = "auto"
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.interpret and self.backend not in ("triton", "mosaic_tpu"):
            raise ConfigError(
                f"attention.interpret runs a kernel of triton or mosaic_tpu on the CPU, but attention.backend is "
                f"{self.backend!r}; name one of the two, or leave interpret out"
            )


@dataclass(frozen=True)
class DecodeConfig:
    """One way of decoding.

    `mode`: `ar` (the target alone), `sync` (draft, then verify), `async` (draft the successors of every
    outcome while the target verifies). `block_size` G. `outcomes`: how many outcomes of a block get a
    successor, `all` or the M likeliest. `miss`: verify the kept tail, or draft again, when the bonus token
    was not foreseen. `ban_rejected`: a successor never starts with the token just rejected.
    `bonus`: how a successor's first token is drafted: `masked` leaves it open, `anchored` gives it, once for each of
    the `candidates` likeliest bonus tokens of an outcome, `both` does both. `row_budget`: most rows of successors in a
    packed pass, `block_size` each; the likeliest outcomes and candidates are drafted.
    `drafting`: `always`, or `auto`: without drafting ahead, or not at all, while that gives more tokens a second.
    `on_draft_failure`: raise, or with a warning and the same tokens go on: `plain`, the target alone, `retry`, from
    fresh caches, and alone if that gives nothing.
    `stall_s`: seconds without a result that count as such a failure; None waits for ever.
    `step_by_step`: wait after every program; the same tokens and round trace, for tests and timing.
    `attention`: what computes attention, of both models.
    """

    mode: Literal["ar", "sync", "async"] = "async"
    block_size: int = 16
    outcomes: Literal["all", "auto"] | int = "all"
    miss: Literal["keep", "redraft", "auto"] = "redraft"
    ban_rejected: bool = True
    bonus: Literal["masked", "anchored", "both"] = "masked"
    candidates: Literal["auto"] | int = 2
    row_budget: int | None = None
    drafting: Literal["always", "auto"] = "always"
    draft_sampling: Literal["argmax", "gumbel"] = "argmax"
    on_draft_failure: Literal["error", "plain", "retry"] = "error"
    stall_s: float | None = None
    step_by_step: bool = False
    lookahead: int = 2
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if self.mode != "ar" and self.block_size < 2:
            raise ConfigError(f"block_size={self.block_size}: a block is one anchor and at least one draft")
        if isinstance(self.outcomes, int) and not 1 <= self.outcomes <= self.block_size:
            raise ConfigError(f"outcomes={self.outcomes} must be 'all', 'auto' or 1..block_size={self.block_size}")
        if isinstance(self.candidates, int) and self.candidates < 1:
            raise ConfigError(f"candidates={self.candidates} must be 'auto' or at least 1, a bonus token to anchor on")
        if self.bonus == "masked" and self.row_budget is not None:
            raise ConfigError(f"row_budget={self.row_budget} is for anchored successors; set outcomes=M, or bonus")
        if self.bonus == "anchored" and self.outcomes != "all":
            raise ConfigError(f"outcomes={self.outcomes} counts open successors; bonus='anchored' takes row_budget")
        if self.bonus != "masked" and self.row_budget is not None:
            masked = 1 if self.bonus == "anchored" else self.block_size
            masked = self.outcomes if isinstance(self.outcomes, int) else masked
            if self.row_budget < (masked + 1) * self.block_size:
                rows = f"{masked} masked and one anchored successor of {self.block_size} tokens take"
                raise ConfigError(f"row_budget={self.row_budget}: {rows} {(masked + 1) * self.block_size} rows")
        if self.stall_s is not None and self.stall_s <= 0:
            raise ConfigError(f"stall_s={self.stall_s}: expected seconds above 0, or None to wait for ever")
        if self.lookahead < 1:
            raise ConfigError(f"lookahead={self.lookahead}: at least one round must be in flight")

    @property
    def num_candidates(self) -> int:
        """k, most candidates that are kept for each place of a drafted block."""
        most = 4 if self.candidates == "auto" else self.candidates
        return 0 if self.bonus == "masked" else most

    @property
    def ranks_branches(self) -> bool:
        """Whether the drafter's confidence is needed, to choose what is drafted ahead."""
        return self.outcomes != "all" or self.bonus != "masked"


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; `data=-1` takes what the other two leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class BlockConfig:
    """How masked blocks are laid over a response in training (docs/algorithm.md 7).

    `starts`: `partition` tiles the response from a random phase, `anchors` draws random starts.
    `blocks_per_row`: masked blocks in one training row. `visible_none` and `visible_one` are the shares of
    blocks with 0 and 1 visible leading tokens; the rest is geometric with `visible_decay`. `noise`: behind those
    every token is masked (`full`, as drafting has it), or each with a probability t, drawn for the block from U(0, 1),
    and the loss is divided by t (`uniform`, as diffusion language models are trained).
    """

    block_size: int = 16
    blocks_per_row: int = 24
    starts: Literal["partition", "anchors"] = "partition"
    visible_none: float = 0.7
    visible_one: float = 0.2
    visible_decay: float = 0.9
    noise: Literal["full", "uniform"] = "full"

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ConfigError(f"blocks.block_size={self.block_size}: a block is one anchor and at least one draft")
        if self.blocks_per_row < 1:
            raise ConfigError(f"blocks.blocks_per_row={self.blocks_per_row}: a row has at least one block")
        none, one = self.visible_none, self.visible_one
        if min(none, one) < 0 or none + one > 1 + 1e-9:
            raise ConfigError(f"blocks.visible_none={none} and visible_one={one} are shares; their sum is at most 1")
        if not 0 < self.visible_decay <= 1:
            raise ConfigError(f"blocks.visible_decay={self.visible_decay} must be in (0, 1]")


@dataclass(frozen=True)
class LossConfig:
    """Weights of the loss parts. `gamma` None takes docs/algorithm.md's value for the block size.

    `chunk`: tokens of each row whose logits exist at one time. `kd_weight`: of the divergence of a drafter's masked
    positions from the target's stored likeliest tokens (docs/algorithm.md 7).
    """

    ar_weight: float = 1.0
    gamma: float | None = None
    chunk: int = 128
    prompt_weight: float = 0.0
    kd_weight: float = 0.0

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ("ar_weight", "prompt_weight", "kd_weight")}
        if min(weights.values()) < 0:
            raise ConfigError(f"loss weights {weights}: expected 0 or above")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for matrices with AdamW for the rest; cosine decay after a linear warm-up."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 2e-5
    matrix_learning_rate: float = 0.02
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    warmup_fraction: float = 0.04
    final_fraction: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True)
class WatchConfig:
    """Where a training run is watched, beside the terminal and metrics.jsonl.

    `tensorboard`: event files in `output_dir`/tensorboard. `wandb_project`: a run of Weights & Biases there, called
    `wandb_name`; `wandb_mode` `offline` needs no network. `peak_tflops`: 1e12 FLOP/s of a device in the run's type,
    for the MFU of devices that `training.throughput` does not know.
    """

    tensorboard: bool = False
    wandb_project: str | None = None
    wandb_name: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.wandb_project is None and (self.wandb_name is not None or self.wandb_mode != "online"):
            raise ConfigError("watch.wandb_name and wandb_mode are for wandb; set watch.wandb_project, or leave them")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise ConfigError(f"watch.peak_tflops={self.peak_tflops} must be above 0")


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    `objective`: `ar` is the plain next-token loss (how the embedded target is made), `d3d` the drafter's.
    `train_data`, `validation_data`: a JSONL file or a folder of `d3d dataset`, or a list of them.
    `init`: a HF folder to start from, or None with `model` for fresh weights. `init_layers` picks layers of it.
    `dtype`: computation; master weights are float32. `micro_batches`: parts that a batch is computed in, one after
    the other, to need less memory; the step is that of the whole batch. `frozen`: parameters that stay as they are,
    by name, such as `embed_tokens` or `layers.q_proj`, or `layers` for all of them. `ema_decay`: keep a running
    average of the weights, such as 0.999; it is what is validated and exported. `acceptance_every`: steps between
    measurements of a drafter's acceptance on `acceptance_rows` rows of the validation data; None for none.
    """

    objective: Literal["ar", "d3d"]
    train_data: str | tuple[str, ...]
    output_dir: str
    steps: int
    batch_size: int
    row_length: int = 512
    validation_data: str | tuple[str, ...] | None = None
    model: ModelConfig | None = None
    init: str | None = None
    init_layers: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    block_attention: Literal["bidirectional", "causal"] = "bidirectional"
    tokenizer: str | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    micro_batches: int = 1
    frozen: tuple[str, ...] = ()
    ema_decay: float | None = None
    save_every: int = 200
    keep_last: int = 2
    validate_every: int = 200
    acceptance_every: int | None = 200
    acceptance_rows: int = 32
    log_every: int = 10
    mesh: MeshConfig = field(default_factory=MeshConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    blocks: BlockConfig = field(default_factory=BlockConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        names = ("steps", "batch_size", "row_length", "micro_batches", "save_every", "keep_last")
        names += ("validate_every", "acceptance_rows", "log_every")
        names += ("acceptance_every",) if self.acceptance_every is not None else ()
        wrong = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) < 1]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: expected at least 1")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay={self.ema_decay} must lie between 0 and 1, such as 0.999")

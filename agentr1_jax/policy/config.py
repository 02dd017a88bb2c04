"""Shape of a decoder (Qwen2.5, Qwen3, Llama and mixtures of them), and the section `policy` of a config."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge
from pydantic.dataclasses import dataclass

from agentr1_jax.validation import STRICT, Count, NonNegative, Positive, Whole

Projection = Literal["query", "key", "value", "out", "gate", "up", "down"]
Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Remat = Literal["none", "dots", "full"]
Precision = Literal["default", "highest"]
Attention = Literal["xla", "dense", "splash", "splash_tree", "cudnn"]
Critic = Literal["none", "shared_trunk", "separate"]

PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
CRITICS: tuple[Critic, ...] = get_args(Critic)


@dataclass(frozen=True, config=STRICT)
class RopeScaling:
    """Stretching of rotary frequencies for long contexts; see `decoder.frequencies`.

    Attributes:
      kind: `linear`, `llama3` (Llama 3.1, https://arxiv.org/abs/2407.21783) or `yarn` (https://arxiv.org/abs/2309.00071).
      factor: how much longer the slow waves become.
      low_frequency, high_frequency: not of `linear`: waves of which fewer (or more) than this number fit into
        `original_positions` are stretched whole (or not at all).
      original_positions: not of `linear`: context length of the first training.
      magnitude: of `yarn`: factor of rotated queries and keys.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: Positive
    low_frequency: Positive = 1.0
    high_frequency: Positive = 4.0
    original_positions: Count = 8192
    magnitude: Positive = 1.0


@dataclass(frozen=True, config=STRICT)
class YarnConfig:
    """Section `policy.yarn`: contexts longer than those of the first training, by YaRN with the values of its paper.

    Attributes:
      factor: how many times as long; 1 for none.
      original_positions: context length of the first training; None: `max_positions` of the preset or the weights.
    """

    factor: Annotated[float, Ge(1)] = 1.0
    original_positions: Count | None = None


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Section `policy.lora`: low-rank adapters, y = xW + α/r · (xA)B (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    Attributes:
      rank: r, columns of A; 0 for no adapters.
      alpha: α.
      targets: projections that have an adapter.
    """

    rank: Whole = 0
    alpha: NonNegative = 16.0
    targets: tuple[Projection, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        if self.rank and not self.targets:
            raise ValueError("targets is empty; adapters need at least one projection")


@dataclass(frozen=True, config=STRICT)
class DecoderConfig:
    """Shape and numerics of a decoder.

    Attributes:
      vocab_size: rows of the embedding; every token id is below it. 0 in a preset: as many as the tokenizer has.
      width: size of the residual stream.
      layers: number of blocks, scanned.
      kv_heads: key and value heads; divides `heads`, the number of query heads.
      hidden: inner size of the SwiGLU.
      rope_theta: base of the rotary frequencies.
      qkv_bias: True if query, key and value have a bias (Qwen2).
      qk_norm: True if each query and key head is normalised before its rotation (Qwen3).
      tied: True if the output head is the embedding.
      max_positions: longest context it was made for; 0 if unknown.
      dtype: of activations and matmuls; norms, softmax and logits are float32 in any case.
      param_dtype: of parameters.
      reduce_dtype: in which gradients of the layers are summed over the devices of `fsdp`; None: that of parameters.
      precision: of matmuls in float32: `highest`, or the device's `default`, which on TPUs and GPUs rounds operands.
      remat: what the backward pass computes again: `none`, `dots` (all but matmuls with weights), `full` (each block).
      attention: implementation for packed rows in training; see `attention.PackedRows`.
      lora: low-rank adapters, which are then all that is trained of the decoder.
    """

    vocab_size: Whole
    width: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    hidden: Count
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    max_positions: Whole = 0
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"
    reduce_dtype: Dtype | None = None
    precision: Precision = "default"
    remat: Remat = "none"
    attention: Attention = "xla"
    lora: LoraConfig = LoraConfig()

    def __post_init__(self) -> None:
        if self.precision != "default" and self.dtype in ("bfloat16", "float16"):
            raise ValueError(
                f"precision={self.precision} is of matmuls in float32, and dtype is {self.dtype}; set dtype=float32 or "
                "precision=default"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")


@dataclass(frozen=True, config=STRICT)
class PolicyConfig:
    """Section `policy`: where the decoder comes from, and changes of its shape.

    Attributes:
      weights: Hugging Face folder or hub id of shape and parameters; "" for random parameters of a preset.
      preset: name in `policy.presets`; "" with `weights`.
      width, layers, heads, kv_heads, head_dim, hidden, rope_theta, norm_eps, tied, qkv_bias, qk_norm: see
        `DecoderConfig`; None for that of the preset or the weights.
      dtype, param_dtype, precision, remat, attention, lora: see `DecoderConfig`.
      yarn: longer contexts.
    """

    weights: str = ""
    preset: str = ""
    width: Count | None = None
    layers: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    hidden: Count | None = None
    rope_theta: Positive | None = None
    norm_eps: Positive | None = None
    tied: bool | None = None
    qkv_bias: bool | None = None
    qk_norm: bool | None = None
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"
    precision: Precision = "default"
    remat: Remat = "none"
    attention: Attention = "xla"
    lora: LoraConfig = LoraConfig()
    yarn: YarnConfig = YarnConfig()

    def __post_init__(self) -> None:
        if bool(self.weights) == bool(self.preset):
            raise ValueError("set one of weights and preset")

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of `DecoderConfig` that differ from those of the preset or the weights."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v for k, v in values.items() if k not in ("weights", "preset", "yarn") and v is not None}

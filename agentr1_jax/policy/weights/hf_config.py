"""`config.json` of Hugging Face models, to a `DecoderConfig` and back.

A missing key has the default of `transformers`. A config that the decoder cannot compute is refused: a model that runs
with half of its config ignored is a silent error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from agentr1_jax.errors import UserError
from agentr1_jax.policy.config import DecoderConfig, RopeScaling
from agentr1_jax.validation import from_section

FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
"""`model_type` -> fields that differ between families. Qwen2.5 is `qwen2`; all Llamas are `llama`."""

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
THETA = 10_000.0
NORM_EPS = 1e-6
QWEN3_HEAD_DIM = 128
SLIDING_WINDOW = 4096
MAX_WINDOW_LAYERS = 28


def from_hf(record: Mapping[str, Any], source: str) -> DecoderConfig:
    """Return the decoder that a `config.json` describes.

    Rotary embeddings may be in the older form (`rope_theta`, `rope_scaling`) or in that of transformers 5
    (`rope_parameters`). `source` is the file's name, for error messages.

    Raises:
      ValueError: unknown family, a key that is missing or not a number, or something that the decoder cannot compute;
        the message names file, key and remedy.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"{source}: not a JSON object; it should be the config.json of a Hugging Face model")
    family = record.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"{source}: model_type is {family!r}; known families are {', '.join(FAMILIES)}: choose a checkpoint of one "
            "of these"
        )
    layers = count(record, "num_hidden_layers", source)
    for key, reason in _refusals(record, family, layers):
        raise ValueError(f"{source}: {key} is {record[key]!r}, {reason}; choose another checkpoint")
    width, heads = count(record, "hidden_size", source), count(record, "num_attention_heads", source)
    theta, scaling = _rope(record, source)
    shape: dict[str, Any] = {
        "vocab_size": count(record, "vocab_size", source),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": count(record, "num_key_value_heads", source, heads),
        "head_dim": _head_dim(record, family, width, heads, source),
        "hidden": count(record, "intermediate_size", source),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": number(record, "rms_norm_eps", source, NORM_EPS),
        "tied": bool(record.get("tie_word_embeddings", False)),
        "max_positions": _max_positions(count(record, "max_position_embeddings", source, 0), scaling),
        **FAMILIES[family],
    }
    try:
        return from_section(DecoderConfig, "", shape)
    except UserError as error:
        raise ValueError(f"{source}: {error}") from error


def find_family(config: DecoderConfig) -> str | None:
    """Return the `model_type` of the models that compute what this decoder does; None if none does."""
    kind = {"qkv_bias": config.qkv_bias, "qk_norm": config.qk_norm}
    return next((name for name, has in FAMILIES.items() if has == kind), None)


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return the `config.json` of a decoder, without token ids; inverse of `from_hf` except for dtypes and adapters.

    Rotary embeddings are in the older form, which every version of transformers and most other tools read.

    Raises:
      ValueError: no family computes what this decoder does.
    """
    family = find_family(config)
    if family is None:
        raise ValueError("policy.qkv_bias and policy.qk_norm are both true; no Hugging Face family has both: unset one")
    if family == "llama" and config.width % config.heads:
        raise ValueError(
            f"policy.heads ({config.heads}) does not divide policy.width ({config.width}), which transformers demands "
            "of the llama family; change one of them, or set policy.qk_norm"
        )
    record = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_hf(config.rope_scaling),
        "tie_word_embeddings": config.tied,
        "torch_dtype": str(config.param_dtype),
        # Llama's defaults are 1 and 2, whatever the tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.max_positions:
        record["max_position_embeddings"] = config.max_positions
    return record


def _refusals(record: Mapping[str, Any], family: str, layers: int) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of everything that the decoder cannot compute."""
    if record.get("hidden_act", "silu") != "silu":
        yield "hidden_act", "but only silu is known"
    # Qwen2 has its biases whatever this key says.
    if family != "qwen2" and record.get("attention_bias"):
        yield "attention_bias", "but a bias of the output projection is not known"
    if family == "llama" and record.get("mlp_bias"):
        yield "mlp_bias", "but a bias in the MLP is not known"
    if record.get("quantization_config"):
        yield "quantization_config", "but quantised weights are not read"
    if family == "llama":
        return
    window = record.get("sliding_window", SLIDING_WINDOW) if record.get("use_sliding_window") else None
    if record.get("layer_types") is not None:
        if set(record["layer_types"]) != {"full_attention"}:
            yield "layer_types", "but only full attention is known"
    elif window is not None and record.get("max_window_layers", MAX_WINDOW_LAYERS) < layers:
        yield "use_sliding_window", "but only full attention is known"


def _head_dim(record: Mapping[str, Any], family: str, width: int, heads: int, source: str) -> int:
    """Return the head size of the file; else 128 for Qwen3 and width / heads for the others (and where it is null)."""
    default = QWEN3_HEAD_DIM if family == "qwen3" and "head_dim" not in record else width // heads
    if record.get("head_dim") is None and default * heads != width and family != "qwen3":
        raise ValueError(f"{source}: num_attention_heads ({heads}) does not divide hidden_size ({width}); set head_dim")
    return count(record, "head_dim", source, default)


def _max_positions(written: int, scaling: RopeScaling | None) -> int:
    """Return the longest context: where YaRN was added to a config, its authors may have left the old one there."""
    if written and scaling is not None and scaling.kind == "yarn":
        return max(written, int(scaling.factor * scaling.original_positions))
    return written


def _rope(record: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the rotary embeddings."""
    key = "rope_scaling" if record.get("rope_scaling") else "rope_parameters"
    rope = record.get(key) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{source}: {key} must be one flat object, the same for all layers; choose another checkpoint")
    where = f"{source}: {key}"
    theta = number(rope, "rope_theta", where) if "rope_theta" in rope else number(record, "rope_theta", source, THETA)
    for holder in (rope, record):
        if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError(f"{source}: partial_rotary_factor must be 1 or absent; choose another checkpoint")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"{where} has rope_type {kind!r}; known are {', '.join(ROPE_KINDS)}: take the key out if the weights were "
            "trained without it, else choose another checkpoint"
        )
    if kind == "default":
        return theta, None
    factor = number(rope, "factor", where)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    original = "original_max_position_embeddings"
    trained = count(record, "max_position_embeddings", source, 0) or None
    if kind == "yarn":
        strange = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
        if strange or rope.get("truncate") is False:
            names = ", ".join(strange) or "truncate"
            raise ValueError(f"{where}: {names} of yarn is not known; choose another checkpoint")
        return theta, RopeScaling(
            "yarn",
            factor,
            low_frequency=number(rope, "beta_slow", where, 1.0),
            high_frequency=number(rope, "beta_fast", where, 32.0),
            original_positions=count(rope, original, where, trained),
            magnitude=number(rope, "attention_factor", where, 0.1 * math.log(max(factor, 1.0)) + 1),
        )
    return theta, RopeScaling(
        "llama3",
        factor,
        low_frequency=number(rope, "low_freq_factor", where),
        high_frequency=number(rope, "high_freq_factor", where),
        original_positions=count(record if record.get(original) else rope, original, where, trained),
    )


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_slow": scaling.low_frequency,
            "beta_fast": scaling.high_frequency,
            "original_max_position_embeddings": scaling.original_positions,
            "attention_factor": scaling.magnitude,
        }
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency,
        "high_freq_factor": scaling.high_frequency,
        "original_max_position_embeddings": scaling.original_positions,
    }


def number(record: Mapping[str, Any], key: str, source: str, default: float | None = None) -> float:
    """Return a positive number, or the default where the key is absent or null."""
    value = record.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"{source}: {key} is missing; complete the file from where the checkpoint was published")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{source}: {key} is {value!r}; it must be a positive number")
    return float(value)


def count(record: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    """Return a positive whole number, or the default where the key is absent or null."""
    value = number(record, key, source, default)
    if value != int(value):
        raise ValueError(f"{source}: {key} is {value}; it must be a whole number")
    return int(value)

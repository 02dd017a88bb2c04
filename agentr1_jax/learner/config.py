"""Settings of the learner; each class is one section of a run's config, whose keys `configs/base.py` explains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Lt
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from agentr1_jax.policy.config import Dtype
from agentr1_jax.validation import STRICT, Count, Decay, Fraction, NonNegative, Positive, Whole

PackingMode = Literal["per_step_padded", "per_step", "trajectory", "prefix_tree"]
Ratio = Literal["token", "step", "trajectory", "centred_step"]
Clip = Literal["ppo", "asymmetric", "dual", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "none"]
Aggregate = Literal["token", "step", "trajectory", "group", "fixed"]
KLEstimate = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
Correction = Literal["none", "tis_token", "tis_sequence", "icepop", "icepop_sequence", "mask_sequence"]
Schedule = Literal["constant", "linear", "cosine"]

PACKING_MODES: tuple[PackingMode, ...] = get_args(PackingMode)
RATIOS: tuple[Ratio, ...] = get_args(Ratio)
CLIPS: tuple[Clip, ...] = get_args(Clip)
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)
MASKING_CLIPS: tuple[Clip, ...] = ("ppo", "asymmetric", "dual")
"""Clips that take the gradient of the tokens beyond their bounds away, and of which ρ keeps its own value there."""


def _refuse_capo(ratio: Any) -> Any:
    if ratio == "capo":
        raise ValueError(
            "'capo' was a reading of CAPO that lost the mean of the ratios; say 'centred_step' for CAPO's ratio as "
            "published, or take configs/presets/capo.py for all of CAPO"
        )
    return ratio


@dataclass(frozen=True, config=STRICT)
class PackingConfig:
    """Layout of packed rows (see `packing`): their length, the most loss tokens of one, and rows per microbatch."""

    mode: PackingMode
    row_tokens: Count
    row_loss_tokens: Count
    rows: Count


@dataclass(frozen=True, config=STRICT)
class LearnerConfig:
    """Section `learner`: packed rows, and the passes over a batch."""

    packing: PackingMode = "trajectory"
    row_tokens: Count = 512
    row_loss_tokens: Count = 192
    rows: Count = 8
    old_logprobs: Literal["sampler", "learner"] = "sampler"
    loss_mask: bool = True
    advantage_mask: bool = True
    minibatches: Count = 1
    epochs: Count = 1
    reduce_dtype: Dtype | None = None

    @property
    def packing_config(self) -> PackingConfig:
        """Layout of the packed rows."""
        return PackingConfig(self.packing, self.row_tokens, self.row_loss_tokens, self.rows)

    @property
    def observations(self) -> bool:
        """True if observation tokens are loss tokens too, as either ablation of a mask needs."""
        return not (self.loss_mask and self.advantage_mask)


@dataclass(frozen=True, config=STRICT)
class LossConfig:
    """Section `loss`: ratio × clip × aggregate (see `losses` and `loss_weights`), value loss and entropy bonus."""

    ratio: Annotated[Ratio, BeforeValidator(_refuse_capo)] = "token"
    ratio_mean: Literal["token", "step"] = "token"
    clip: Clip = "ppo"
    clip_low: Annotated[float, Ge(0), Lt(1)] = 0.2
    clip_high: NonNegative = 0.2
    dual_c: Annotated[float, Gt(1)] = 3.0
    sapo_positive: Positive = 1.0
    sapo_negative: Positive = 1.05
    clip_bias_norm: bool = False
    aggregate: Aggregate = "token"
    fixed_denominator: Positive = 1.0
    value_coef: NonNegative = 0.5
    value_clip: Positive = 0.5
    entropy_coef: NonNegative = 0.0
    chunk: Count = 1024

    def __post_init__(self) -> None:
        if self.clip_bias_norm and self.clip not in MASKING_CLIPS:
            raise ValueError(f"clip_bias_norm needs a clip of {', '.join(MASKING_CLIPS)}; clip is {self.clip}")


@dataclass(frozen=True, config=STRICT)
class KLConfig:
    """Section `kl`: KL to the policy that RL starts from, in nats; see `losses.kl_estimate` and `next_kl_coef`."""

    kind: Literal["none", KLEstimate] = "none"
    where: Literal["loss", "reward"] = "loss"
    coef: NonNegative = 0.001
    target: Positive | None = None
    horizon: Positive = 10_000.0


@dataclass(frozen=True, config=STRICT)
class CorrectionConfig:
    """Section `correction`: weights for the gap between sampler and learner; see `loss_weights.correction_weights`."""

    kind: Correction = "none"
    unit: Literal["trajectory", "step"] = "trajectory"
    cap: Positive = 2.0
    low: NonNegative = 0.5
    high: NonNegative = 2.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) exceeds high ({self.high})")


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """Section `optimizer`; see `optimizer.make_optimizer` and `learning_rates`."""

    name: str = "adamw"
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    lr: NonNegative = 1e-4
    value_lr: NonNegative = 1e-3
    critic_warmup: Whole = 0
    warmup: Whole = 5
    schedule: Schedule = "constant"
    final_share: Fraction = 0.1
    b1: Decay = 0.9
    b2: Decay = 0.95
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: NonNegative = 1.0


@dataclass(frozen=True, config=STRICT)
class Objective:
    """What an update minimises; `temperature` is that of sampling, and divides the learner's logits too."""

    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    temperature: Positive = 1.0

    @property
    def kl_in_loss(self) -> Literal["none", KLEstimate]:
        """Estimate of the KL term of the loss."""
        return self.kl.kind if self.kl.where == "loss" else "none"

    @property
    def kl_in_reward(self) -> Literal["none", KLEstimate]:
        """Estimate of the KL in the reward of each token."""
        return self.kl.kind if self.kl.where == "reward" else "none"

    def imitation(self) -> Objective:
        """The same update as maximum likelihood: no ratio, no KL."""
        loss = dataclasses.replace(self.loss, clip="none", clip_bias_norm=False)
        return Objective(loss, KLConfig(), self.temperature)

"""Settings of the learner; each class is one section of a run's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Lt
from pydantic.dataclasses import dataclass

from agentr1_jax.validation import STRICT, Count, Decay, Fraction, NonNegative, Positive, Whole

PackingMode = Literal["per_step_padded", "per_step", "trajectory", "prefix_tree"]
Ratio = Literal["token", "step", "trajectory", "capo"]
Clip = Literal["ppo", "asymmetric", "dual", "cispo", "sapo", "none"]
Aggregate = Literal["token", "step", "trajectory", "group", "fixed"]
KLEstimate = Literal["k1", "k2", "k3"]
Correction = Literal["none", "tis_token", "tis_sequence", "icepop", "mask_sequence"]
Schedule = Literal["constant", "linear", "cosine"]

PACKING_MODES: tuple[PackingMode, ...] = get_args(PackingMode)
RATIOS: tuple[Ratio, ...] = get_args(Ratio)
CLIPS: tuple[Clip, ...] = get_args(Clip)
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, config=STRICT)
class PackingConfig:
    """Shape of packed rows.

    Attributes:
      mode: layout of the trajectories; see `packing`.
      row_tokens: length of a row.
      row_loss_tokens: most loss tokens of a row.
      rows: rows of a microbatch, over all processes.
    """

    mode: PackingMode
    row_tokens: Count
    row_loss_tokens: Count
    rows: Count


@dataclass(frozen=True, config=STRICT)
class LearnerConfig:
    """Section `learner`: packed rows, and the passes over a batch.

    Attributes:
      packing: layout of the trajectories; see `packing`.
      row_tokens: length of a packed row.
      row_loss_tokens: most loss tokens of a row.
      rows: rows of a microbatch, over all processes.
      old_logprobs: old policy of ratio and clip: `sampler` (behaviour log-probs), or `learner` (recomputed before the
        first update of a batch).
      loss_mask: False trains observation tokens like actions (an ablation).
      advantage_mask: False lets credit assignment count observation tokens as actions (an ablation).
      minibatches: updates per pass over a batch.
      epochs: passes over a batch.
    """

    packing: PackingMode = "trajectory"
    row_tokens: Count = 512
    row_loss_tokens: Count = 192
    rows: Count = 8
    old_logprobs: Literal["sampler", "learner"] = "sampler"
    loss_mask: bool = True
    advantage_mask: bool = True
    minibatches: Count = 1
    epochs: Count = 1

    @property
    def packing_config(self) -> PackingConfig:
        """Shape of the packed rows."""
        return PackingConfig(self.packing, self.row_tokens, self.row_loss_tokens, self.rows)

    @property
    def observations(self) -> bool:
        """True if observation tokens are loss tokens too, as either ablation of a mask needs."""
        return not (self.loss_mask and self.advantage_mask)


@dataclass(frozen=True, config=STRICT)
class LossConfig:
    """Section `loss`: ratio × clip × aggregate, the value loss and the entropy bonus.

    Attributes:
      ratio: `token`: ρ_k = π/π_old; `step`: its geometric mean over a step (GSPO on a step); `trajectory`: that over a
        trajectory; `capo`: a step's, centred over the minibatch.
      clip: `ppo`, `asymmetric` (DAPO), `dual`, `cispo`, `sapo` (a sigmoid), or `none` (−A·log π, no ratio).
      clip_low, clip_high: ρ is clipped to [1 − low, 1 + high].
      dual_c: bound of `dual` for negative advantages.
      sapo_positive, sapo_negative: τ of `sapo` for positive and for other advantages.
      aggregate: mean of the token losses; see `loss_weights`.
      fixed_denominator: divisor of aggregate `fixed`.
      value_coef: weight of the value loss.
      value_clip: largest move of the value from its old one for which the value loss falls.
      entropy_coef: weight of the entropy bonus.
      chunk: loss tokens per chunk of logits.
    """

    ratio: Ratio = "token"
    clip: Clip = "ppo"
    clip_low: Annotated[float, Ge(0), Lt(1)] = 0.2
    clip_high: NonNegative = 0.2
    dual_c: Annotated[float, Gt(1)] = 3.0
    sapo_positive: Positive = 1.0
    sapo_negative: Positive = 1.05
    aggregate: Aggregate = "token"
    fixed_denominator: Positive = 1.0
    value_coef: NonNegative = 0.5
    value_clip: Positive = 0.5
    entropy_coef: NonNegative = 0.0
    chunk: Count = 1024


@dataclass(frozen=True, config=STRICT)
class KLConfig:
    """Section `kl`: KL to the reference policy, the one that RL starts from.

    Attributes:
      kind: estimate; see `kl.kl_estimate`.
      where: term of the loss, or reward of each token.
      coef: its weight.
      target: KL per token that an adaptive coefficient aims at, in nats (`where` = `reward`); None for a fixed one.
      horizon: trajectories in which an adaptive coefficient changes by at most 20 %.
    """

    kind: Literal["none", KLEstimate] = "none"
    where: Literal["loss", "reward"] = "loss"
    coef: NonNegative = 0.001
    target: Positive | None = None
    horizon: Positive = 10_000.0


@dataclass(frozen=True, config=STRICT)
class CorrectionConfig:
    """Section `correction`: weights for the gap between sampler and learner; see `loss_weights.correction_weights`.

    Attributes:
      kind: form of the weights.
      unit: sequence of `tis_sequence` and `mask_sequence`.
      cap: largest weight of both `tis`.
      low, high: bounds of `icepop` and `mask_sequence`.
    """

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
    """Section `optimizer`.

    Attributes:
      name: `adamw`, `muon`, or another function of optax or optax.contrib; see `optimizer.make_optimizer`.
      args: its other parameters, by optax's names.
      lr: learning rate of the policy in RL.
      value_lr: learning rate of the value head, and of a separate critic.
      critic_warmup: updates at the start of RL in which the critic alone learns.
      warmup: updates after them over which the policy's rate rises.
      schedule: decay of the policy's rate.
      final_share: share of the rate at the last update.
      b1, b2, eps: of Adam and its descendants.
      weight_decay: decoupled, of kernels, embeddings and heads.
      max_grad_norm: global norm to which gradients are clipped; 0 for no clipping.
    """

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
    """What an update minimises.

    Attributes:
      loss: policy loss, value loss and entropy bonus.
      kl: a term of the loss where `kl.where` is `loss`.
      temperature: of sampling; divides the learner's logits too.
    """

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
        return Objective(dataclasses.replace(self.loss, clip="none"), KLConfig(), self.temperature)

"""Errors of the gradient of each scheme and loss against the exact gradient, a row each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from agentr1_jax.credit import TokenBatch, get_scheme
from agentr1_jax.errors import UserError
from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import AGGREGATES, CLIPS, RATIOS, LossConfig
from agentr1_jax.report.gradients import measure_errors
from experiments.credit.estimates import draw, gradients, lay_out, weights
from experiments.credit.mdps import PROCESSES, every_path, exact_gradient, old_logits

Row = dict[str, Any]
WRONG_VALUE = 0.5
DISCOUNTS = ("gamma", "lam", "gamma_high")
ON_POLICY = LossConfig()
UNCLIPPED = dataclasses.replace(ON_POLICY, clip_low=1 - 1e-6, clip_high=1e9)
LOSSES = {
    "none": dataclasses.replace(ON_POLICY, clip="none"),
    **{f"{ratio}, no bound": dataclasses.replace(UNCLIPPED, ratio=ratio) for ratio in RATIOS},
    **{
        f"{ratio}, {clip}": dataclasses.replace(
            ON_POLICY, ratio=ratio, clip=clip, clip_high=0.2 if clip == "ppo" else 0.28
        )
        for ratio in RATIOS
        for clip in CLIPS
        if clip != "none"
    },
}
"""All combinations of ratio and clip; `no bound` is `ppo` whose bounds are never reached."""


class Variant(NamedTuple):
    """A scheme with hyper-parameters and, if it needs one, a critic: `exact V` or `const V`."""

    scheme: str
    hyperparameters: Mapping[str, Any]
    critic: str | None

    @property
    def label(self) -> str:
        """As tables show it."""
        settings = [f"{key}={x:g}" if isinstance(x, float) else f"{key}={x}" for key, x in self.hyperparameters.items()]
        return ", ".join([" ".join([self.scheme, *settings]), *([self.critic] if self.critic else [])])


REFERENCE = Variant("step_gae", {"whiten": "none"}, critic="exact V")
"""Unbiased on-policy: what it errs off-policy is the loss's."""


def variants(names: Sequence[str]) -> list[Variant]:
    """Each scheme plain, as it is by default, and with one hyper-parameter changed at a time; plain is not whitened."""
    out = []
    for name in names:
        scheme = get_scheme(name)
        known = scheme.defaults
        plain = {"whiten": "none"} if known.get("whiten", "none") != "none" else {}
        others: list[Mapping[str, Any]] = [{}] if plain else []
        others += [plain | {"lam": 0.9}] if "lam" in known else []
        others += [plain | {key: 1.0} for key in ("gamma", "gamma_high") if known.get(key, 1) != 1]
        others += [{"norm": "mean_std_norm"}] if "norm" in known else []
        others += [{"signal": "return", "outcome_weight": 0.0}] if {"signal", "outcome_weight"} <= set(known) else []
        critics = ("exact V", "const V") if scheme.needs_critic else (None,)
        out += [Variant(name, settings, critic) for critic in critics for settings in (plain, *others)]
    return out


def plain(schemes: Sequence[Variant]) -> list[Variant]:
    """`REFERENCE`, and of each other scheme the first variant: plain, with the exact critic if it needs one."""
    first = {REFERENCE.scheme: REFERENCE}
    for variant in schemes:
        first.setdefault(variant.scheme, variant)
    return list(first.values())


@functools.cache
def program(scheme: str, settings: tuple[tuple[str, Any], ...]) -> Callable[..., Array]:
    """(fields of batches, discounts) -> advantages [batches, tokens]: one program, whatever the discounts."""
    function = functools.partial(get_scheme(scheme).function, **dict(settings))
    return jax.jit(
        jax.vmap(lambda fields, discounts: function(TokenBatch(**fields), **discounts).advantages, (0, None))
    )


def advantages(variant: Variant, fields: Mapping[str, Array]) -> Float[Array, "batches tokens"]:
    """Advantages under a variant of a scheme, of batches given by the fields of their `TokenBatch`."""
    scheme = get_scheme(variant.scheme, **variant.hyperparameters)
    defaults = {key: x for key, x in scheme.defaults.items() if key in DISCOUNTS}
    arguments = {**defaults, **variant.hyperparameters}
    settings = tuple((key, x) for key, x in arguments.items() if key not in defaults)
    constant = jnp.full_like(fields["values"], WRONG_VALUE)
    values = {None: None, "exact V": fields["values"], "const V": constant}[variant.critic]
    return program(variant.scheme, settings)(
        {**fields, "values": values}, {key: float(arguments[key]) for key in defaults}
    )


def on_policy(name: str, schemes: Sequence[Variant], seed: int, sizes: Mapping[str, int]) -> Iterator[Row]:
    """A row for each variant and aggregate; `sizes` are those of `draw`."""
    process = PROCESSES[name]()
    paths = every_path(process)
    _, exact = exact_gradient(paths, process.logits)
    fields, loss_tokens = lay_out(draw(paths, process.logits, seed, **sizes))
    shares = {
        aggregate: weights(aggregate, loss_tokens, sizes["groups"] * sizes["samples"]) for aggregate in AGGREGATES
    }
    for variant in schemes:
        advantage = advantages(variant, fields)
        for aggregate, share in shares.items():
            errors = measure_errors(estimate(ON_POLICY, process.logits, loss_tokens, advantage, share), exact)
            facts = {
                "process": name,
                "scheme": variant.label,
                "aggregate": aggregate,
                "loss": "on-policy",
                "shift": 0.0,
            }
            yield facts | dataclasses.asdict(errors)


def off_policy(
    name: str, schemes: Sequence[Variant], shift: float | None, seed: int, sizes: Mapping[str, int]
) -> Iterator[Row]:
    """A row for each variant and loss, on trajectories of an older policy; `shift` is the process's unless given.

    Critics are exact for the policy that sampled.
    """
    process = PROCESSES[name]()
    paths = every_path(process)
    _, exact = exact_gradient(paths, process.logits)
    shift = process.shift if shift is None else shift
    fields, loss_tokens = lay_out(draw(paths, old_logits(process, shift), seed, **sizes))
    share = weights("fixed", loss_tokens, sizes["groups"] * sizes["samples"])
    for variant in schemes:
        advantage = advantages(variant, fields)
        for loss, config in LOSSES.items():
            errors = measure_errors(estimate(config, process.logits, loss_tokens, advantage, share), exact)
            facts = {"process": name, "scheme": variant.label, "aggregate": "fixed", "loss": loss, "shift": shift}
            yield facts | dataclasses.asdict(errors)


def estimate(
    config: LossConfig, logits: np.ndarray, loss_tokens: LossTokens, advantage: Array, weight: np.ndarray
) -> np.ndarray:
    """Gradient of each batch, [batches, actions]."""
    loss_tokens = dataclasses.replace(loss_tokens, advantage=advantage, weight=jnp.asarray(weight))
    return np.asarray(gradients(config, jnp.asarray(logits, jnp.float32), loss_tokens))


def select_names(wanted: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The names asked for. Raise UserError for an unknown one."""
    if wanted == ["all"]:
        return list(known)
    for name in wanted:
        if name not in known:
            raise UserError(f"--{what}: unknown name {name!r}; choose all or some of {', '.join(known)}")
    return list(wanted)

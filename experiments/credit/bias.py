"""Errors of the gradient of each scheme and loss against the exact gradient, a row each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Float

from agentr1_jax.credit import SCHEMES, TokenBatch, get_scheme
from agentr1_jax.errors import UserError
from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import AGGREGATES, CLIPS, RATIOS, Aggregate, LossConfig
from agentr1_jax.report.gradients import Errors, Summary, measure_errors, summarize
from experiments.credit.estimates import draw, gradients, lay_out, weights
from experiments.credit.mdps import PROCESSES, every_path, exact_gradient, old_logits

Row = dict[str, Any]
WRONG_VALUE = 0.5
MOST_AT_ONCE = 8192
"""Most batches in memory, about 10 kB each with 16 trajectories."""
DISCOUNTS = ("gamma", "lam", "gamma_high")
ON_POLICY = LossConfig()
UNCLIPPED = dataclasses.replace(ON_POLICY, clip_low=1 - 1e-6, clip_high=1e9)
BOUNDS = {"ppo": (0.2, 0.2), "gmpo": (0.4, 0.4), "dppo_tv": (0.15, 0.15), "dppo_kl": (0.05, 0.05)}
"""`clip_low` and `clip_high` of clips whose published ones are not those of `asymmetric`."""
LOSSES = {
    "none": dataclasses.replace(ON_POLICY, clip="none"),
    **{f"{ratio}, no bound": dataclasses.replace(UNCLIPPED, ratio=ratio) for ratio in RATIOS},
    **{
        f"{ratio}, {clip}": dataclasses.replace(
            ON_POLICY,
            ratio=ratio,
            clip=clip,
            clip_low=BOUNDS.get(clip, (0.2, 0.28))[0],
            clip_high=BOUNDS.get(clip, (0.2, 0.28))[1],
            dual_c=20.0 if clip.startswith("dppo") else 3.0,
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


class Case(NamedTuple):
    """What a row is about: a variant of a scheme, an aggregate, and `on-policy` or one of `LOSSES`."""

    variant: Variant
    aggregate: Aggregate
    loss: str

    @property
    def key(self) -> str:
        """Name in tables by case; hyper-parameters cannot be hashed."""
        return "; ".join([self.variant.label, self.aggregate, self.loss])


class Sampling(NamedTuple):
    """How many batches are drawn of each process.

    Attributes:
      batches: independent batches of every row, rounded up to whole draws.
      groups: groups of a batch.
      samples: trajectories of a group.
      seed: of all draws.
      until: the smallest visible bias at which a row has enough batches; infinite: `batches` are enough.
      most_batches: no row goes on beyond so many.
    """

    batches: int
    groups: int
    samples: int
    seed: int = 0
    until: float = math.inf
    most_batches: int = 0

    @property
    def draws(self) -> int:
        """Number of draws of which `batches` consists."""
        return -(-self.batches // MOST_AT_ONCE)

    @property
    def chunk(self) -> int:
        """Batches of one draw: all draws have as many, for the sake of compiled programs."""
        return -(-self.batches // self.draws)

    @property
    def most_draws(self) -> int:
        """Number of draws that no row exceeds."""
        return self.draws if math.isinf(self.until) else max(self.draws, self.most_batches // self.chunk)


REFERENCE = Variant("step_gae", {"whiten": "none"}, critic="exact V")
"""Unbiased on-policy: what it errs off-policy is the loss's."""


def variants(names: Sequence[str]) -> list[Variant]:
    """Each scheme plain, as it is by default, and with one hyper-parameter changed at a time; plain is not whitened.

    With another λ it does not discount either, so that what is seen is the bias of λ alone.
    """
    out = []
    for name in names:
        scheme = get_scheme(name)
        known = scheme.defaults
        plain = {"whiten": "none"} if known.get("whiten", "none") != "none" else {}
        others: list[Mapping[str, Any]] = [{}] if plain else []
        undiscounted = {key: 1.0 for key in ("gamma", "gamma_high") if known.get(key, 1) != 1}
        others += [plain | undiscounted | {"lam": 0.9}] if "lam" in known else []
        others += [plain | {key: x} for key, x in undiscounted.items()]
        others += [{"norm": norm} for norm in ("mean_norm", "mean_std_norm") if known.get("norm", norm) != norm]
        others += [plain | {"anchor": "last_token"}] if "anchor" in known else []
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


def cases(schemes: Sequence[Variant]) -> tuple[list[Case], list[Case]]:
    """Return what is measured: on-policy all variants with all aggregates, off-policy plain ones with all losses."""
    on_policy = [Case(variant, aggregate, "on-policy") for variant in schemes for aggregate in AGGREGATES]
    return on_policy, [Case(variant, "fixed", loss) for variant in plain(schemes) for loss in LOSSES]


def measure(
    name: str, wanted: Sequence[Case], shift: float | None, sampling: Sampling, show: Callable[[int, str], None]
) -> list[Row]:
    """Return a row for each case, on trajectories of a policy whose logits differ by `shift`; critics are exact for it.

    Of estimates only their summary is kept. Beyond `sampling.batches` a case goes on alone, until its smallest
    visible bias is at most `sampling.until` or another draw would exceed `sampling.most_batches`.

    Args:
      name: of the process.
      wanted: what to measure.
      shift: standard deviation of what the logits that sample differ by from those of the process; None: the process's.
      sampling: how many batches of what size.
      show: called with a number of estimated cases, of the len(wanted)·most_draws at most, and a line of text.
    """
    process = PROCESSES[name]()
    paths = every_path(process)
    _, exact = exact_gradient(paths, process.logits)
    shift = process.shift if shift is None else shift
    sampled_by = old_logits(process, shift)
    summaries: dict[str, Summary] = {}
    errors: dict[str, Errors] = {}
    waiting, sizes = list(wanted), {"batches": sampling.chunk, "groups": sampling.groups, "samples": sampling.samples}
    for draws in range(1, sampling.most_draws + 1):
        fields, loss_tokens = lay_out(draw(paths, sampled_by, (sampling.seed, draws), **sizes))
        trajectories = sampling.groups * sampling.samples
        shares = {kind: weights(kind, loss_tokens, trajectories) for kind in {case.aggregate for case in waiting}}
        text = f"{name}, {draws * sampling.chunk} batches, {len(waiting)} rows"
        for variant, of_variant in itertools.groupby(waiting, key=lambda case: case.variant):
            advantage = advantages(variant, fields)
            for case in of_variant:
                config = ON_POLICY if case.loss == "on-policy" else LOSSES[case.loss]
                found = estimate(config, process.logits, loss_tokens, advantage, shares[case.aggregate])
                new = summarize(found, exact)
                summaries[case.key] = summaries[case.key] + new if case.key in summaries else new
                errors[case.key] = measure_errors(summaries[case.key], exact)
                show(1, text)
        if draws >= sampling.draws:
            before = len(waiting)
            waiting = [case for case in waiting if errors[case.key].visible > sampling.until]
            if spared := (before - len(waiting)) * (sampling.most_draws - draws):
                show(spared, text)
        if not waiting:
            break
    return [
        {
            "process": name,
            "scheme": case.variant.label,
            "aggregate": case.aggregate,
            "loss": case.loss,
            "shift": shift,
            **dataclasses.asdict(errors[case.key]),
        }
        for case in wanted
    ]


def estimate(
    config: LossConfig, logits: np.ndarray, loss_tokens: LossTokens, advantage: Array, weight: np.ndarray
) -> np.ndarray:
    """Gradient of each batch, [batches, actions]."""
    loss_tokens = dataclasses.replace(loss_tokens, advantage=advantage, weight=jnp.asarray(weight))
    return np.asarray(gradients(config, jnp.asarray(logits, jnp.float32), loss_tokens))


def select_schemes(wanted: Sequence[str]) -> list[str]:
    """Return the names of the schemes asked for; `all` leaves out those that read beliefs, for want of gold answers.

    Raises:
      UserError: an unknown scheme, or one that reads beliefs.
    """
    names = select_names(wanted, list(SCHEMES), "schemes")
    believing = [name for name in names if SCHEMES[name].needs_belief]
    if believing and wanted != ["all"]:
        raise UserError(f"--schemes: {believing[0]} reads the belief in a gold answer, and these processes have none")
    if believing:
        logging.info("left out, since these processes have no gold answer to believe in: %s", ", ".join(believing))
    return [name for name in names if name not in believing]


def select_names(wanted: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The names asked for. Raise UserError for an unknown one."""
    if wanted == ["all"]:
        return list(known)
    for name in wanted:
        if name not in known:
            raise UserError(f"--{what}: unknown name {name!r}; choose all or some of {', '.join(known)}")
    return list(wanted)

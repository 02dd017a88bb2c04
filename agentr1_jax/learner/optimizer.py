"""Optimizers by name, and the learning rates of a run.

Learning rates are a linear rise times a decay, as plain numbers of the host: optax's schedules compute in float32 on
the device, and hold one rate for all parts of the parameters.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array

from agentr1_jax.learner.config import OptimizerConfig, Schedule
from agentr1_jax.policy.decoder import Params

OPTIMIZERS = tuple(
    "acprop adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan ademamix adopt amsgrad lamb lars lion "
    "muon nadam nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop sgd sign_sgd signum "
    "simplified_ademamix yogi".split()
)
"""Functions of optax and optax.contrib whose steps are proportional to a learning rate."""


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return an optimizer without its learning rate, which is an argument of the update: θ ← θ − rate · updates.

    `muon` (orthogonalised momentum, https://kellerjordan.github.io/posts/muon) is for the kernels of the layers, scaled
    to the size of AdamW's steps (arXiv 2502.16982) so that both take one learning rate, with AdamW (of Nesterov
    momentum, like Muon's) for the rest.

    b1, b2 and eps are for Adam and its descendants (everything that has a b1 and a b2); other optimizers have optax's
    defaults, since Adafactor's eps is another thing. `config.args` come before them. Weight decay is decoupled, times
    the learning rate, of kernels, embeddings and heads alone, whatever the optimizer.

    The rate is not injected by `optax.inject_hyperparams`, which makes b1, b2 and eps float32 arrays and thus changes
    the numbers.

    Raises:
      ValueError: unknown name or args.
    """
    name, args = config.name, dict(config.args)
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer.name {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    alias = getattr(optax, name, None) or getattr(optax.contrib, name)
    known = inspect.signature(alias).parameters
    settings: dict[str, Any] = {"weight_decay": 0.0, "weight_decay_rate": None}
    if name == "muon":
        kernels = functools.partial(jax.tree_util.tree_map_with_path, _matrix)
        settings |= {"adam_b1": config.b1, "adam_b2": config.b2, "eps": config.eps}
        settings |= {"consistent_rms": 0.2, "muon_weight_dimension_numbers": kernels}
    elif "b1" in known and "b2" in known:
        settings |= {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    ours = ("learning_rate", "weight_decay", "mask", "dimension_numbers")
    takes = [key for key in known if not any(part in key for part in ours)]
    for key in args:
        if key not in takes:
            raise ValueError(f"unknown optimizer.args.{key}; {name} takes {', '.join(takes) or 'no args'}")
    settings = {key: x for key, x in settings.items() if key in known} | args
    try:
        rule = alias(learning_rate=-1.0, **settings)  # Optax descends: its updates are to be added.
        like = {"kernel": jax.ShapeDtypeStruct((8,), jnp.float32)}  # Not an array: no device is asked.
        jax.eval_shape(lambda params: rule.update(params, rule.init(params), params), like)
    except Exception as error:  # Optax may raise anything.
        raise ValueError(f"optimizer.name {name!r} cannot be used with args {args}: {error}") from error
    decayed = optax.chain(rule, optax.add_decayed_weights(config.weight_decay, mask=_decay_mask))
    return by_part(decayed, config.max_grad_norm)


def by_part(rule: optax.GradientTransformation, max_grad_norm: float = 0.0) -> optax.GradientTransformation:
    """Return a transformation with a state for each part (top key) of the parameters: `{part: state}`.

    A part that does not learn for some updates keeps its state, counts included. In the state of `optax.partition` the
    update could not hold one part back: it is a tuple of a chain, with an entry for every label.

    Args:
      rule: for the updates of one part.
      max_grad_norm: global norm to which the gradients of all parts together are clipped before; 0 for no clipping.
    """
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()

    def init(params: Params) -> dict[str, Any]:
        return {part: rule.init({part: tree}) for part, tree in params.items()}

    def update(grads: Params, state: dict[str, Any], params: Params) -> tuple[Params, dict[str, Any]]:
        clipped, _ = clip.update(grads, optax.EmptyState())
        both = {part: rule.update({part: g}, state[part], {part: params[part]}) for part, g in clipped.items()}
        return {part: x[part] for part, (x, _) in both.items()}, {part: new for part, (_, new) in both.items()}

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _matrix(path: Any, leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Input and output axes of a kernel of the layers, for Muon; heads belong with their dimensions."""
    names = [key.key for key in path]
    if names[-1] != "kernel" or leaf.ndim < 3:
        return None
    inputs = 2 if names[-2] == "out" else 1
    axes = tuple(range(leaf.ndim))
    return optax.contrib.MuonDimensionNumbers(axes[1 : 1 + inputs], axes[1 + inputs :])


def _decay_mask(params: Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embed", "head"), params)


def learning_rates(config: OptimizerConfig, update: int, total_updates: int, parts: Iterable[str]) -> dict[str, float]:
    """Return the learning rate of each part of the parameters in an update of RL.

    Args:
      config: peak rates and their schedule; the policy's rate is 0 during `critic_warmup`.
      update: index of the update, from 0.
      total_updates: updates of the run.
      parts: `decoder`, `value`, `critic`.
    """
    done, total = update - config.critic_warmup, total_updates - config.critic_warmup
    share = 0.0
    if done >= 0:
        rise = min(1.0, (done + 1) / max(config.warmup, 1))  # Above 0 at once, so that no update is lost.
        share = rise * decay(config.schedule, done / max(total, 1), config.final_share)
    return {part: config.lr * share if part == "decoder" else config.value_lr for part in parts}


def rate_by_progress(done: float) -> float:
    """Return the share of the peak rate in supervised phases, which may have a given time instead of updates.

    A rise over 5 % of the phase, of which its first update stands for 0.1 %, and a cosine that ends at a tenth.

    Args:
      done: finished share of the phase, 0 to 1; beyond 1 the rate stays.
    """
    return min(1.0, (done + 1e-3) / 0.05) * decay("cosine", done, 0.1)


def decay(kind: Schedule, done: float, final_share: float) -> float:
    """Return a factor that falls from 1 at the start (`done` = 0) to `final_share` at 1; `constant` stays 1."""
    done = min(done, 1.0)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1 + (final_share - 1) * done
    return (1 + final_share) / 2 + (1 - final_share) / 2 * math.cos(math.pi * done)

"""Optimizers by name, and the learning rates of a run.

Names are those of AdamW, Muon, and every other optimizer of optax whose steps are proportional to a learning rate.
Learning rates are a linear rise times a decay, as plain numbers of the host: optax's schedules compute in float32 on
the device, and hold one rate for all parts of the parameters.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array

from agentr1_jax.learner.config import SCHEDULES, OptimizerConfig, Schedule
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.sharding import spec_of

Alias = Callable[..., optax.GradientTransformation]


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return an optimizer without its learning rate, which is an argument of the update: θ ← θ − rate · updates.

    `config.name` is a function of optax or optax.contrib (`adamw`, `lion`, `adafactor`, `sgd`, ...; see
    `optimizers()`). `muon` (orthogonalised momentum, https://kellerjordan.github.io/posts/muon) is for the kernels of
    the layers, scaled to the size of AdamW's steps (arXiv 2502.16982) so that both take one learning rate, with AdamW
    (of Nesterov momentum, like Muon's) for the rest.

    b1, b2 and eps are for Adam and its descendants (everything that has a b1 and a b2); other optimizers have optax's
    defaults, since Adafactor's eps is another thing. `config.args` come before them. Weight decay is decoupled, times
    the learning rate, of kernels, embeddings and heads alone, whatever the optimizer.

    The rate is not injected by `optax.inject_hyperparams`, which makes b1, b2 and eps float32 arrays and thus changes
    the numbers.

    Raises:
      ValueError: unknown name or args, or an optimizer that needs more than gradients and parameters.
    """
    name, args = config.name, dict(config.args)
    alias = _aliases().get(name)
    if alias is None:
        near = difflib.get_close_matches(name, optimizers(), n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown optimizer.name {name!r}; {hint}choose one of {', '.join(optimizers())}")
    takes = [key for key in inspect.signature(alias).parameters if not _is_ours(key)]
    for key in args:
        if key not in takes:
            raise ValueError(f"unknown optimizer.args.{key}; {name} takes {', '.join(takes) or 'no args'}")
    settings = _settings(name, alias, config.b1, config.b2, config.eps) | args
    fault = _fault(alias, settings)
    if fault:
        with_args = f" with args {args}" if args else ""
        raise ValueError(f"optimizer.name {name!r}{with_args} cannot be used: {fault}")
    rule = alias(learning_rate=-1.0, **settings)  # Optax descends: its updates are to be added.
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


@functools.cache
def optimizers() -> tuple[str, ...]:
    """Return the names that `make_optimizer` takes without args."""
    c = OptimizerConfig()
    usable = (name for name, f in _aliases().items() if not _fault(f, _settings(name, f, c.b1, c.b2, c.eps)))
    return tuple(usable)


@functools.cache
def _aliases() -> dict[str, Alias]:
    """Functions of optax and optax.contrib that make an optimizer, by name."""
    functions = {
        name: function
        for module in (optax.contrib, optax)
        for name, function in vars(module).items()
        if isinstance(function, types.FunctionType | functools.partial) and not name.startswith(("_", "scale_by_"))
    }
    rated = [
        name for name, f in functions.items() if any("learning_rate" in key for key in inspect.signature(f).parameters)
    ]
    return {name: functions[name] for name in sorted(rated)}


def _is_ours(key: str) -> bool:
    """Return whether a parameter of an alias is not for `args`: learning rates, weight decay, masks."""
    return key in ("mask", "muon_weight_dimension_numbers") or "learning_rate" in key or "weight_decay" in key


def _settings(name: str, alias: Alias, b1: float, b2: float, eps: float) -> dict[str, Any]:
    """Arguments of an alias besides its learning rate and `args`."""
    if name == "muon":
        kernels = functools.partial(jax.tree_util.tree_map_with_path, _matrix)
        adam = {"adam_b1": b1, "adam_b2": b2, "eps": eps}
        return adam | {"consistent_rms": 0.2, "muon_weight_dimension_numbers": kernels}
    parameters = inspect.signature(alias).parameters
    settings: dict[str, Any] = {"weight_decay": 0.0, "weight_decay_rate": None}
    if "b1" in parameters and "b2" in parameters:
        settings |= {"b1": b1, "b2": b2, "eps": eps}
    return {key: value for key, value in settings.items() if key in parameters}


def _fault(alias: Alias, settings: Mapping[str, Any]) -> str:
    """Return why an alias cannot be used, or "": by its signature, then by two steps traced without computation."""
    parameters = inspect.signature(alias).parameters
    if "learning_rate" not in parameters:
        return "it takes no learning rate"
    if isinstance(parameters["learning_rate"].default, float):
        return "it finds its learning rate itself"
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in (*settings, "learning_rate")]
    if missing:
        return f"it needs {' and '.join(missing)}"
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {
        "decoder": {
            "layers": {"query": {"kernel": array((2, 8, 2, 4))}, "attention_norm": {"scale": array((2, 8))}},
            "embed": array((8, 4)),
        },
        "value": {"bias": array(())},
    }

    def second_step(rate: Any, params: Params) -> tuple[Params, Any]:
        optimizer = alias(learning_rate=rate, **settings)
        _, state = optimizer.update(params, optimizer.init(params), params)
        return optimizer.update(params, state, params)

    def by_rate(params: Params) -> Any:
        return jax.linear_transpose(lambda rate: second_step(rate, params)[0], 1.0)(params)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Optax is about to remove or to change it.
        try:
            _, state = jax.eval_shape(functools.partial(second_step, -1.0), params)
        except Exception as error:  # Optax may raise anything.
            return f"a trial step with gradients and parameters alone fails ({type(error).__name__}: {error})"
        try:
            jax.eval_shape(by_rate, params)
        except Exception:  # JAX finds no transpose of a function that is not linear.
            return "its steps are not proportional to its learning rate"
    try:
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if leaf.ndim > 1:
                spec_of(jax.tree_util.keystr(path, simple=True, separator="/"))
    except KeyError as error:
        return f"its state cannot be laid out on a mesh ({error.args[0]})"
    return ""


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
        share = rate(config.schedule, done, total, warmup=config.warmup, final_share=config.final_share)
    return {part: config.lr * share if part == "decoder" else config.value_lr for part in parts}


def rate(kind: Schedule, update: int, total_updates: int, *, warmup: int, final_share: float) -> float:
    """Return the share of the peak rate at an update.

    Args:
      kind: `constant`, or a decay over all updates, `linear` or `cosine`.
      update: index of the update, from 0.
      total_updates: updates of the run.
      warmup: updates of the linear rise; the first has the rate 1 / warmup, so that none is lost.
      final_share: share at the end of the decay.

    Raises:
      ValueError: unknown kind.
    """
    return min(1.0, (update + 1) / max(warmup, 1)) * decay(kind, update / max(total_updates, 1), final_share)


def rate_by_progress(kind: Schedule, done: float, *, warmup: float, final_share: float, first: float = 1e-3) -> float:
    """Return `rate` where only the finished share of the run is known, as in runs of a given time.

    Args:
      kind, final_share: as in `rate`.
      done: finished share of the run, 0 to 1; beyond 1 the rate stays at the final share.
      warmup: share of the run over which the rate rises.
      first: share of the run that its first update stands for.

    Raises:
      ValueError: unknown kind.
    """
    rise = min(1.0, (done + first) / warmup) if warmup else 1.0
    return rise * decay(kind, done, final_share)


def decay(kind: Schedule, done: float, final_share: float) -> float:
    """Return a factor that falls from 1 at the start to `final_share` at the end; `constant` stays 1.

    Raises:
      ValueError: unknown kind.
    """
    done = min(done, 1.0)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1 + (final_share - 1) * done
    if kind == "cosine":
        return (1 + final_share) / 2 + (1 - final_share) / 2 * math.cos(math.pi * done)
    raise ValueError(f"unknown schedule {kind!r}; choose one of {', '.join(SCHEDULES)}")

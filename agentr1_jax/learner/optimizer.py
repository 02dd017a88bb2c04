"""Optimizers by name: AdamW, Muon, and every other one of optax whose steps are proportional to a learning rate."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array

from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.sharding import spec_of

Alias = Callable[..., optax.GradientTransformation]


def make_optimizer(
    *,
    name: str,
    max_grad_norm: float | None,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    args: Mapping[str, Any] = types.MappingProxyType({}),
) -> optax.GradientTransformation:
    """An optimizer without its learning rate, which is an argument of the update: θ ← θ − rate · updates.

    Its state is apart for each part of the parameters; see `by_part`.

    Args:
      name: of a function of optax or optax.contrib (`adamw`, `lion`, `adafactor`, `sgd`, ...; see `optimizers()`).
        `muon` (orthogonalised momentum, https://kellerjordan.github.io/posts/muon) is for the kernels of the layers,
        scaled to the size of AdamW's steps (arXiv 2502.16982) so that both take one learning rate, with AdamW (of
        Nesterov momentum, like Muon's) for the rest.
      max_grad_norm: gradients are clipped to this global norm; None or 0 for no clipping.
      b1, b2, eps: of Adam and what descends from it (everything that has a b1 and a b2). For others optax's defaults
        hold: Adafactor's eps is another thing.
      weight_decay: decoupled, times the learning rate, of kernels, embeddings and heads alone, whatever the optimizer.
      args: its other parameters, by optax's names; they come before b1, b2 and eps.

    Raises:
      ValueError: unknown name or args, or an optimizer that needs more than gradients and parameters.
    """
    alias = _aliases().get(name)
    if alias is None:
        near = difflib.get_close_matches(name, optimizers(), n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown optimizer.name {name!r}; {hint}choose one of {', '.join(optimizers())}")
    takes = [key for key in inspect.signature(alias).parameters if not _is_ours(key)]
    for key in args:
        if key not in takes:
            raise ValueError(f"unknown optimizer.args.{key}; {name} takes {', '.join(takes) or 'no args'}")
    settings = _settings(name, alias, b1, b2, eps) | dict(args)
    fault = _fault(alias, settings)
    if fault:
        given = f" with args {dict(args)}" if args else ""
        raise ValueError(f"optimizer.name {name!r}{given} cannot be used: {fault}")
    rule = alias(learning_rate=-1.0, **settings)  # Optax descends: its updates are to be added.
    return by_part(optax.chain(rule, optax.add_decayed_weights(weight_decay, mask=_decays)), max_grad_norm)


def by_part(rule: optax.GradientTransformation, max_grad_norm: float | None = None) -> optax.GradientTransformation:
    """A transformation with a state for each part (top key) of the parameters: `{part: state}`, counts among them.

    So a part that does not learn for some updates keeps its state, and starts afterwards as at the first one.

    Args:
      rule: for the updates of one part.
      max_grad_norm: the gradients of all parts together are clipped to this norm before; None or 0 for no clipping.
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
    """Names that `make_optimizer` takes without args."""
    usual = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
    return tuple(name for name, alias in _aliases().items() if not _fault(alias, _settings(name, alias, **usual)))


@functools.cache
def _aliases() -> dict[str, Alias]:
    """The functions of optax and optax.contrib that make an optimizer."""
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
    """Parameters of an alias that are not for `args`: the learning rate is the update's, weight decay is done here."""
    return key in ("mask", "muon_weight_dimension_numbers") or "learning_rate" in key or "weight_decay" in key


def _settings(name: str, alias: Alias, b1: float, b2: float, eps: float) -> dict[str, Any]:
    """What an alias gets besides its learning rate and `args`."""
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
    """Why an alias cannot be used, or nothing: asked of its signature, then of two steps traced without computation."""
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
        warnings.simplefilter("error")  # What optax is about to remove or to change.
        try:
            _, state = jax.eval_shape(functools.partial(second_step, -1.0), params)
        except Exception as error:  # Whatever optax raises.
            return f"a trial step with gradients and parameters alone fails ({type(error).__name__}: {error})"
        try:
            jax.eval_shape(by_rate, params)
        except Exception:  # Of a function that is not linear JAX finds no transpose.
            return "its steps are not proportional to its learning rate"
    try:
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if leaf.ndim > 1:
                spec_of(jax.tree_util.keystr(path, simple=True, separator="/"))
    except KeyError as error:
        return f"its state cannot be laid out on a mesh ({error.args[0]})"
    return ""


def _matrix(path: Any, leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Which axes of a kernel of the layers are its inputs and its outputs; heads belong with their dimensions."""
    names = [key.key for key in path]
    if names[-1] != "kernel" or leaf.ndim < 3:
        return None
    inputs = 2 if names[-2] == "out" else 1
    axes = tuple(range(leaf.ndim))
    return optax.contrib.MuonDimensionNumbers(axes[1 : 1 + inputs], axes[1 + inputs :])


def _decays(params: Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embed", "head"), params)

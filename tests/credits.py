"""Credit of rollouts by every scheme, through one compiled program for each scheme that the tests share."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from builders import CAPACITIES, Rollout, credit_batch
from hypothesis import settings
from hypothesis import strategies as st

from agentr1_jax.credit import SCHEMES, Credit, Term, TokenBatch

NAMES = sorted(SCHEMES)
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "whiten": ("none", "token", "step", "trajectory"),
    "unit": ("trajectory", "step", "token"),
    "norm": ("mean_norm", "mean_std_norm"),
    "signal": ("reward", "return"),
    "history": (0, 1, 2),
    "relative": (False, True),
    "anchor": ("prompt", "last_token"),
    "belief": ("probability", "logprob"),
    "normalise": ("joint", "separate"),
    "horizon": (1, 3),
    "frozen": (True,),
    "critic": (False, True),
}
"""Hyper-parameters that a program is compiled for, the others are its arguments; and whether there is a critic."""
DISCOUNTS = st.sampled_from((0.0, 0.5, 0.75, 1.0))
WEIGHTS = st.sampled_from((0.0, 0.5, 1.0, 2.0))
NUMBERS = st.fixed_dictionaries(
    dict.fromkeys(("gamma", "lam", "gamma_high", "omega", "decay"), DISCOUNTS)
    | dict.fromkeys(("step_weight", "outcome_weight", "alpha", "prior", "kappa", "terminal_weight"), WEIGHTS)
    | {"tau": st.sampled_from((0.5, 4.0)), "threshold": st.sampled_from((-1.0, 0.0, 1.0))}
    | {"lam_length": st.sampled_from((0.0, 0.4, 1.5)), "gap": st.sampled_from((0.1, 1.0))}
)
TYPICAL = {"gamma": 0.75, "lam": 0.5, "gamma_high": 0.5, "step_weight": 2.0, "outcome_weight": 0.5, "alpha": 1.0}
TYPICAL |= {"omega": 0.25, "prior": 2.0, "kappa": 2.0, "tau": 4.0, "threshold": 0.0, "lam_length": 0.0}
TYPICAL |= {"gap": 0.1, "decay": 0.75, "terminal_weight": 2.0}
quick = settings(max_examples=40, deadline=None)


@functools.cache
def parameters(name: str) -> tuple[str, ...]:
    """The hyper-parameters of a scheme, and `critic` where it can do with and without one."""
    optional = SCHEMES[name].uses_critic and not SCHEMES[name].needs_critic
    return (*tuple(inspect.signature(SCHEMES[name].function).parameters)[1:], *("critic",) * optional)


@functools.cache
def options(name: str) -> list[dict[str, Any]]:
    """Every combination of a scheme's choices; there is one, without any, where it has none."""
    keys = [key for key in CHOICES if key in parameters(name)]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(CHOICES[key] for key in keys))]


@functools.cache
def program(name: str, dtype: Any) -> Any:
    """(batch, numbers) -> the credit of each of the scheme's `options`; compiled."""

    def assign(batch: TokenBatch, numbers: dict[str, Any], critic: bool = True, **option: Any) -> Credit:
        return SCHEMES[name].function(batch if critic else batch.replace(values=None), **option, **numbers)

    # In double precision, programs this small take longer to optimise than to run; single precision is as in a run.
    compiler_options = {"xla_backend_optimization_level": 0} if dtype == np.float64 else None
    return jax.jit(
        lambda batch, numbers: [assign(batch, numbers, **option) for option in options(name)],
        compiler_options=compiler_options,
    )


def own_numbers(name: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Those of the numbers that the scheme has."""
    return {key: x for key, x in numbers.items() if key in parameters(name)}


def every_option(
    name: str, data: Sequence[Rollout], capacities: Mapping[str, int] = CAPACITIES, dtype: Any = np.float64, **numbers
) -> list[tuple[dict[str, Any], Credit]]:
    """Each of the scheme's `options` and its credit, as numpy arrays without padding, which is checked to have none.

    Terms, which are of steps, are left out; see `every_account`.
    """
    count = sum(len(step) for r in data for step in r.tokens)
    trained = np.array([t.is_action for r in data for step in r.tokens for t in step], bool)
    credits = [_with_targets(credit) for credit in _run(name, data, capacities, dtype, numbers)]
    for credit in credits:
        for field in (credit.advantages, credit.value_targets, credit.value_mask):
            assert not field[count:].any(), f"{name}: padding got credit"
            assert not field[:count][~trained].any(), f"{name}: a token that was not sampled got credit"
    return [(o, jax.tree.map(lambda x: x[:count], credit)) for o, credit in zip(options(name), credits, strict=True)]


def every_account(
    name: str, data: Sequence[Rollout], capacities: Mapping[str, int] = CAPACITIES, dtype: Any = np.float64, **numbers
) -> list[tuple[dict[str, Any], np.ndarray, dict[str, Term]]]:
    """Each of the scheme's `options`, the mean advantage of each step's sampled tokens, and its terms of each step."""
    steps = [[t.is_action for t in step] for r in data for step in r.tokens]
    edges = np.cumsum([0, *map(len, steps)])
    out = []
    for option, credit in zip(options(name), _run(name, data, capacities, dtype, numbers), strict=True):
        means = np.array(
            [credit.advantages[a:b][on].mean() for (a, b), on in zip(itertools.pairwise(edges), steps, strict=True)]
        )
        terms = jax.tree.map(lambda x: np.broadcast_to(x, capacities["steps"])[: len(steps)], credit.terms)
        out.append((option, means, terms))
    return out


def _run(
    name: str, data: Sequence[Rollout], capacities: Mapping[str, int], dtype: Any, numbers: Mapping[str, Any]
) -> list[Credit]:
    with jax.enable_x64(dtype == np.float64):
        batch = credit_batch(data, **capacities, dtype=dtype)
        return jax.device_get(program(name, dtype)(batch, own_numbers(name, TYPICAL | numbers)))


def _with_targets(credit: Credit) -> Credit:
    """The credit without terms, and with value targets that are masked everywhere where it has none."""
    credit = credit.replace(terms={})
    if credit.value_targets is not None:
        return credit
    return credit.replace(
        value_targets=np.zeros_like(credit.advantages), value_mask=np.zeros(credit.advantages.shape, bool)
    )


def credit_of(name: str, data: Sequence[Rollout], dtype: Any = np.float64, **hyper: Any) -> Credit:
    """The credit of one option; choices not given are the scheme's defaults, numbers not given are `TYPICAL`."""
    defaults = {key: p.default for key, p in inspect.signature(SCHEMES[name].function).parameters.items()}
    chosen = {key: hyper.pop(key, defaults.get(key, False)) for key in CHOICES if key in parameters(name)}
    assert set(hyper) <= set(parameters(name)), f"{name} has no {hyper}"
    return next(credit for o, credit in every_option(name, data, dtype=dtype, **hyper) if o == chosen)


def exact(data: Sequence[Rollout]) -> dict[str, int]:
    """The capacities that just hold the data."""
    steps = [step for r in data for step in r.tokens]
    return {"trajectories": len(data), "steps": len(steps), "tokens": sum(map(len, steps))}


def check_same(one: Credit, other: Credit, order: Any = slice(None), err_msg: str = "", atol: float = 1e-9) -> None:
    """Equal, with the tokens of `one` put in another order."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a[order], b, atol=atol, rtol=1e-9, err_msg=err_msg)

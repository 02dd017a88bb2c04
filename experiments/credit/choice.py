"""Choice of the credit schemes to compare: those that a flag names, or all that a recording has the data for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentr1_jax.credit import SCHEMES, Scheme, get_scheme
from agentr1_jax.errors import UserError
from agentr1_jax.registry import parse_call, split_list
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import Trajectory
from experiments.credit.effects import Schemes


class Choice(NamedTuple):
    """Schemes to compare by label, the label of the run's own scheme, and remarks on the choice for the reader."""

    schemes: Schemes
    own: str | None
    notes: Sequence[str]


def choose(text: str, settings: Settings, trajectories: Sequence[Trajectory]) -> Choice:
    """Choose the schemes that `--schemes` names.

    Args:
      text: `all`, or names with arguments, e.g. `grpo,step_gae(lam=0.9)`.
      settings: settings of the run; with `all`, its own scheme has the arguments of the run.
      trajectories: recorded batch.

    Raises:
      UserError: an unknown scheme or hyper-parameter, the same twice, a named one that lacks what it needs.
    """
    chosen, notes = dict[str, Scheme](), list[str]()
    own_name, own_args = settings.scheme.name, settings.scheme.arguments
    own = label(own_name, own_args)
    named = parse_schemes(text) if text != "all" else [(n, own_args if n == own_name else {}) for n in SCHEMES]
    for name, args in named:
        try:
            scheme = get_scheme(name, **args)
        except (UserError, ValueError, TypeError) as error:
            raise UserError(f"--schemes: {error}") from error
        fault = missing_need(scheme, settings, trajectories)
        if fault and text != "all":
            raise UserError(f"--schemes: {name} {fault}")
        if label(name, args) in chosen:
            raise UserError(f"--schemes: {label(name, args)} is there twice")
        if fault:
            notes.append(f"{name} is left out: it {fault}.")
        else:
            chosen[label(name, args)] = scheme
    keyless = sum(s.state_key is None for t in trajectories for s in t.steps)
    if keyless:
        notes.append(f"{keyless} steps have no state key; schemes that compare equal states see each of them alone.")
    mute = sum(s.action_key is None for t in trajectories for s in t.steps)
    if mute:
        notes.append(f"{mute} steps have no action key; schemes that compare equal actions see each of them alone.")
    order = sorted(chosen, key=lambda name: (name != own, list(chosen).index(name)))
    return Choice({name: chosen[name] for name in order}, own if own in chosen else None, notes)


def parse_schemes(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse `a,b(x=1,y=z)` into names with arguments. Raise UserError if it reads otherwise."""
    schemes = []
    for item in split_list(text) or [text]:
        try:
            call = parse_call(item, "--schemes")
        except ValueError as error:
            raise UserError(f"{error}, e.g. --schemes='grpo,step_gae(lam=0.9)'") from error
        if call.values:
            raise UserError(f"--schemes: cannot read {item!r}; write e.g. --schemes='{call.name}(lam=0.9)'")
        schemes.append((call.name, dict(call.named)))
    return schemes


def label(name: str, args: Mapping[str, Any]) -> str:
    """Return a scheme as tables show it, e.g. `step_gae(lam=0.9)`."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in args.items())})" if args else name


def missing_need(scheme: Scheme, settings: Settings, trajectories: Sequence[Trajectory]) -> str | None:
    """Return what a scheme needs and these trajectories or their run lack; None if nothing."""
    groups = [t.group for t in trajectories]
    greedy = sum(not math.isfinite(math.nan if t.greedy_return is None else t.greedy_return) for t in trajectories)
    if scheme.needs_critic and settings.run.critic == "none":
        return "needs a critic, and the run has none (config.critic)"
    if scheme.needs_state_key and all(s.state_key is None for t in trajectories for s in t.steps):
        return "needs state keys, and the recorded steps have none (Observation.state_key of the environment)"
    if scheme.needs_action_key and all(s.action_key is None for t in trajectories for s in t.steps):
        return "needs action keys, and the recorded steps have none (an earlier version recorded them)"
    if scheme.needs_belief and any(s.belief is None for t in trajectories for s in t.steps):
        return "needs beliefs in the gold answer, which not all recorded steps have (credit.probe of the run)"
    if scheme.needs_frozen_belief and settings.credit.probe != "reference":
        return f"needs the reference's beliefs, and those recorded are the {settings.credit.probe}'s (frozen=False)"
    if scheme.needs_greedy and greedy:
        return f"needs the reward of a greedy rollout of each row, which {greedy} of {len(groups)} trajectories lack"
    if scheme.needs_samples and len(set(groups)) == len(groups):
        return "compares the samples of a task row, and each row was sampled once"
    return None

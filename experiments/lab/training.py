"""Training in the credit lab, one compiled program: rollouts, the library's credit and loss, updates, exact values.

    lax.map over jobs (hyper-parameters) · vmap over seeds · lax.scan over updates:
      rollouts by lax.scan ──> lay_out ──> scheme of `agentr1_jax.credit` ──> loss of `agentr1_jax.learner` ──> Adam

An action is a response of one token. The policy sees observations; a tabular one has logits and a value for each, a
recurrent one is a GRU over observations, with a critic of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from agentr1_jax.credit import Scheme, TokenBatch, get_scheme, step_returns
from agentr1_jax.learner.batch import LossTokens
from agentr1_jax.learner.config import LossConfig, Objective
from agentr1_jax.learner.update import TokenOutputs, loss_from_outputs
from experiments.credit.estimates import PathBatch, lay_out
from experiments.lab.processes import ACTIONS, STATES, Tables

PolicyKind = Literal["tabular", "recurrent"]
Params = dict[str, Any]
NEVER = -1e9
"""Logit of an action that a state does not have."""
VALUE_RATE = 0.1
"""Learning rate of critics."""
WIDTH = 16
"""Width of the recurrent policy."""
EVERY = 10
"""Updates from one rank correlation to the next: sorting takes as long as the rest."""
ROUND = 1e-5
"""Advantages that differ by less are equal, for rank correlations."""


class Setting(NamedTuple):
    """What a compiled program is made for.

    Attributes:
      name: of the credit scheme.
      arguments: of the scheme, by name; those that a job gives replace them.
      policy: kind of policy.
      horizon: capacity of steps.
      groups, samples: task rows of a batch, and trajectories of each.
      updates: batches of a training, one update each.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()
    policy: PolicyKind = "tabular"
    horizon: int = 8
    groups: int = 2
    samples: int = 8
    updates: int = 200

    @property
    def scheme(self) -> Scheme:
        """The credit scheme with its arguments."""
        return get_scheme(self.name, **dict(self.arguments))

    @property
    def trajectories(self) -> int:
        """N of a batch."""
        return self.groups * self.samples


@flax.struct.dataclass
class Curves:
    """What a training leaves, for each update: figures of the policy before it, and of its batch.

    Attributes:
      expected: J = E[Σ r] of the policy, exact; of a recurrent policy the mean return of the batch.
      alignment: rank correlation (Spearman) of the scheme's advantages with the exact A^π over the steps of the batch,
        at every `EVERY`-th update; NaN elsewhere, where either is constant, and for a recurrent policy, whose A^π is
        not tabular.
      alignment_best: the same with Q* − V*, by the actions that are best from there on.
    """

    expected: Float[Array, "*jobs updates"]
    alignment: Float[Array, "*jobs updates"]
    alignment_best: Float[Array, "*jobs updates"]


@flax.struct.dataclass
class Sample:
    """Trajectories of one batch, N of at most T steps."""

    state: Int[Array, "trajectories steps"]
    observation: Int[Array, "trajectories steps"]
    action: Int[Array, "trajectories steps"]
    reward: Float[Array, "trajectories steps"]
    real: Bool[Array, "trajectories steps"]


class Policy(NamedTuple):
    """Functions of a policy or a critic.

    Attributes:
      init: key -> parameters.
      start: number of trajectories -> memory before the first step.
      step: (parameters, memory, observations [N]) -> (memory, outputs [N, size]).
    """

    init: Callable[[Array], Any]
    start: Callable[[int], Any]
    step: Callable[[Any, Any, Array], tuple[Any, Array]]


def make_policy(kind: PolicyKind, size: int) -> Policy:
    """Make a policy (size ACTIONS: logits) or a critic (size 1); both start at 0, the uniform policy."""
    if kind == "tabular":
        return Policy(
            init=lambda key: jnp.zeros((STATES, size)),
            start=lambda count: (),
            step=lambda params, memory, observation: (memory, params[observation]),
        )
    cell, head = nn.GRUCell(WIDTH), nn.Dense(size, kernel_init=nn.initializers.zeros)

    def init(key: Array) -> Any:
        memory, one_hot = jnp.zeros((1, WIDTH)), jnp.zeros((1, STATES))
        keys = jax.random.split(key)
        return {"cell": cell.init(keys[0], memory, one_hot), "head": head.init(keys[1], memory)}

    def step(params: Any, memory: Array, observation: Array) -> tuple[Array, Array]:
        memory, hidden = cell.apply(params["cell"], memory, jax.nn.one_hot(observation, STATES))
        return memory, jnp.asarray(head.apply(params["head"], hidden))

    return Policy(init, lambda count: jnp.zeros((count, WIDTH)), step)


def outputs_of(policy: Policy, params: Any, observation: Int[Array, "n steps"]) -> Float[Array, "n steps size"]:
    """Return the outputs at every step of given trajectories."""

    def step(memory: Any, seen: Array) -> tuple[Any, Array]:
        return policy.step(params, memory, seen)

    _, outputs = jax.lax.scan(step, policy.start(observation.shape[0]), observation.T)
    return jnp.swapaxes(outputs, 0, 1)


def log_policy(
    tables: Tables, logits: Float[Array, "*n actions"], state: Int[Array, "*n"]
) -> Float[Array, "*n actions"]:
    """Return log π of every action of the states."""
    return jax.nn.log_softmax(jnp.where(tables.allowed[state], logits, NEVER))


def roll_out(
    policy: Policy, params: Any, tables: Tables, row: Int[Array, "n"], key: Array, *, steps: int, greedy: bool = False
) -> Sample:
    """Sample a trajectory for each row, of at most `steps` steps."""

    # One gather a step: tables by state and action, what is read together beside each other.
    cumulative = jnp.cumsum(tables.probability, -1)
    rows = jnp.concatenate([cumulative, tables.reward, tables.following.astype(jnp.float32)], -1)
    chances = tables.probability.shape[-1]

    def step(carry: tuple[Any, Array, Array], xs: tuple[Array, Array]) -> tuple[Any, tuple[Array, ...]]:
        memory, state, alive = carry
        t, drawn = xs
        here = jnp.minimum(state, STATES - 1)
        observation = tables.observation[here]
        memory, logits = policy.step(params, memory, observation)
        log_pi = log_policy(tables, logits, here)
        action = jnp.argmax(log_pi, -1) if greedy else _pick(jnp.cumsum(jnp.exp(log_pi), -1), drawn[0])
        upto, reward, following = jnp.split(rows[here, action], (chances, 2 * chances), -1)
        outcome = jax.nn.one_hot(_pick(upto, drawn[1]), chances)
        real = alive & (t < tables.horizon)
        after = jnp.sum(following * outcome, -1).astype(jnp.int32)
        seen = (here, observation, action, jnp.where(real, jnp.sum(reward * outcome, -1), 0), real)
        return (memory, after, real & (after < STATES)), seen

    carry = policy.start(len(row)), tables.start[row], jnp.ones(len(row), bool)
    _, seen = jax.lax.scan(step, carry, (jnp.arange(steps), jax.random.uniform(key, (steps, 2, len(row)))))
    return Sample(*(x.T for x in seen))


def _pick(cumulative: Float[Array, "n choices"], uniform: Float[Array, "n"]) -> Int[Array, "n"]:
    """Draw an index for each row of a cumulative distribution; none of probability 0."""
    total = cumulative[:, -1:]
    drawn = jnp.sum(cumulative <= uniform[:, None] * total, -1)
    return jnp.minimum(drawn, jnp.sum(cumulative < total, -1))


def action_values(
    tables: Tables, horizon: int, policy: Float[Array, "states actions"] | None
) -> tuple[Float[Array, "steps states actions"], Float[Array, "steps states"]]:
    """Return Q and V by steps taken, of a policy's probabilities or (None) of the best actions; exact.

    Qₜ(s, a) = Σ p(r, s′) [r + Vₜ₊₁(s′)],  V = Σₐ π(a|s) Q or maxₐ Q, and 0 from the horizon on.
    """

    def back(value: Array, t: Array) -> tuple[Array, tuple[Array, Array]]:
        ahead = jnp.append(value, 0.0)[tables.following]
        q = jnp.sum(tables.probability * (tables.reward + ahead), -1)
        best = jnp.max(jnp.where(tables.allowed, q, -jnp.inf), -1)
        value = jnp.where(t < tables.horizon, best if policy is None else jnp.sum(policy * q, -1), 0)
        return value, (q, value)

    _, (q, value) = jax.lax.scan(back, jnp.zeros(STATES), jnp.arange(horizon), reverse=True)
    return q, value


def center_ranks(x: Float[Array, "n"], real: Bool[Array, "n"]) -> Float[Array, "n"]:
    """Return the rank of each real element less their mean, ties by their mean rank; 0 elsewhere."""
    n = x.shape[0]
    ordered, place = jax.lax.sort((jnp.where(real, jnp.round(x / ROUND), jnp.inf), jnp.arange(n)), num_keys=1)
    differs = ordered[1:] != ordered[:-1]
    first = jax.lax.cummax(jnp.where(jnp.append(True, differs), jnp.arange(n), 0))
    last = jax.lax.cummin(jnp.where(jnp.append(differs, True), jnp.arange(n), n), reverse=True)
    rank = jnp.zeros(n).at[place].set((first + last) / 2, unique_indices=True)
    return jnp.where(real, rank - jnp.mean(rank, where=real), 0)


def align(
    sample: Sample, loss_tokens: LossTokens, values: Sequence[tuple[Float[Array, "steps states actions"], Array]]
) -> list[Float[Array, ""]]:
    """Return Spearman's rank correlations of the advantages of a batch with Q − V, for each pair of `action_values`.

    Args:
      sample: the trajectories.
      loss_tokens: with advantages.
      values: Q and V.
    """
    t = jnp.arange(sample.state.shape[1])
    exact = [(q[t, sample.state, sample.action] - v[t, sample.state]).ravel()[loss_tokens.target] for q, v in values]
    # One sort for all.
    own, *others = jax.vmap(center_ranks, (0, None))(jnp.stack([loss_tokens.advantage, *exact]), loss_tokens.is_action)
    return [jnp.sum(own * other) / jnp.sqrt(jnp.sum(own**2) * jnp.sum(other**2)) for other in others]


class Parts(NamedTuple):
    """Policy and critic of a program."""

    policy: Policy
    critic: Policy

    def init(self, key: Array) -> Params:
        """Return the parameters before training."""
        return {"policy": self.policy.init(key), "critic": self.critic.init(key)}


def make_parts(kind: PolicyKind) -> Parts:
    """Make a policy and a critic of one kind."""
    return Parts(make_policy(kind, ACTIONS), make_policy(kind, 1))


def outputs(parts: Parts, tables: Tables, params: Params, sample: Sample) -> tuple[Array, Array]:
    """Return log π of every action [N, T, ACTIONS], and the critic's value [N, T], at every step of trajectories."""
    log_pi = log_policy(tables, outputs_of(parts.policy, params["policy"], sample.observation), sample.state)
    return log_pi, outputs_of(parts.critic, params["critic"], sample.observation)[..., 0]


def assign_credit(
    setting: Setting,
    tables: Tables,
    sample: Sample,
    known: tuple[Array, Array],
    baseline: Float[Array, ""],
    greedy: Float[Array, "n"],
    arguments: Mapping[str, Array],
) -> tuple[TokenBatch, LossTokens]:
    """Lay a batch out as schemes and loss read it, and credit it. A loss token's target is its step's place in [N, T].

    The belief at a step is log π of the right answer, given that the policy answers there.

    Args:
      setting: of the program.
      tables: the process.
      sample: the trajectories.
      known: `outputs` of the policy that sampled them.
      baseline: mean return to go of earlier batches, which stands for a state without another value.
      greedy: return of a greedy rollout of each trajectory's row.
      arguments: of the scheme, in place of its own.
    """
    scheme, (log_pi, value) = setting.scheme, known
    count, steps = sample.real.shape
    place = jnp.arange(count * steps).reshape(count, steps)
    taken = jnp.take_along_axis(log_pi, sample.action[..., None], -1)[..., 0]
    paths = PathBatch(
        action=jnp.where(sample.real, place, -1)[..., None],
        state=jnp.where(sample.real, sample.observation, -1),
        reward=sample.reward,
        value=value[..., None],
        state_value=jnp.broadcast_to(baseline, sample.real.shape),
        old_logprob=jnp.where(sample.real, taken, 0)[..., None],
        group=jnp.repeat(jnp.arange(setting.groups), setting.samples),
        greedy_return=greedy,
    )
    fields, loss_tokens = jax.tree.map(lambda x: x[0], lay_out(jax.tree.map(lambda x: x[None], paths)))
    real, target = loss_tokens.is_action, loss_tokens.target
    # A step is one token: what is in the order of tokens is in that of steps.
    fields["action_key"] = jnp.where(real, sample.action.ravel()[target], -1)
    fields["values"] = fields["values"] if scheme.uses_critic else None
    if scheme.needs_belief:
        answers = jnp.where(tables.answers, log_pi, NEVER)
        gold = jnp.take_along_axis(answers, tables.gold[sample.state][..., None], -1)[..., 0]
        belief = (gold - jax.nn.logsumexp(answers, -1)).ravel()[target]
        fields["belief"] = jnp.where(real, belief, 0)
    batch = TokenBatch(**fields)
    credit = scheme.function(batch, **{**scheme.arguments, **arguments})
    found = {"advantage": credit.advantages, "weight": real / count}
    if credit.value_targets is not None and credit.value_mask is not None and scheme.uses_critic:
        share = credit.value_mask / jnp.maximum(jnp.sum(credit.value_mask), 1)
        found |= {"old_value": batch.values, "value_target": credit.value_targets, "value_weight": share}
    return batch, dataclasses.replace(loss_tokens, **found)


def batch_loss(parts: Parts, tables: Tables, params: Params, sample: Sample, loss_tokens: LossTokens) -> Array:
    """Return the library's loss of a credited batch: summed over tokens, divided by trajectories."""
    log_pi, value = outputs(parts, tables, params, sample)
    taken = jnp.take_along_axis(log_pi, sample.action[..., None], -1)[..., 0]
    taken, value = (x.ravel()[loss_tokens.target][None] for x in (taken, value))
    tokens = jax.tree.map(lambda x: x[None], loss_tokens)
    found = TokenOutputs(taken, jnp.zeros_like(taken), None if loss_tokens.value_weight is None else value)
    return loss_from_outputs(Objective(LossConfig()), found, tokens)[0]


def train(
    setting: Setting, tables: Tables, rate: Float[Array, ""], arguments: Mapping[str, Array], key: Array
) -> Curves:
    """Train a policy from scratch on one process, with one seed.

    Args:
      setting: of the program.
      tables: the process.
      rate: learning rate of the policy.
      arguments: of the scheme, in place of its own.
      key: of everything that is drawn.
    """
    scheme, parts = setting.scheme, make_parts(setting.policy)
    optimizer = optax.scale_by_adam(b1=0.9, b2=0.99)
    best = action_values(tables, setting.horizon, None)

    def update(carry: tuple[Any, Any, Array, Array], xs: tuple[Array, Array]) -> tuple[Any, Curves]:
        (params, adam_state, total, count), (number, key) = carry, xs
        keys = jax.random.split(key, 3)
        row = jax.random.randint(keys[0], (setting.groups,), 0, tables.start.shape[0])
        simulate = functools.partial(roll_out, parts.policy, params["policy"], tables, steps=setting.horizon)
        sample = simulate(jnp.repeat(row, setting.samples), keys[1])
        greedy = jnp.zeros(setting.trajectories)
        if scheme.needs_greedy:
            greedy = jnp.repeat(simulate(row, keys[2], greedy=True).reward.sum(1), setting.samples)
        known, baseline = outputs(parts, tables, params, sample), total / jnp.maximum(count, 1)
        batch, loss_tokens = assign_credit(setting, tables, sample, known, baseline, greedy, arguments)
        gradient = jax.grad(batch_loss, argnums=2)(parts, tables, params, sample, loss_tokens)
        step, adam_state = optimizer.update(gradient, adam_state)
        rates = {"policy": rate, "critic": VALUE_RATE}
        moved = {part: jax.tree.map(lambda p, u, r=r: p - r * u, params[part], step[part]) for part, r in rates.items()}
        total += jnp.sum(step_returns(batch, scheme.gamma), where=batch.real_step)
        count += jnp.sum(batch.real_step)

        expected, exact = sample.reward.sum(1).mean(), [best]
        if setting.policy == "tabular":
            everywhere = log_policy(tables, params["policy"][tables.observation], jnp.arange(STATES))
            exact += [action_values(tables, setting.horizon, jnp.exp(everywhere))]
            expected = exact[1][1][0, tables.start].mean()
        aligned = jax.lax.cond(
            number % EVERY == 0,
            lambda: align(sample, loss_tokens, exact),
            lambda: [jnp.nan] * len(exact),
        )
        by_policy = aligned[1] if aligned[1:] else jnp.full((), jnp.nan)
        return (moved, adam_state, total, count), Curves(expected, by_policy, aligned[0])

    first, *later = jax.random.split(key, setting.updates + 1)
    params = parts.init(first)
    start = params, optimizer.init(params), jnp.zeros(()), jnp.zeros(())
    _, curves = jax.lax.scan(update, start, (jnp.arange(setting.updates), jnp.stack(later)))
    return curves


@functools.lru_cache(maxsize=4)
def make_trainer(setting: Setting) -> Callable[[Tables, Array, Mapping[str, Array], Array], Curves]:
    """Compile trainings of a setting. Few are kept: each takes a share of the memory maps that a process may have.

    Returns:
      jitted (tables, learning rates [J], arguments [J] by name, keys [J, seeds]) -> curves [J, seeds, updates].
    """

    @jax.jit
    def trainer(tables: Tables, rates: Array, arguments: Mapping[str, Array], keys: Array) -> Curves:
        def job(one: tuple[Array, Mapping[str, Array], Array]) -> Curves:
            rate, own, seeds = one
            return jax.vmap(lambda key: train(setting, tables, rate, own, key))(seeds)

        return jax.lax.map(job, (rates, arguments, keys))

    return trainer

"""Decision processes small enough to list every trajectory, and with it the exact policy gradient.

A step is a response of one or two tokens out of two; what it does is one row of a table, noise included. The policy is
a softmax over two logits at each node, and a node is a state with the tokens of the response so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

STATES, STEPS, TOKENS, VOCABULARY = 5, 5, 2, 2
"""Capacities that all processes share, so that they share compiled programs."""
PREFIXES = {(): 0, (0,): 1, (1,): 2}
NODES = STATES * len(PREFIXES)
END = -1

Response = tuple[int, ...]
Result = tuple[float, float, int]
"""Probability, reward, next state."""
Table = Mapping[int, Mapping[Response, tuple[Result, ...]]]


@dataclasses.dataclass(frozen=True)
class Process:
    """A table of what each response does in each state.

    Attributes:
      about: what is hard about it.
      starts: first state of each task row; rows are equally likely.
      table: by state and response.
      logits: of the policy, [NODES, VOCABULARY].
      shift: standard deviation of what the logits of an older policy differ by; one that takes about a third of its
        tokens out of 0.8 <= ρ <= 1.2, so that clips are felt and do not rule.
      max_steps: the episode ends after so many steps, and nothing is worth anything then.
    """

    about: str
    starts: tuple[int, ...]
    table: Table
    logits: Float[np.ndarray, "nodes vocabulary"]
    shift: float
    max_steps: int = STEPS


@dataclasses.dataclass(frozen=True)
class Paths:
    """All trajectories of a process: M of them, those of one row together; -1 beyond the end.

    Attributes:
      action: place of each token in the flat logits.
      state: of each step.
      reward: of each step, 0 beyond the end.
      noise: probability of what the environment did.
      row: the task row.
    """

    action: Int[np.ndarray, "paths steps tokens"]
    state: Int[np.ndarray, "paths steps"]
    reward: Float[np.ndarray, "paths steps"]
    noise: Float[np.ndarray, "paths"]
    row: Int[np.ndarray, "paths"]

    @property
    def rows(self) -> int:
        """Number of task rows."""
        return int(self.row[-1]) + 1

    @property
    def outcome(self) -> Float[np.ndarray, "paths"]:
        """R of each trajectory."""
        return self.reward.sum(axis=1)


def seeded_logits(seed: int) -> Float[np.ndarray, "nodes vocabulary"]:
    """Logits of a policy that likes some tokens more than others."""
    return np.random.default_rng(seed).normal(scale=0.7, size=(NODES, VOCABULARY))


def old_logits(process: Process, shift: float) -> Float[np.ndarray, "nodes vocabulary"]:
    """Logits of an older policy: those of the process and noise of standard deviation `shift`."""
    return process.logits + np.random.default_rng(0).normal(scale=shift, size=process.logits.shape)


def key_door() -> Process:
    """The reward comes three steps after the key was taken; a lever on the way pays at random and means nothing."""

    def lever(following: int) -> Mapping[Response, tuple[Result, ...]]:
        return {(0,): ((1.0, 0.0, following),), (1,): ((0.5, 0.5, following), (0.5, -0.5, following))}

    hall, corridor, corridor_with_key, door, door_with_key = range(5)
    table: Table = {
        hall: {
            (0, 0): ((0.8, 0.0, corridor_with_key), (0.2, 0.0, corridor)),
            (0, 1): ((0.8, -0.1, corridor_with_key), (0.2, -0.1, corridor)),
            (1, 0): ((1.0, 0.0, corridor),),
            (1, 1): ((0.5, 0.5, corridor), (0.5, -0.5, corridor)),
        },
        corridor: lever(door),
        corridor_with_key: lever(door_with_key),
        door: {(a, b): ((1.0, -0.1 * a, END),) for a in (0, 1) for b in (0, 1)},
        door_with_key: {(a, b): ((1.0, float((a, b) == (1, 0)), END),) for a in (0, 1) for b in (0, 1)},
    }
    return Process("delayed credit, noisy distractor", (hall, corridor_with_key), table, seeded_logits(1), shift=0.45)


def stop_or_go() -> Process:
    """One arm ends the episode at once, the other leads to a second choice: the policy decides who is alive then."""
    table: Table = {
        0: {(0,): ((0.5, 0.6, END), (0.5, 0.2, END)), (1,): ((1.0, 0.0, 1),)},
        1: {(0,): ((1.0, 0.0, END),), (1,): ((0.8, 1.0, END), (0.2, 0.0, END))},
    }
    return Process("the policy decides when to stop", (0,), table, seeded_logits(2), shift=1.2)


def revisits() -> Process:
    """Three cells in a row with the goal behind the last; moves slip, and a cell is seen again and again."""
    table: dict[int, Mapping[Response, tuple[Result, ...]]] = {}
    for cell in range(3):
        right = (0.8, -0.1, cell + 1) if cell < 2 else (0.8, 1.0, END)
        left = ((0.8, -0.1, cell - 1), (0.2, -0.1, cell)) if cell else ((1.0, -0.1, cell),)
        table[cell] = {(0,): left, (1,): (right, (0.2, -0.1, cell))}
    return Process("states seen again and again", (1, 0), table, seeded_logits(9), shift=1.4)


def short_or_long() -> Process:
    """The first token of a response decides its length; two roads of two rooms pay for short or for long responses.

    V at the last token of a response then stands at different places: before a short one its choice is still open.
    `bilevel_gae` compares such values of successive steps, and with λ < 1 it errs even with the exact V.
    """

    def room(short: float, long: float, following: int) -> Mapping[Response, tuple[Result, ...]]:
        noisy = ((0.5, long + 0.5, following), (0.5, long - 0.5, following))
        return {(0,): ((1.0, short, following),), (1, 0): ((1.0, long, following),), (1, 1): noisy}

    fork, brief, wordy, brief_again, wordy_again = range(5)
    table: Table = {
        fork: {(0,): ((1.0, 0.0, brief),), (1, 0): ((1.0, 0.0, wordy),), (1, 1): ((1.0, 0.0, wordy),)},
        brief: room(1.0, 0.0, brief_again),
        wordy: room(0.0, 1.0, wordy_again),
        brief_again: room(1.0, 0.0, END),
        wordy_again: room(0.0, 1.0, END),
    }
    return Process("actions choose the length of a response", (fork,), table, seeded_logits(0), shift=1.0)


PROCESSES = {
    "key_door": key_door,
    "stop_or_go": stop_or_go,
    "revisits": revisits,
    "short_or_long": short_or_long,
}


def every_path(process: Process) -> Paths:
    """List all trajectories, each with the probability of its noise."""
    paths = [
        (row, noise, steps)
        for row, start in enumerate(process.starts)
        for steps, noise in _walk(process, start, process.max_steps)
    ]
    out = Paths(
        action=np.full((len(paths), STEPS, TOKENS), -1),
        state=np.full((len(paths), STEPS), -1),
        reward=np.zeros((len(paths), STEPS)),
        noise=np.array([noise for _, noise, _ in paths]),
        row=np.array([row for row, _, _ in paths]),
    )
    for m, (_, _, steps) in enumerate(paths):
        for t, (state, response, reward) in enumerate(steps):
            out.state[m, t], out.reward[m, t] = state, reward
            for k, token in enumerate(response):
                node = state * len(PREFIXES) + PREFIXES[response[:k]]
                out.action[m, t, k] = node * VOCABULARY + token
    return out


def _walk(process: Process, state: int, steps: int) -> Iterator[tuple[tuple[tuple[int, Response, float], ...], float]]:
    """Trajectories of at most so many steps from a state on, each with the probability of its noise."""
    if state == END or not steps:
        yield (), 1.0
        return
    for response, results in process.table[state].items():
        for probability, reward, following in results:
            for rest, noise in _walk(process, following, steps - 1):
                yield ((state, response, reward), *rest), probability * noise


def log_policy(logits: Float[np.ndarray, "nodes vocabulary"]) -> Float[np.ndarray, "actions"]:
    """log π of each token at each node, flat."""
    return (logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)).ravel()


def probabilities(paths: Paths, log_pi: Float[np.ndarray, "actions"]) -> Float[np.ndarray, "paths"]:
    """Probability of each trajectory given its row."""
    return paths.noise * np.exp(np.where(paths.action >= 0, log_pi[paths.action], 0).sum(axis=(1, 2)))


def greedy_probabilities(paths: Paths, logits: Float[np.ndarray, "nodes vocabulary"]) -> Float[np.ndarray, "paths"]:
    """Probability of each trajectory given its row, where every token is the likeliest one."""
    likeliest = (logits == logits.max(axis=-1, keepdims=True)).ravel()
    return paths.noise * np.where(paths.action >= 0, likeliest[paths.action], True).all(axis=(1, 2))


def exact_values(
    paths: Paths, logits: Float[np.ndarray, "nodes vocabulary"]
) -> tuple[Float[np.ndarray, "paths steps tokens"], Float[np.ndarray, "states"]]:
    """V before each token, by node and step, and V of each state, averaged over the steps at which it is visited."""
    weight = np.broadcast_to(probabilities(paths, log_policy(logits))[:, None, None], paths.action.shape)
    to_go = np.flip(np.cumsum(np.flip(paths.reward, axis=1), axis=1), axis=1)
    real = paths.action >= 0

    def mean(unit: np.ndarray, mask: np.ndarray) -> np.ndarray:
        future = np.broadcast_to(to_go[:, :, None], mask.shape)[mask]
        total = np.bincount(unit, weight[mask] * future)
        return total / np.maximum(np.bincount(unit, weight[mask]), 1e-300)

    node = np.arange(STEPS)[:, None] * NODES + paths.action // VOCABULARY
    values = np.where(real, mean(node[real], real)[np.where(real, node, 0)], 0.0)
    first = real & (np.arange(TOKENS) == 0)
    of_state = mean(np.broadcast_to(paths.state[:, :, None], first.shape)[first], first)
    return values, np.pad(of_state, (0, STATES - len(of_state)))


def exact_gradient(
    paths: Paths, logits: Float[np.ndarray, "nodes vocabulary"]
) -> tuple[float, Float[np.ndarray, "actions"]]:
    """J = E[Σₜ rₜ] = Σ_m p_m·R_m and ∇J by the flat logits, in float64."""

    def expectation(logits: Float[Array, "nodes vocabulary"]) -> Float[Array, ""]:
        log_pi = jax.nn.log_softmax(logits).ravel()
        path = jnp.sum(jnp.where(paths.action >= 0, log_pi[paths.action], 0), axis=(1, 2))
        return jnp.sum(paths.noise * jnp.exp(path) * paths.outcome) / paths.rows

    with jax.enable_x64(True):
        value, derivative = jax.value_and_grad(expectation)(jnp.asarray(logits, jnp.float64))
    return float(value), np.asarray(derivative).ravel()

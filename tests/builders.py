"""Random but valid trajectories and credit batches for the tests, as plain functions and hypothesis strategies."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from agentr1_jax.credit import CreditBatch
from agentr1_jax.trajectory import Outcome, Step, Trajectory

VOCAB = 32
CONTEXTS = ("append", "window", "rewrite", "branch", "mixed")
MAX_TRAJECTORIES, MAX_STEPS, MAX_TOKENS = 6, 4, 4
LONGEST = 5 + MAX_STEPS * (MAX_TOKENS + 3)
"""Most ids of one context: an opening, then a response and an observation for each step."""


def golden(name: str) -> dict[str, Any]:
    """One entry of the golden numbers: `inputs` and `outputs`, lists as arrays."""
    entry = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())[name]
    return {
        part: {key: np.array(x) if isinstance(x, list) else x for key, x in entry[part].items()}
        for part in ("inputs", "outputs")
    }


def trajectory(
    rng: np.random.Generator,
    tokens: Sequence[int],
    *,
    context: str = "append",
    cut: str | None = None,
    group: int = 0,
    sample: int = 0,
) -> Trajectory:
    """A trajectory whose step t has `tokens[t]` response tokens.

    Args:
      rng: source of ids, log-probs and rewards.
      tokens: response length of each step.
      context: `append`; `window` (the opening and the last turn); `rewrite` (a new prompt each time); `branch` (goes on
        from anywhere in what was before, as after a summary); `mixed`. A group shares its opening.
      cut: None for one that ended, `steps` for one cut between steps, `response` for one cut within its last response.
      group, sample: its place in the batch.
    """

    def ids(least: int, most: int) -> np.ndarray:
        return rng.integers(0, VOCAB, rng.integers(least, most + 1)).astype(np.int32)

    opening = np.random.default_rng(group).integers(0, VOCAB, 2 + group % 4).astype(np.int32)
    prompt, prompts, responses = opening, [], []
    for count in tokens:
        prompts.append(prompt)
        responses.append(ids(count, count))
        rule = rng.choice(CONTEXTS[:-1]) if context == "mixed" else context
        old = np.concatenate([prompts[at := rng.integers(len(prompts))], responses[at]])
        before = {
            "append": np.concatenate([prompt, responses[-1]]),
            "window": np.concatenate([opening, responses[-1]]),
            "branch": old[: rng.integers(min(len(opening), len(old)), len(old) + 1)],
        }
        prompt = np.concatenate([before[rule], ids(1, 3)]) if rule in before else ids(2, 5)
    final = {None: None, "steps": prompt, "response": np.concatenate([prompts[-1], responses[-1]])}[cut]
    outcome = {None: Outcome.ANSWERED, "steps": Outcome.MAX_STEPS, "response": Outcome.RESPONSE_TRUNCATED}[cut]
    return Trajectory(
        uid=f"test/{group}/{sample}",
        group=group,
        sample=sample,
        task="test",
        seed=0,
        steps=tuple(
            Step(p, r, rng.uniform(-4, 0, len(r)).astype(np.float32), reward=float(rng.integers(-4, 5)) / 8)
            for p, r in zip(prompts, responses, strict=True)
        ),
        outcome=outcome,
        final_prompt_ids=final,
    )


@st.composite
def batches(draw: st.DrawFn, contexts: Sequence[str] = CONTEXTS) -> list[Trajectory]:
    """Up to `MAX_TRAJECTORIES` trajectories of one context rule, ended and cut, in up to three groups."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    context = draw(st.sampled_from(contexts))
    responses = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=MAX_STEPS)
    cuts = st.sampled_from((None, "steps", "response"))
    shapes = draw(st.lists(st.tuples(responses, cuts, st.integers(0, 2)), min_size=1, max_size=MAX_TRAJECTORIES))
    return [
        trajectory(rng, tokens, context=context, cut=cut, group=group, sample=i)
        for i, (tokens, cut, group) in enumerate(shapes)
    ]


def fixed_batch(context: str, seed: int = 0) -> list[Trajectory]:
    """Five trajectories of three groups, ended and cut."""
    rng = np.random.default_rng(seed)
    shapes = [
        ([3, 2, 4, 1], None, 0),
        ([2, 3], "steps", 0),
        ([4], "response", 1),
        ([1, 1, 3], None, 1),
        ([2, 4], None, 2),
    ]
    return [
        trajectory(rng, tokens, context=context, cut=cut, group=group, sample=i)
        for i, (tokens, cut, group) in enumerate(shapes)
    ]


def with_logprobs(trajectories: Sequence[Trajectory], logprobs: np.ndarray) -> list[Trajectory]:
    """The trajectories with other behaviour log-probs [K], in stream order."""
    out, at = [], 0
    for t in trajectories:
        steps = []
        for step in t.steps:
            own = logprobs[at : at + len(step.response_ids)].astype(np.float32)
            steps.append(dataclasses.replace(step, logprobs=own))
            at += len(step.response_ids)
        out.append(dataclasses.replace(t, steps=tuple(steps)))
    return out


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a `Rollout`."""

    value: float
    reward: float = 0.0
    is_action: bool = True


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A trajectory as nested lists, which loops can read: the reward and the tokens of each step."""

    group: int
    rewards: list[float]
    tokens: list[list[Token]]
    bootstrap: float = 0.0

    @property
    def outcome(self) -> float:
        """R_i."""
        return sum(self.rewards)


CAPACITIES = {"trajectories": 6, "steps": 18, "tokens": 100}
_NUMBER = st.integers(-16, 16).map(lambda n: n / 8)


@st.composite
def rollouts(draw: st.DrawFn, observations: bool = True) -> list[Rollout]:
    """Rollouts that fit `CAPACITIES`, each step with a sampled token; with `observations` other tokens lie between."""
    token = st.builds(Token, value=_NUMBER, reward=_NUMBER)
    if observations:
        token |= st.builds(Token, value=_NUMBER, reward=st.just(0.0), is_action=st.just(False))
    step = st.lists(token, min_size=1, max_size=5).filter(lambda tokens: any(t.is_action for t in tokens))
    out = []
    for _ in range(draw(st.integers(1, CAPACITIES["trajectories"]))):
        steps = draw(st.lists(st.tuples(_NUMBER, step), min_size=1, max_size=3))
        rewards, tokens = [r for r, _ in steps], [s for _, s in steps]
        bootstrap = draw(st.just(0.0) | _NUMBER)
        out.append(Rollout(draw(st.integers(0, 2)), rewards, tokens, bootstrap))
    return out


def credit_batch(
    data: Sequence[Rollout], *, trajectories: int, steps: int, tokens: int, dtype: Any = None
) -> CreditBatch:
    """The flat streams of rollouts, padded to capacities."""
    dtype = dtype or jnp.float32
    flat = [t for r in data for step in r.tokens for t in step]
    step_tokens = [len(step) for r in data for step in r.tokens]
    traj_steps = [len(r.tokens) for r in data]
    token_step = np.repeat(np.arange(len(step_tokens)), step_tokens)
    traj_of_step = np.repeat(np.arange(len(data)), traj_steps)

    def pad(x: Sequence[float] | np.ndarray, capacity: int, fill: float, dtype: Any) -> Any:
        return jnp.asarray([*x, *[fill] * (capacity - len(x))], dtype)

    return CreditBatch(
        rewards=pad([x for r in data for x in r.rewards], steps, 0, dtype),
        token_rewards=pad([t.reward for t in flat], tokens, 0, dtype),
        outcome=pad([r.outcome for r in data], trajectories, 0, dtype),
        state_key=jnp.full((steps,), -1, jnp.int32),
        values=pad([t.value for t in flat], tokens, 0, dtype),
        is_action=pad([t.is_action for t in flat], tokens, False, bool),
        token_step=pad(token_step, tokens, steps, jnp.int32),
        traj_of_step=pad(traj_of_step, steps, trajectories, jnp.int32),
        group=pad([r.group for r in data], trajectories, trajectories, jnp.int32),
        bootstrap=pad([r.bootstrap for r in data], trajectories, 0, dtype),
    )

"""Random but valid trajectories and credit batches for the tests, as plain functions and hypothesis strategies."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from agentr1_jax.credit import TokenBatch
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
    prompt, prompts, responses, observed, made = opening, [], [], None, []
    for count in tokens:
        prompts.append(prompt)
        made.append(observed)
        responses.append(ids(count, count))
        rule = rng.choice(CONTEXTS[:-1]) if context == "mixed" else context
        old = np.concatenate([prompts[at := rng.integers(len(prompts))], responses[at]])
        before = {
            "append": np.concatenate([prompt, responses[-1]]),
            "window": np.concatenate([opening, responses[-1]]),
            "branch": old[: rng.integers(min(len(opening), len(old)), len(old) + 1)],
        }
        answer = ids(1, 3) if rule in before else ids(2, 5)
        prompt, observed = np.concatenate([before.get(rule, answer[:0]), answer]), len(answer)
    final = {None: None, "steps": prompt, "response": np.concatenate([prompts[-1], responses[-1]])}[cut]
    outcome = {None: Outcome.ANSWERED, "steps": Outcome.MAX_STEPS, "response": Outcome.RESPONSE_TRUNCATED}[cut]
    return Trajectory(
        uid=f"test/{group}/{sample}",
        group=group,
        sample=sample,
        task="test",
        seed=0,
        steps=tuple(
            Step(
                p,
                r,
                rng.uniform(-4, 0, len(r)).astype(np.float32),
                reward=float(rng.integers(-4, 5)) / 8,
                observation_tokens=n,
            )
            for p, r, n in zip(prompts, responses, made, strict=True)
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
    """A trajectory as nested lists, which loops can read.

    Attributes:
      group: any integer in [0, trajectories).
      rewards: of each step, beside those of its tokens.
      tokens: of each step.
      bootstrap: value of what follows the last step.
      keys: state of each step, None where unknown; empty if none is known.
      actions: what each step did, likewise.
      state_values: fallback baseline of each step; empty for 0.
      greedy: reward of the greedy rollout of the same row.
      beliefs: mean log-prob of the gold answer at the prompt of each step; empty for 0.
    """

    group: int
    rewards: list[float]
    tokens: list[list[Token]]
    bootstrap: float = 0.0
    keys: Sequence[int | None] = ()
    state_values: Sequence[float] = ()
    greedy: float = 0.0
    actions: Sequence[int | None] = ()
    beliefs: Sequence[float] = ()

    @property
    def outcome(self) -> float:
        """R_i, with the rewards of its sampled tokens."""
        return sum(self.rewards) + sum(t.reward for step in self.tokens for t in step if t.is_action)


CAPACITIES = {"trajectories": 6, "steps": 18, "tokens": 100}
EIGHTHS = tuple(np.arange(-16, 17) / 8)
"""Numbers whose sums are exact, so that what is equal on paper is equal in floating point."""


@st.composite
def rollouts(draw: st.DrawFn, numbers: Sequence[float] = EIGHTHS, observations: bool = True) -> list[Rollout]:
    """Rollouts of up to three groups that fit `CAPACITIES`, each step with a sampled token.

    Some are lone members, states are revisited or unknown, some rollouts were cut; with `observations`, other tokens
    lie before, between and after the sampled ones. All their numbers are among `numbers`.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = st.lists(st.integers(1, 5), min_size=1, max_size=3)
    shape = st.tuples(st.integers(0, 2), lengths, st.booleans())
    shapes = draw(st.lists(shape, min_size=1, max_size=CAPACITIES["trajectories"]))

    def number() -> float:
        return float(rng.choice(numbers))

    def step(length: int) -> list[Token]:
        sampled = rng.random(length) < (0.6 if observations else 1.0)
        sampled[rng.integers(length)] = True
        return [Token(number(), number() if one else 0.0, bool(one)) for one in sampled]

    def states(count: int) -> list[int | None]:
        return [None if key < 0 else key for key in rng.integers(-1, 3, count).tolist()]

    return [
        Rollout(
            group=group,
            rewards=[number() for _ in lengths],
            tokens=[step(length) for length in lengths],
            bootstrap=number() if cut else 0.0,
            keys=states(len(lengths)),
            state_values=[number() for _ in lengths],
            greedy=number(),
            actions=[None if key < 0 else key for key in rng.integers(-1, 2, len(lengths)).tolist()],
            beliefs=[-abs(number()) for _ in lengths],
        )
        for group, lengths, cut in shapes
    ]


def credit_batch(
    data: Sequence[Rollout], *, trajectories: int, steps: int, tokens: int, dtype: Any = None
) -> TokenBatch:
    """The token batch of rollouts, padded to capacities."""
    dtype = dtype or np.float32
    flat = [t for r in data for step in r.tokens for t in step]
    step_tokens = [len(step) for r in data for step in r.tokens]
    traj_steps = [len(r.tokens) for r in data]
    token_step = np.repeat(np.arange(len(step_tokens)), step_tokens)
    step_trajectory = np.repeat(np.arange(len(data)), traj_steps)

    def numbers(keys: Sequence[Sequence[int | None]]) -> list[int]:
        return [
            -1 if k is None else k for r, own in zip(data, keys, strict=True) for k in own or [None] * len(r.tokens)
        ]

    def pad(x: Sequence[float] | np.ndarray, capacity: int, fill: float, dtype: Any) -> Any:
        return np.array([*x, *[fill] * (capacity - len(x))], dtype)

    fields = {
        "rewards": pad([x for r in data for x in r.rewards], steps, 0, dtype),
        "token_rewards": pad([t.reward for t in flat], tokens, 0, dtype),
        "returns": pad([r.outcome for r in data], trajectories, 0, dtype),
        "state_key": pad(numbers([r.keys for r in data]), steps, -1, np.int32),
        "action_key": pad(numbers([r.actions for r in data]), steps, -1, np.int32),
        "values": pad([t.value for t in flat], tokens, 0, dtype),
        "is_action": pad([t.is_action for t in flat], tokens, False, bool),
        "token_step": pad(token_step, tokens, steps, np.int32),
        "step_trajectory": pad(step_trajectory, steps, trajectories, np.int32),
        "group": pad([r.group for r in data], trajectories, trajectories, np.int32),
        "bootstrap": pad([r.bootstrap for r in data], trajectories, 0, dtype),
        "state_value": pad([x for r in data for x in r.state_values or [0.0] * len(r.tokens)], steps, 0, dtype),
        "greedy_return": pad([r.greedy for r in data], trajectories, 0, dtype),
        "belief": pad([x for r in data for x in r.beliefs or [0.0] * len(r.tokens)], steps, 0, dtype),
    }
    return TokenBatch(**jax.device_put(fields))

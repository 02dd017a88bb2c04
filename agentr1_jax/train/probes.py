"""Belief probes: how probable is the gold answer at the prompt of each step?

    prompt of step t | <answer>   Ostra
                       condition  answer     belief: mean log-prob of the answer's tokens, in nats

A probe is a trajectory of one step: the prompt of the step that it probes with the words before the answer behind it,
and the answer as its response. Packed together with the trajectories that it probes, it is one more branch of their
tree, and costs its own tokens alone. Only the forward pass before credit is assigned packs probes; the rows of an
update have none, so that no loss, gradient or denominator can hold one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from agentr1_jax.credit.scheme import ANSWER
from agentr1_jax.text.call_formats import make_call_format
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.text.tool_calls import render_answer
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import Step, Trajectory


@dataclasses.dataclass(frozen=True)
class Prober:
    """Writer of probes.

    Attributes:
      tokenizer: of the policy.
      text: `credit.probe_text`; empty for how experts write an answer in the call format.
      call_format: `agent.call_format`.
      most_tokens: most tokens of a probe; those that the policy could not write itself are refused.
      scorer: parameters under which probes are scored: the policy's of the batch, or the frozen reference's.
    """

    tokenizer: Tokenizer
    text: str
    call_format: str
    most_tokens: int
    scorer: Literal["policy", "reference"]

    @functools.cached_property
    def before(self) -> str:
        """Text between the prompt and the answer, as the policy would write it; template text."""
        written = make_call_format(self.call_format, self.tokenizer).render if not self.text else str
        return written(self.text or render_answer(ANSWER)).partition(ANSWER)[0]

    def encode(self, answer: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the words before the answer, int32 [C], and of the answer, int32 [A].

        The answer is data: it never becomes an added token. A space before it belongs to its first token.
        """
        words = self.before.removesuffix(" ")
        space = self.before[len(words) :]
        condition, ids = self.tokenizer.encode_template(words), self.tokenizer.encode_data(space + answer.strip())
        return np.asarray(condition, np.int32), np.asarray(ids, np.int32)

    def fault(self, row: Mapping[str, Any]) -> str | None:
        """Return why the answer of a task row cannot be probed, or None."""
        if not row.get("answers") or not str(row["answers"][0]).strip():
            return f"row {row.get('id')!r} has no answer to probe (credit.probe)"
        condition, answer = self.encode(str(row["answers"][0]))
        tokens = len(condition) + len(answer)
        if tokens > self.most_tokens:
            return (
                f"the answer of row {row.get('id')!r} takes {tokens} tokens as a probe (credit.probe), more than a "
                f"response of the policy may have; raise budget.response_tokens ({self.most_tokens})"
            )
        return None

    def probes(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return a probe for each step, in (trajectory, step) order. The answer is the first of the row's `answers`."""
        return list(itertools.chain.from_iterable(map(self._of_one, trajectories)))

    def _of_one(self, t: Trajectory) -> Iterator[Trajectory]:
        condition, answer = self.encode(str(t.row["answers"][0]))
        unknown = np.zeros(len(answer), np.float32)
        for step in t.steps:
            probe = Step(np.concatenate([step.prompt_ids, condition]), answer, unknown, reward=0.0)
            yield dataclasses.replace(t, steps=(probe,), final_prompt_ids=None)


def make_prober(settings: Settings, tokenizer: Tokenizer) -> Prober | None:
    """Return the prober of a run; None where it probes nothing."""
    c = settings.credit
    if c.probe == "none":
        return None
    return Prober(tokenizer, c.probe_text, settings.agent.call_format, settings.budget.response_tokens, c.probe)


def beliefs(probes: Sequence[Trajectory], logprobs: Float[np.ndarray, "tokens"]) -> Float[np.ndarray, "probes"]:
    """Return the mean of the log-probs of each probe's answer, float32."""
    lengths = np.array([len(t.steps[0].response_ids) for t in probes], np.int64)
    probe = np.repeat(np.arange(len(probes)), lengths)
    return (np.bincount(probe, logprobs, len(probes)) / lengths).astype(np.float32)

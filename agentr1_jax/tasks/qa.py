"""Question answering by search: what an episode earns, how it is measured and where it stands.

Rows hold `question`, `answers` (with aliases) and, for process rewards, `gold_ids`: ids of the passages that prove the
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic.dataclasses import dataclass

from agentr1_jax.envs import rewards
from agentr1_jax.envs.base import Row
from agentr1_jax.envs.rewards import Reward, Turn, load_functions
from agentr1_jax.envs.tool_env import ToolEnv, Tools
from agentr1_jax.text.tool_calls import ToolCall
from agentr1_jax.validation import STRICT

Scheme = Literal["weighted", "agentr1_v1"]


@dataclass(frozen=True, config=STRICT)
class QaRewards:
    """Weights of the reward parts of question answering by search."""

    answer: float = 1.0
    """of the exact match of the final answer"""
    f1: float = 0.0
    """of the F1 of the final answer"""
    format: float = 0.1
    """of the format, whose raw value is -1 for an ill-formed step"""
    gold_passage: float = 0.1
    """of each gold passage first retrieved"""
    repeated_query: float = -0.1
    """of each call made before"""


def search_env(tools: Tools, weights: Mapping[str, float], system: str) -> ToolEnv:
    """Return a ToolEnv for question answering: opens with `system` and the question, pays the weighted `PARTS`."""
    return ToolEnv(tools, question_messages(system), Reward(PARTS, weights), metrics, state_key)


def question_messages(system: str) -> Callable[[Row], list[dict[str, str]]]:
    """Return row -> opening of an episode: a system message, then the row's question as the user's."""
    return lambda row: [{"role": "system", "content": system}, {"role": "user", "content": row["question"]}]


def answer_part(row: Row, turns: Sequence[Turn]) -> float:
    """1 where the turn ends the episode with an answer that matches exactly (SQuAD normalisation, aliases)."""
    return rewards.exact_match(turns[-1].answer, row["answers"]) if turns[-1].answers else 0.0


def f1_part(row: Row, turns: Sequence[Turn]) -> float:
    """F1 of the answer where the turn ends the episode with one (SQuAD normalisation, the best alias)."""
    return rewards.f1(turns[-1].answer, row["answers"]) if turns[-1].answers else 0.0


def format_part(row: Row, turns: Sequence[Turn]) -> float:
    """0 for a well-formed turn (valid calls only, or one answer only), −1 for any other.

    A bonus for each well-formed turn would pay for needless turns; a penalty cannot be farmed.
    """
    turn = turns[-1]
    invalid = [r for r in turn.results if r.error is not None and r.error.fault == "model"]
    return 0.0 if bool(turn.calls) != (turn.answer is not None) and not invalid else -1.0


def gold_passage_part(row: Row, turns: Sequence[Turn]) -> float | None:
    """Number of gold passages that this turn retrieved for the first time; None where the row knows none."""
    if not row.get("gold_ids"):
        return None
    return float(len(found_gold(row, turns) - found_gold(row, turns[:-1])))


def repeated_query_part(row: Row, turns: Sequence[Turn]) -> float:
    """Number of this turn's calls that equal an earlier call of the episode (give it a negative weight)."""
    earlier = [call for turn in turns[:-1] for call in turn.calls]
    repeats = 0
    for call in turns[-1].calls:
        repeats += isinstance(call, ToolCall) and call in earlier
        earlier.append(call)
    return float(repeats)


PARTS: Mapping[str, rewards.Part] = {
    "answer": answer_part,
    "f1": f1_part,
    "format": format_part,
    "gold_passage": gold_passage_part,
    "repeated_query": repeated_query_part,
}


def make_reward(weights: Mapping[str, float], scheme: Scheme = "weighted", functions: Sequence[str] = ()) -> Reward:
    """Return the reward of question answering.

    Args:
      weights: weights of `PARTS`, which are logged in any case; not read by `agentr1_v1`.
      scheme: `agentr1_v1` pays the parts of `tasks.agentr1_v1` instead, each with weight 1.
      functions: of the user, paid in either scheme, as `module:function=weight`.

    Raises:
      ValueError: an unknown part, or a function that cannot be used.
    """
    parts, paid = dict(PARTS), dict(weights)
    if scheme == "agentr1_v1":
        from agentr1_jax.tasks import agentr1_v1

        parts |= agentr1_v1.PARTS
        paid = dict.fromkeys(agentr1_v1.PARTS, 1.0)
    own, own_weights = load_functions(functions, taken=parts)
    return Reward({**parts, **own}, {**paid, **own_weights})


def found_gold(row: Row, turns: Sequence[Turn]) -> set[str]:
    """Return the ids of the gold passages that any search of these turns returned."""
    gold = set(row.get("gold_ids", ()))
    return {i for turn in turns for result in turn.results for i in result.data.get("ids", ()) if i in gold}


def metrics(row: Row, turns: Sequence[Turn]) -> dict[str, float]:
    """Return `em` and `f1` of the final answer, 0 without one; `tool_calls`; `gold_recall` where gold is known."""
    answer = turns[-1].answer if turns and turns[-1].answers else None
    out = {
        "em": rewards.exact_match(answer, row["answers"]),
        "f1": rewards.f1(answer, row["answers"]),
        "tool_calls": float(sum(len(turn.calls) for turn in turns)),
    }
    if row.get("gold_ids"):
        out["gold_recall"] = len(found_gold(row, turns)) / len(set(row["gold_ids"]))
    return out


def state_key(row: Row, turns: Sequence[Turn]) -> str:
    """Return row, gold passages found so far and the kind of the last observation."""
    return "|".join([str(row["id"]), ",".join(sorted(found_gold(row, turns))), _kind(row, turns)])


def _kind(row: Row, turns: Sequence[Turn]) -> str:
    if not turns:
        return "start"
    errors = sorted({result.error.kind for result in turns[-1].results if result.error is not None})
    if errors:
        return "+".join(errors)
    if not turns[-1].calls:
        return "no_action"
    return "new_gold" if gold_passage_part(row, turns) else "nothing_new"

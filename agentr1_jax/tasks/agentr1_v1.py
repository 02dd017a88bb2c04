"""Agent-R1's reward of version 1, as its published code computes it.

    score = −1 + format + answer
    format = min(1, ½ · well-formed tool steps + ½ · [the last step is a well-formed answer])
    answer = 1 where the answer contains a gold one, else 0.2 where the last step does; 0 unless format ≥ ½

Contains: as a substring, after SQuAD's normalisation. That is no exact match, and metrics do not use it. Source:
`compute_score_format_answer` in `agent_r1/src/reward_score/qa_em_and_format.py` of Agent-R1 v1 (read in the fork
samee99/Agent-R1 at 7083a0a). docs/rewards.md says in what this differs: above all, a call must be readable here.

The published score is put on the last token. Here each step is paid by how much the score of the episode so far has
changed, so that the rewards of an episode sum to its score however it ended, cut ones included.
`shaping.terminal_only` gives that sum on the last step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.rewards import Part, Turn, normalise
from agentr1_jax.text.tool_calls import ToolCall

_THOUGHT_THEN_CALL = re.compile(r"<think>.*?</think>.*?<tool_call>.*?</tool_call>", re.DOTALL)
_THOUGHT_THEN_ANSWER = re.compile(r"<think>.*?</think>.*?<answer>.*?</answer>", re.DOTALL)
_ONCE = ("<think>", "</think>", "<tool_call>", "</tool_call>")

Score = Callable[[Row, Sequence[Turn]], float]


def format_score(turns: Sequence[Turn]) -> float:
    """0 to 1, for the turns of an episode of which the last may be a tool step too, and then earns nothing."""
    if not turns:
        return 0.0
    steps = sum(_is_tool_step(turn) for turn in turns[:-1])
    ends_well = _THOUGHT_THEN_ANSWER.fullmatch(turns[-1].text.strip()) is not None
    return min(1.0, 0.5 * steps + 0.5 * ends_well)


def answer_score(row: Row, turns: Sequence[Turn]) -> float:
    """0, 0.2 or 1, from the last turn."""
    if format_score(turns) < 0.5:
        return 0.0
    if turns[-1].answer is not None and _contains(turns[-1].answer, row["answers"]):
        return 1.0
    return 0.2 if _contains(turns[-1].text, row["answers"]) else 0.0


def _is_tool_step(turn: Turn) -> bool:
    readable = len(turn.calls) == 1 and isinstance(turn.calls[0], ToolCall)
    once = all(turn.text.count(tag) == 1 for tag in _ONCE)
    return readable and once and _THOUGHT_THEN_CALL.fullmatch(turn.text.strip()) is not None


def _contains(text: str, answers: Sequence[str]) -> bool:
    said, wanted = normalise(text), [normalise(answer) for answer in answers]
    # An answer that is all articles normalises to "", which is in every text.
    return any(answer in said if answer else answer == said for answer in wanted)


def _change(score: Score) -> Part:
    """The part that pays each turn by how much it changed the score of the episode so far."""
    return lambda row, turns: score(row, turns) - score(row, turns[:-1])


PARTS: Mapping[str, Part] = {
    "v1_start": _change(lambda row, turns: -1.0 if turns else 0.0),
    "v1_format": _change(lambda row, turns: format_score(turns)),
    "v1_answer": _change(answer_score),
}

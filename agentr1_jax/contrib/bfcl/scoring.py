"""Rewards, metrics and state keys of an episode.

All of them are functions of the row and the turns: every result carries digests of the state after its call (see
`FunctionTool`), and the row has those that the ground truth leads to (see `rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.rewards import Part, Turn
from agentr1_jax.text.tool_calls import ParseError

ILL_FORMED = ("unknown_tool", "bad_arguments")
"""Errors of form, which are errors in every state; a missing file is not one of them."""


def next_user_text(row: Row, turns: Sequence[Turn]) -> str | None:
    """Return the user's next request after these turns, the last of which has no call; None after the last request."""
    return None if is_over(row, turns) else row["turns"][count_user_turns(turns)]


def count_user_turns(turns: Sequence[Turn]) -> int:
    """Return how many requests of the user are done: each ends with a response without calls."""
    return sum(not turn.calls for turn in turns)


def is_over(row: Row, turns: Sequence[Turn]) -> bool:
    """Return whether all requests of the user are done."""
    return count_user_turns(turns) >= len(row["turns"])


def digest(row: Row, turns: Sequence[Turn], what: str) -> str:
    """Return the digest `state` or `compared` after these turns."""
    results = (result for turn in reversed(turns) for result in reversed(turn.results))
    return next((result.data[what] for result in results if what in result.data), row["start"][what])


def count_right_states(row: Row, turns: Sequence[Turn]) -> int:
    """Return at the ends of how many requests the state was that of the ground truth."""
    ends = [at for at, turn in enumerate(turns, 1) if not turn.calls]
    pairs = zip(ends, row["expected"], strict=False)
    return sum(digest(row, turns[:at], "compared") == expected for at, expected in pairs)


def state_part(row: Row, turns: Sequence[Turn]) -> float:
    """Return 1 where the turn ends the episode in the state that the whole ground truth leads to."""
    return float(is_over(row, turns) and digest(row, turns, "compared") == row["expected"][-1])


def turn_state_part(row: Row, turns: Sequence[Turn]) -> float:
    """Return 1 / (number of requests) where the turn ends a request in the state of the ground truth up to there."""
    return (count_right_states(row, turns) - count_right_states(row, turns[:-1])) / len(row["turns"])


def format_part(row: Row, turns: Sequence[Turn]) -> float:
    """Return −1 for a turn with a call that is unreadable, of an unknown function, or against its schema; else 0."""
    turn = turns[-1]
    unreadable = any(isinstance(call, ParseError) for call in turn.calls)
    return -float(unreadable or any(r.error is not None and r.error.kind in ILL_FORMED for r in turn.results))


PARTS: Mapping[str, Part] = {"state": state_part, "turn_state": turn_state_part, "format": format_part}


def metrics(row: Row, turns: Sequence[Turn]) -> dict[str, float]:
    """Return `em` (1 where the episode is over in the right state), `turns_reached` (a share) and `tool_calls`."""
    return {
        "em": state_part(row, turns),
        "turns_reached": count_right_states(row, turns) / len(row["turns"]),
        "tool_calls": float(sum(len(turn.calls) for turn in turns)),
    }


def state_key(row: Row, turns: Sequence[Turn]) -> str:
    """Return a key of row, request and state: equal states of a group have equal keys."""
    return f"{row['id']}|{count_user_turns(turns)}|{digest(row, turns, 'state')}"

"""What an episode earns, how it is measured and where it stands.

All of it follows from the row and the turns: each result brings digests of the state after it (see `tool`), the row has
those that the ground truth leads to (see `rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.rewards import Part, Turn
from agentr1_jax.text.tool_calls import ParseError

ILL_FORMED = ("unknown_tool", "bad_arguments")
"""Errors of calls that no state would have made right; that a file is not there is no matter of form."""


def user(row: Row, turns: Sequence[Turn]) -> str | None:
    """What the user says after these turns, the last of which has no call; None where the user has no more to say."""
    return None if is_over(row, turns) else row["turns"][user_turns(turns)]


def user_turns(turns: Sequence[Turn]) -> int:
    """How many turns of the user are done: each ends with a response without calls."""
    return sum(not turn.calls for turn in turns)


def is_over(row: Row, turns: Sequence[Turn]) -> bool:
    """Whether all turns of the user are done."""
    return user_turns(turns) >= len(row["turns"])


def digest(row: Row, turns: Sequence[Turn], what: str) -> str:
    """Digest `state` or `outcome` after these turns."""
    results = (result for turn in reversed(turns) for result in reversed(turn.results))
    return next((result.data[what] for result in results if what in result.data), row["start"][what])


def reached(row: Row, turns: Sequence[Turn]) -> int:
    """At the ends of how many of the user's turns the outcome was that of the ground truth."""
    ends = [at for at, turn in enumerate(turns, 1) if not turn.calls]
    return sum(digest(row, turns[:at], "outcome") == wanted for at, wanted in zip(ends, row["outcomes"], strict=False))


def state_part(row: Row, turns: Sequence[Turn]) -> float:
    """1 where the turn ends the episode and the outcome is that of the whole ground truth."""
    return float(is_over(row, turns) and digest(row, turns, "outcome") == row["outcomes"][-1])


def turn_state_part(row: Row, turns: Sequence[Turn]) -> float:
    """1 / (turns of the user) where the turn ends one of them with the outcome of the ground truth up to there."""
    return (reached(row, turns) - reached(row, turns[:-1])) / len(row["turns"])


def format_part(row: Row, turns: Sequence[Turn]) -> float:
    """−1 for a turn with a call that is unreadable, of an unknown function, or against its schema; else 0."""
    turn = turns[-1]
    unreadable = any(isinstance(call, ParseError) for call in turn.calls)
    return -float(unreadable or any(r.error is not None and r.error.kind in ILL_FORMED for r in turn.results))


PARTS: Mapping[str, Part] = {"state": state_part, "turn_state": turn_state_part, "format": format_part}


def metrics(row: Row, turns: Sequence[Turn]) -> dict[str, float]:
    """`em`, 1 where the episode is over and its outcome right; `turns_reached`, a share; `tool_calls`."""
    return {
        "em": state_part(row, turns),
        "turns_reached": reached(row, turns) / len(row["turns"]),
        "tool_calls": float(sum(len(turn.calls) for turn in turns)),
    }


def state_key(row: Row, turns: Sequence[Turn]) -> str:
    """Row, turn of the user and state: equal states of a group have equal keys."""
    return f"{row['id']}|{user_turns(turns)}|{digest(row, turns, 'state')}"

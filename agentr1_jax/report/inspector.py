"""The trajectory inspector: one self-contained HTML page that shows what was sampled, token by token."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from agentr1_jax import files
from agentr1_jax.report.page import write_page
from agentr1_jax.report.tables import flatten
from agentr1_jax.trajectory import POLICIES, Step, Trajectory
from agentr1_jax.trajectory_io import to_json

Decode = Callable[[Sequence[int]], str]


def plain(value: Any) -> Any:
    """Return any value as strict JSON: numpy as Python, non-finite floats as strings, anything else as its `str`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | Collection):
        return [plain(item) for item in value]
    return str(value)


def token_piece(decode: Decode, token: int) -> str:
    """Return what the id adds to a text that it does not begin.

    SentencePiece drops the space before the first word of a text, so the piece is read off the id's second occurrence.
    """
    once, twice = decode([token]), decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def _short(values: np.ndarray) -> list[float | str]:
    return [plain(float(f"{x:.3g}")) for x in np.asarray(values, np.float64)]


def _short_advantages(step: Step) -> Any:
    """Return None, one number where all tokens agree, or a list [R]."""
    short = None if step.advantages is None else _short(step.advantages)
    return short[0] if short and len(set(short)) == 1 else short


def _total_reward(trajectory: Trajectory) -> float | str | None:
    """Return the reward that counts; None where the outcome has none or a part of it is missing."""
    if POLICIES[trajectory.outcome].reward == "none":
        return None
    try:
        return plain(trajectory.total_reward)
    except ValueError:
        return None


def _step_data(step: Step, record: Mapping[str, Any], index: Callable[[int], int], text: Callable[[Any], int]) -> dict:
    """Return one step for the script; token ids and long texts are indices into the tables of pieces and texts."""
    prompt = record["prompt_ids"]
    facts: dict[str, Any] = {"raw_reward_parts": step.raw_reward_parts or None, "action_key": step.action_key}
    facts |= {"potential": step.potential, "next_potential": step.next_potential}
    facts |= {"trainable": None if step.trainable else False}
    return {
        "reuse": prompt["reuse"],
        "new": [index(i) for i in prompt["new"]],
        "response": [index(i) for i in record["response_ids"]],
        "logprobs": _short(step.logprobs),
        "reward": plain(step.reward),
        "parts": plain(step.reward_parts),
        "observation": text(step.observation),
        "calls": [{**plain(call), "result": text(call.get("result"))} for call in step.tool_calls],
        "advantages": _short_advantages(step),
        "state_key": plain(step.state_key),
        "rule": step.context_rule,
        "version": step.policy_version,
        "info": plain({**{name: value for name, value in facts.items() if value is not None}, **step.info}),
    }


def page_data(trajectories: Sequence[Trajectory], decode: Decode, template_ids: Collection[int] = ()) -> dict[str, Any]:
    """Return all that the page's script needs, as plain JSON; recurring pieces and long texts are stored once."""
    places: dict[int, int] = {}
    texts: dict[str, int] = {}

    def index(token: int) -> int:
        return places.setdefault(int(token), len(places))

    def text(value: Any) -> int:
        whole = "" if value is None else value if isinstance(value, str) else json.dumps(plain(value), indent=1)
        return texts.setdefault(whole, len(texts))

    shown = []
    for trajectory in trajectories:
        record = to_json(trajectory)
        policy = POLICIES[trajectory.outcome]
        phase = trajectory.uid.split("/", 1)[0]
        final = record["final_prompt_ids"]
        shown.append(
            {
                "uid": trajectory.uid,
                "phase": phase,
                "task": trajectory.task,
                "group": trajectory.group,
                "sample": trajectory.sample,
                "seed": trajectory.seed,
                "outcome": str(trajectory.outcome),
                "policy": {"reward": policy.reward, "bootstrap": policy.bootstrap, "training": policy.training},
                "trained": policy.training == "train" and not phase.startswith("eval"),
                "reward": _total_reward(trajectory),
                "metrics": plain(trajectory.metrics),
                "info": plain({**trajectory.row, **trajectory.info}),
                "steps": [
                    _step_data(step, stored, index, text)
                    for step, stored in zip(trajectory.steps, record["steps"], strict=True)
                ],
                "final": final and {"reuse": final["reuse"], "new": [index(i) for i in final["new"]]},
            }
        )
    added = {int(token) for token in template_ids}
    return {
        "ids": list(places),
        "pieces": [token_piece(decode, token) for token in places],
        "template": [place for token, place in places.items() if token in added],
        "texts": list(texts),
        "trajectories": shown,
    }


def script_json(value: Any) -> Markup:
    """Return JSON that is safe inside a `<script>` element: ASCII, without `<`, `>` and `&`."""
    return htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False)


@dataclasses.dataclass(frozen=True)
class PageHead:
    """What stands above the trajectories.

    Attributes:
      summary: numbers; nested names are dotted.
      table: rows of text, all with the same columns.
      curve_png, timeline_png: PNG files to inline.
      config: configuration of the run, shown folded.
    """

    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    table: Sequence[Mapping[str, str]] = ()
    curve_png: files.PathLike | None = None
    timeline_png: files.PathLike | None = None
    config: Mapping[str, Any] | None = None


def write_report(
    path: files.PathLike,
    trajectories: Sequence[Trajectory],
    *,
    decode: Decode,
    title: str,
    head: PageHead | None = None,
    template_ids: Collection[int] = (),
) -> None:
    """Write the inspector as one self-contained HTML file, which appears whole.

    Args:
      path: HTML file to write.
      trajectories: those to show, with the advantages that training assigned; the part of a uid before the first `/`
        is its phase. `row` may hold `question`, `answers` and `kind`. A few hundred make a page of a few megabytes.
      decode: token ids -> text; called with one or two ids at a time.
      title: heading of the page.
      template_ids: ids that only templates put into prompts (`tokenizer.added.values()`), for their colour.
    """
    head = head or PageHead()
    write_page(
        path,
        "inspector.html",
        title=title,
        numbers=flatten(head.summary),
        table=head.table,
        curve=head.curve_png,
        timeline=head.timeline_png,
        config=None if head.config is None else json.dumps(plain(head.config), indent=2, ensure_ascii=False),
        data=script_json(page_data(trajectories, decode, template_ids)),
    )

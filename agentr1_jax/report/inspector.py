"""The trajectory inspector: one self-contained HTML page that shows what was sampled, token by token.

Text of models, tools and data sets reaches the page in two ways only: escaped by `html.escape`, or as JSON in which
every `<`, `>` and `&` is written as `\\u003c` etc. and which the script turns into text nodes. A content security
policy admits no script but that one, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import numbers
import os
import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from agentr1_jax import files
from agentr1_jax.report.tables import flatten, format_value
from agentr1_jax.trajectory import POLICIES, Step, Trajectory, to_json

Decode = Callable[[Sequence[int]], str]
StepAdvantages = Sequence[np.ndarray | None]

TIMELINE_TEXT = (
    "One band for each slot of the engine during one rollout: what it was used for at each moment, and beneath it "
    "how many were decoding; a slot that waits is kept for a trajectory whose tool is at work, an idle one for nobody."
)


def plain(value: Any) -> Any:
    """Any value as strict JSON: numpy becomes Python, non-finite floats become strings, anything else its `str`."""
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
    """What the id adds to a text that it does not begin.

    SentencePiece drops the space before the first word of a text, so the piece is read off the id's second occurrence.
    """
    once, twice = decode([token]), decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def _short(values: np.ndarray) -> list[float | str]:
    return [plain(float(f"{x:.3g}")) for x in np.asarray(values, np.float64)]


def _advantages(trajectory: Trajectory, advantages: StepAdvantages | None) -> list[Any]:
    """Per step None, one number where all tokens agree, or a list [R]. Raises ValueError where shapes disagree."""
    if advantages is None:
        return [None] * len(trajectory.steps)
    if len(advantages) != len(trajectory.steps):
        raise ValueError(
            f"advantages of {trajectory.uid} are for {len(advantages)} steps; it has {len(trajectory.steps)} steps"
        )
    out: list[Any] = []
    for t, (step, values) in enumerate(zip(trajectory.steps, advantages, strict=True)):
        if values is not None and np.shape(values) != step.response_ids.shape:
            raise ValueError(
                f"advantages of {trajectory.uid}, step {t} have shape {np.shape(values)}; "
                f"its response has shape {step.response_ids.shape}"
            )
        short = None if values is None else _short(values)
        out.append(short[0] if short and len(set(short)) == 1 else short)
    return out


def _total_reward(trajectory: Trajectory) -> float | str | None:
    """The reward that counts; None where there is none to speak of or where a part of it is missing."""
    if POLICIES[trajectory.outcome].reward == "none":
        return None
    try:
        return plain(trajectory.total_reward)
    except ValueError:
        return None


def _step_data(step: Step, record: Mapping[str, Any], index: Callable[[int], int], text: Callable[[Any], int]) -> dict:
    """One step for the script: ids as places in the piece table, long texts as places in the text table."""
    calls = [{**plain(call), "result": text(call.get("result"))} for call in step.tool_calls]
    prompt = record["prompt_ids"]
    return {
        "reuse": prompt["reuse"],
        "new": [index(i) for i in prompt["new"]],
        "response": [index(i) for i in record["response_ids"]],
        "logprobs": _short(step.logprobs),
        "reward": plain(step.reward),
        "parts": plain(step.reward_parts),
        "observation": text(step.observation),
        "calls": calls,
        "state_key": plain(step.state_key),
        "rule": step.context_rule,
        "version": step.policy_version,
        "info": plain(step.info),
    }


def page_data(
    trajectories: Sequence[Trajectory],
    decode: Decode,
    advantages: Mapping[str, StepAdvantages | None] | None = None,
    template_ids: Collection[int] = (),
) -> dict[str, Any]:
    """Everything that the page's script needs, as plain JSON; a piece or a long text that recurs is stored once."""
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
        of_steps = _advantages(trajectory, (advantages or {}).get(trajectory.uid))
        steps = [_step_data(s, r, index, text) for s, r in zip(trajectory.steps, record["steps"], strict=True)]
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
                "info": plain(trajectory.info),
                "steps": [{**s, "advantages": a} for s, a in zip(steps, of_steps, strict=True)],
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


def script_json(value: Any) -> str:
    """JSON that is safe inside a `<script>` element: ASCII, without `<`, `>` and `&`."""
    encoded = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _numbers(summary: Mapping[str, Any]) -> str:
    """Name and value pairs; a long name may break after `_` and `.`."""
    names = {name: re.sub(r"(?<=[_.])", "<wbr>", html.escape(name)) for name in flatten(summary)}
    pairs = "\n".join(
        f"<div><dt>{names[name]}</dt><dd>{html.escape(format_value(value))}</dd></div>"
        for name, value in flatten(summary).items()
    )
    return f'<dl class="numbers">\n{pairs}\n</dl>' if names else ""


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of text under the names of the first row's columns."""
    if not rows:
        return ""

    def line(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "\n".join(line("td", row.values()) for row in rows)
    return f"<table class='figures'>\n<thead>{line('th', rows[0])}</thead>\n<tbody>{body}</tbody>\n</table>"


def _picture(png: str | os.PathLike[str], kind: str, alt: str) -> str:
    encoded = base64.b64encode(files.read_bytes(png)).decode()
    return f'<img class="{kind}" alt="{alt}" src="data:image/png;base64,{encoded}">'


def _timeline(png: str | os.PathLike[str] | None) -> str:
    if png is None:
        return ""
    picture = _picture(png, "timeline", "timeline of decode slots")
    return f"<section class='slots'><h2>Decode slots over time</h2>\n<p>{TIMELINE_TEXT}</p>\n{picture}</section>"


def _config(config: Mapping[str, Any] | None) -> str:
    if config is None:
        return ""
    text = html.escape(json.dumps(plain(config), indent=2, ensure_ascii=False))
    return f"<details class='config'><summary>Configuration</summary><pre>{text}</pre></details>"


def write_report(
    path: str | os.PathLike[str],
    trajectories: Sequence[Trajectory],
    *,
    decode: Decode,
    title: str,
    summary: Mapping[str, Any] | None = None,
    table: Sequence[Mapping[str, str]] = (),
    curve_png: str | os.PathLike[str] | None = None,
    timeline_png: str | os.PathLike[str] | None = None,
    advantages: Mapping[str, StepAdvantages | None] | None = None,
    config: Mapping[str, Any] | None = None,
    template_ids: Collection[int] = (),
) -> None:
    """Writes the inspector as one self-contained HTML file, which appears whole.

    Args:
      path: where the page goes.
      trajectories: what it shows; the part of a uid before the first `/` is its phase. `info` may hold `question`,
        `answers` and `kind`. A few hundred trajectories make a page of a few megabytes.
      decode: ids to text; called with one or two ids at a time.
      title: heading of the page.
      summary: numbers for the top of the page; nested names are dotted.
      table: rows of text for the top of the page, all with the same columns.
      curve_png, timeline_png: pictures to inline.
      advantages: uid -> per step float [R] or None; a uid that is absent is shown without.
      config: the run's configuration, shown folded.
      template_ids: ids that only templates put into prompts (`tokenizer.added.values()`), for their colour.

    Raises:
      ValueError: advantages do not fit their trajectory's steps.
    """
    parts = resources.files("agentr1_jax.report")
    css, js, page = (parts.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js", "page.html"))
    digest = base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()
    text = string.Template(page).substitute(
        script_hash=f"sha256-{digest}",
        title=html.escape(title),
        css=css,
        js=js,
        numbers=_numbers(summary or {}),
        table=_table(table),
        curve="" if curve_png is None else _picture(curve_png, "curve", "learning curve"),
        timeline=_timeline(timeline_png),
        config=_config(config),
        data=script_json(page_data(trajectories, decode, advantages, template_ids)),
    )
    with files.published(path, errors="replace", newline="\n") as out:
        out.write(text)

"""The trajectory inspector: one self-contained HTML page that shows what was sampled, token by token."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from agentr1_jax import files
from agentr1_jax.report.facts import Decode, Facts, plain, trajectory_facts
from agentr1_jax.report.page import write_page
from agentr1_jax.report.tables import flatten
from agentr1_jax.trajectory import POLICIES, Step, Trajectory, common_prefix


def token_piece(decode: Decode, token: int) -> str:
    """Return what the id adds to a text that it does not begin.

    SentencePiece drops the space before the first word of a text, so the piece is read off the id's second occurrence.
    """
    once, twice = decode([token]), decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once


def short_numbers(values: np.ndarray | None) -> Any:
    """Return numbers with three digits: None for None, one number where all agree, else a list; see `plain`."""
    if values is None:
        return None
    x = np.asarray(values, np.float64)
    usable = np.isfinite(x) & (x != 0)
    size = 10.0 ** (2 - np.floor(np.log10(np.abs(np.where(usable, x, 1)))))
    rounded = np.where(usable, np.round(x * size) / size, x)
    if len(rounded) and (rounded == rounded[0]).all():
        return plain(float(rounded[0]))
    return rounded.tolist() if np.isfinite(rounded).all() else plain(rounded)


class PageTokens:
    """Token ids that a page shows, numbered in the order of their appearance, so that each piece is stored once."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def index(self, ids: np.ndarray) -> list[int]:
        """Return the places of ids."""
        places = self._places
        return [places.setdefault(token, len(places)) for token in ids.tolist()]

    def tables(self, decode: Decode, template_ids: Collection[int]) -> dict[str, Any]:
        """Return ids and pieces by place, and the places of ids of templates."""
        added = {int(token) for token in template_ids}
        return {
            "ids": list(self._places),
            "pieces": [token_piece(decode, token) for token in self._places],
            "template": [place for token, place in self._places.items() if token in added],
        }


def trajectory_data(trajectory: Trajectory, tokens: PageTokens) -> dict[str, Any]:
    """Return tokens, texts and accounts of one trajectory as plain JSON.

    Token ids are places in the page's tables. A prompt is what it reuses of the previous prompt + response, and what is
    new. Long texts are places in `texts`.
    """
    texts: dict[str, int] = {}
    previous = np.zeros(0, np.int32)

    def text(value: Any) -> int:
        whole = "" if value is None else value if isinstance(value, str) else json.dumps(plain(value), indent=1)
        return texts.setdefault(whole, len(texts))

    def prompt(ids: np.ndarray) -> dict[str, Any]:
        reuse = common_prefix(ids, previous)
        return {"reuse": reuse, "new": tokens.index(ids[reuse:])}

    steps = []
    for step in trajectory.steps:
        steps.append(
            prompt(step.prompt_ids)
            | {"response": tokens.index(step.response_ids)}
            | _step_data(step)
            | _texts(step, text)
        )
        previous = np.concatenate([step.prompt_ids, step.response_ids])
    policy = POLICIES[trajectory.outcome]
    return {
        "seed": trajectory.seed,
        "policy": {"reward": policy.reward, "bootstrap": policy.bootstrap, "training": policy.training},
        "info": plain({**trajectory.row, **trajectory.info}),
        "steps": steps,
        "final": None if trajectory.final_prompt_ids is None else prompt(trajectory.final_prompt_ids),
        "final_value": plain(trajectory.final_value),
        "texts": list(texts),
    }


def _step_data(step: Step) -> dict[str, Any]:
    facts: dict[str, Any] = {"raw_reward_parts": step.raw_reward_parts or None, "action_key": step.action_key}
    facts |= {"potential": step.potential, "next_potential": step.next_potential}
    facts |= {"trainable": None if step.trainable else False}
    return {
        "logprobs": short_numbers(step.logprobs),
        "parts": plain(step.reward_parts),
        "advantages": short_numbers(step.advantages),
        "values": short_numbers(step.values),
        "targets": short_numbers(step.value_targets),
        "shaped": plain(step.shaped_reward),
        "account": [
            {"name": name, **plain(term._asdict()), "total": plain(term.total)} for name, term in step.account.items()
        ],
        "state_key": plain(step.state_key),
        "rule": step.context_rule,
        "version": max(step.tokens_by_version()),
        "info": plain({**{name: value for name, value in facts.items() if value is not None}, **step.info}),
    }


def _texts(step: Step, text: Callable[[Any], int]) -> dict[str, Any]:
    return {
        "observation": text(step.observation),
        "calls": [{**plain(call), "result": text(call.get("result"))} for call in step.tool_calls],
    }


def compress(data: Mapping[str, Any]) -> str:
    """Return JSON as base64 of gzip, which the page's script reads when its trajectory is chosen."""
    raw = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()


def script_json(value: Any) -> Markup:
    """Return JSON that is safe inside a `<script>` element: ASCII, without `<`, `>` and `&`."""
    return htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False)


@dataclasses.dataclass(frozen=True)
class PageHead:
    """What stands around the trajectories.

    Attributes:
      summary: numbers; nested names are dotted.
      table: rows of text, all with the same columns.
      notes: returns sentences on what is shown and what could not be read; called after all trajectories.
      curve_png, timeline_png: PNG files to inline.
      config: configuration of the run, shown folded.
    """

    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    table: Sequence[Mapping[str, str]] = ()
    notes: Callable[[], Sequence[str]] = list
    curve_png: files.PathLike | None = None
    timeline_png: files.PathLike | None = None
    config: Mapping[str, Any] | None = None


def write_report(
    path: files.PathLike,
    trajectories: Iterable[Trajectory],
    *,
    decode: Decode,
    title: str,
    head: PageHead | None = None,
    template_ids: Collection[int] = (),
    is_shown: Callable[[str], bool] = lambda uid: True,
) -> None:
    """Write the inspector as one self-contained HTML file, which appears whole.

    The page holds each trajectory compressed by itself, and the browser unpacks the one that is looked at. Here, too,
    one trajectory is in memory at a time.

    Args:
      path: HTML file to write.
      trajectories: those to show, with the advantages that training assigned; the part of a uid before the first `/`
        is its phase. `row` may hold `question`, `answers` and `kind`. 8,000 tokens take some 40 kB of the page.
      decode: token ids -> text; called with one or two ids, or those of a response, at a time.
      title: heading of the page.
      head: what stands around the trajectories.
      template_ids: ids that only templates put into prompts (`tokenizer.added.values()`), for their colour.
      is_shown: False for the uid of a trajectory of which the page holds only what its group's table says.
    """
    head, tokens, listed = head or PageHead(), PageTokens(), list[Facts]()

    def blobs() -> Iterator[str]:
        count = 0
        for trajectory in trajectories:
            shown = is_shown(trajectory.uid)
            listed.append(trajectory_facts(trajectory, decode) | {"blob": count if shown else None})
            if shown:
                count += 1
                yield compress(trajectory_data(trajectory, tokens))

    def data() -> Markup:
        first = {facts["group"]: place for place, facts in reversed(list(enumerate(listed)))}
        in_order = sorted(listed, key=lambda facts: (first[facts["group"]], facts["sample"]))
        tables = tokens.tables(decode, template_ids)
        return script_json({**tables, "notes": list(head.notes()), "trajectories": in_order})

    write_page(
        path,
        "inspector.html",
        title=title,
        numbers=flatten(head.summary),
        table=head.table,
        curve=head.curve_png,
        timeline=head.timeline_png,
        config=None if head.config is None else json.dumps(plain(head.config), indent=2, ensure_ascii=False),
        blobs=blobs(),
        data=data,
    )

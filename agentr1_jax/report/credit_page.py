"""The comparison of credit schemes as one self-contained HTML page, without any script.

Text of models, tools and data sets reaches the page escaped by `html.escape` and in no other way; the content security
policy admits inlined pictures and styles alone.
"""

from __future__ import annotations

import base64
import html
import math
import os
import string
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from agentr1_jax import files
from agentr1_jax.report.tables import format_value

BAR_ENDS = 3.0
TERMS: Mapping[str, str] = {
    "mean, std": "of the advantage over steps; a step's advantage is the mean over its tokens",
    "zero": "share of the steps whose advantage is exactly 0: they teach nothing",
    "gradient": "norm of the gradient of Σ w·A·log π over the batch",
    "snr": (
        "signal to noise of that gradient: its length, less what noise alone would make of it, over the standard "
        "deviation under resampled groups; 0 where the gradient is not longer than noise. It is an estimate from one "
        "batch: small differences mean nothing"
    ),
    "direction": "mean cosine between the gradient of a resampled batch and that of the whole batch",
    "batch effect": (
        "standard deviation of a step's advantage when the other groups of its batch are drawn anew, over the root "
        "mean square of all advantages; 0 for schemes that look at one group only"
    ),
}


class ShownStep(NamedTuple):
    """One step of the page.

    Attributes:
      title: which step it is.
      uid: of its trajectory.
      facts: short texts about it.
      question: what the trajectory was asked.
      prompt, response, observation: texts.
      advantages: per scheme (advantage, scaled advantage).
    """

    title: str
    uid: str
    facts: Sequence[str]
    question: str
    prompt: str
    response: str
    observation: str
    advantages: Mapping[str, tuple[float, float]]


def write_page(
    path: str | os.PathLike[str],
    *,
    title: str,
    facts: Mapping[str, Any],
    notes: Sequence[str],
    schemes: Sequence[Mapping[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, str | os.PathLike[str]],
    steps: Sequence[ShownStep],
    own: str | None = None,
) -> None:
    """Writes the page, renamed into place.

    Args:
      path: where it goes.
      title: heading.
      facts: numbers for the top.
      notes: what the reader must know, such as schemes left out.
      schemes: one row a scheme; the first column is its name.
      pairs: one row for every two schemes; the first two columns are names.
      pictures: PNG files `heatmaps`, `noise` and `strips`.
      steps: those on which schemes disagree, in order.
      own: the scheme of the run, marked in the table.
    """
    parts = resources.files("agentr1_jax.report")
    css, page = (parts.joinpath(f"credit_page.{kind}").read_text("utf-8") for kind in ("css", "html"))
    text = string.Template(page).substitute(
        title=html.escape(title),
        css=css,
        facts="\n".join(f"<div><dt>{_text(name)}</dt><dd>{_text(x)}</dd></div>" for name, x in facts.items()),
        notes=f"<ul class='notes'>{''.join(f'<li>{_text(x)}</li>' for x in notes)}</ul>" if notes else "",
        schemes=_table(schemes, names=1, own=own),
        terms="\n".join(f"<dt>{_text(name)}</dt><dd>{_text(x)}</dd>" for name, x in TERMS.items()),
        pairs=_table(pairs, names=2),
        steps="\n".join(_step(number + 1, step) for number, step in enumerate(steps)),
        **{name: _picture(png, name) for name, png in pictures.items()},
    )
    with files.published(path, errors="replace", newline="\n") as out:
        out.write(text)


def _picture(png: str | os.PathLike[str], alt: str) -> str:
    encoded = base64.b64encode(files.read_bytes(png)).decode()
    return f'<div class="wide"><img alt="{html.escape(alt)}" src="data:image/png;base64,{encoded}"></div>'


def _text(value: Any) -> str:
    missing = isinstance(value, float) and math.isnan(value)
    return html.escape("–" if value is None or missing else format_value(value))


def _table(rows: Sequence[Mapping[str, Any]], *, names: int, own: str | None = None) -> str:
    """An HTML table whose first columns are names."""
    if not rows:
        return ""
    columns = list(rows[0])
    kinds = {name: ' class="name"' if i < names else "" for i, name in enumerate(columns)}
    head = "".join(f"<th{kinds[name]}>{_text(name)}</th>" for name in columns)
    body = []
    for row in rows:
        mark = " class='own' title='the scheme of the run'" if row[columns[0]] == own else ""
        body.append(f"<tr{mark}>{''.join(f'<td{kinds[n]}>{_text(row[n])}</td>' for n in columns)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(body)}\n</tbody></table>"


def _step(number: int, step: ShownStep) -> str:
    chips = "".join(f"<span class='chip'>{_text(fact)}</span>" for fact in step.facts)
    parts = (("prompt, its end", step.prompt), ("response", step.response), ("observation", step.observation))
    texts = "".join(
        f"<h3>{name}</h3><pre class='{name.split(',')[0]}'>{html.escape(text)}</pre>" for name, text in parts if text
    )
    bars = "".join(_bar(scheme, *x) for scheme, x in step.advantages.items())
    return (
        f"<article class='step'><div class='head'><b>{number}. {_text(step.title)}</b>{chips}"
        f"<code>{html.escape(step.uid)}</code></div>\n<p class='question'>{html.escape(step.question)}</p>\n"
        f"<div class='sides'><div>{texts}</div>\n<div class='bars'>{bars}</div></div></article>"
    )


def _bar(scheme: str, advantage: float, scaled: float) -> str:
    width = 50 * min(abs(scaled), BAR_ENDS) / BAR_ENDS
    side = f"left:{50 - width * (scaled < 0):.1f}%;width:{width:.1f}%"
    fill = f"<i class='{'down' if scaled < 0 else 'up'}' style='{side}'></i>" if width else ""
    name, number = html.escape(scheme), f"{advantage:+.3f}" if advantage else "0"
    return f"<code title='{name}'>{name}</code><span class='track'>{fill}</span><output>{number}</output>"

"""Results of an evaluation: figures as JSON and Markdown, scores, and a page of some trajectories."""

from __future__ import annotations

import collections
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax

from agentr1_jax import __version__, files, report
from agentr1_jax.report.evaluation import markdown, quality_rows
from agentr1_jax.report.figures import figures, score, write_scores
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.trajectory import Trajectory
from experiments.evaluation.chunks import Chunk, chunks_of, read_chunks, write_json
from experiments.evaluation.modes import MODES

SHOWN_OF_EACH = 4
"""Trajectories of each mode and verdict (right, wrong, failed) on the page."""


def write(out: str, tokenizer: Tokenizer, config: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Write evaluation.json, evaluation.md, report.html and scores.jsonl.gz from the trajectories in the folder.

    Args:
      out: the folder.
      tokenizer: of the policy.
      config: config of the evaluation as plain JSON.
      record: the request, as `chunks.claim` returned it: earlier modes and splits are among the results too.

    Returns:
      content of evaluation.json.

    Raises:
      UserError: a file of trajectories is damaged.
    """
    chunks, unfinished = complete(out, record)
    scores, shown, verdicts = [], list[Trajectory](), collections.Counter[Any]()
    for trajectory in read_chunks(chunks):
        scores.append(score(trajectory))
        verdict = (scores[-1].mode, scores[-1].metrics.get("em") == 1.0, bool(scores[-1].metrics))
        verdicts[verdict] += 1
        if verdicts[verdict] <= SHOWN_OF_EACH:
            shown.append(trajectory)
    evaluation = {
        "request": dict(record),
        "unfinished": unfinished,
        "versions": versions(),
        **figures(scores, samples=record["samples"]),
        "config": dict(config),
    }
    write_scores(os.path.join(out, "scores.jsonl.gz"), scores)
    write_json(os.path.join(out, "evaluation.json"), evaluation)
    with files.atomic_write(os.path.join(out, "evaluation.md")) as page:
        page.write(markdown(evaluation))
    report.write_report(
        os.path.join(out, "report.html"),
        shown,
        decode=tokenizer.decode,
        title=out,
        head=report.PageHead(table=quality_rows(evaluation), config=evaluation["config"]),
        template_ids=tokenizer.added.values(),
    )
    return evaluation


def complete(out: str, record: Mapping[str, Any]) -> tuple[list[Chunk], list[dict[str, Any]]]:
    """Return the chunks of all complete modes and splits, and the others as `{mode, split, answered, questions}`.

    A mode that was asked on some splits only is among the unfinished on the others.
    """
    chunks: list[Chunk] = []
    unfinished = []
    for mode in (mode for mode in MODES if mode in record["policies"]):
        for split, count in record["splits"].items():
            of_split = chunks_of(out, mode, {split: count}, record["chunk"])
            answered = sum(len(chunk.rows) for chunk in of_split if chunk.is_complete)
            if answered == count:
                chunks += of_split
            else:
                unfinished.append({"mode": mode, "split": split, "answered": answered, "questions": count})
    return chunks, unfinished


def versions() -> dict[str, str]:
    """Return the versions of libraries and devices that made the figures."""
    libraries = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    device = jax.devices()[0]
    return {
        "agentr1_jax": __version__,
        **libraries,
        "python": platform.python_version(),
        "devices": f"{jax.device_count()} {device.device_kind} ({device.platform})",
    }

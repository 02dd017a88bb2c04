"""Join evaluations into one table: a row for each algorithm, a table for each data set, and the gain over one of them.

    python -m experiments.evaluation.table [--base=NAME] [--out=TABLE.md] [NAME=]OUT[:MODE] ...

    python -m experiments.evaluation.table --base="warm start" --out=docs/table.md \\
        "Naive RAG=runs/ws/evaluation:rag" "warm start=runs/ws/evaluation" "GRPO=runs/grpo/evaluation"

OUT is the folder of an evaluation. A row is a mode of it, `agent` unless another is named; an OUT without a name and a
mode gives a row for each of its modes. Several folders of one NAME are seeds of the same algorithm: intervals are then
taken over seeds and questions. The gain over --base is paired by question (and seed), on the questions that both have.
With --out the table is written there, and its figures as JSON beside it.
"""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.report.evaluation import interval
from agentr1_jax.report.figures import Score, question_values, read_scores
from agentr1_jax.report.statistics import paired_difference, two_stage_interval
from agentr1_jax.report.tables import markdown_table
from agentr1_jax.runtime import config as configs
from experiments.evaluation.chunks import write_json
from experiments.evaluation.modes import MODES

BASE = flags.DEFINE_string("base", "", "name of the row that the others are compared with")
OUT = flags.DEFINE_string("out", "", "Markdown file to write; the figures go beside it as JSON")

METRICS = {"recall": "gold recall", "em": "EM", "f1": "F1"}
PATHS = ("tokenizer.", "policy.", "task.data_dir")
"""Keys of a config that say where things lie and whose policy it is, not how it was asked."""


def main(argv: Sequence[str]) -> None:
    """Read, join, show."""
    rows, folders = read_rows(argv[1:])
    if BASE.value and BASE.value not in rows:
        raise UserError(f"--base={BASE.value}: no such row; rows are {', '.join(rows)}")
    records = join(rows, BASE.value)
    text = markdown(records, BASE.value, remarks(folders))
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
    if OUT.value:
        with files.atomic_write(OUT.value) as out:
            out.write(text)
        write_json(f"{os.path.splitext(OUT.value)[0]}.json", records)


def read_rows(arguments: Sequence[str]) -> tuple[dict[str, list[list[Score]]], list[str]]:
    """Read the rows `[NAME=]FOLDER[:MODE]`, each as the scores of its seeds; also return the folders.

    Raises:
      UserError: a folder without an evaluation, or without that mode.
    """
    rows: dict[str, list[list[Score]]] = collections.defaultdict(list)
    folders = []
    for argument in arguments:
        match = re.fullmatch(rf"(?:([^=]*)=)?(.*?)(?::({'|'.join(MODES)}))?", argument)
        assert match
        name, folder, mode = (part or "" for part in match.groups())
        scores = read_scores(folder)
        have = [m for m in MODES if any(score.mode == m for score in scores)]
        for wanted in have if not name and not mode else [mode or "agent"]:
            if wanted not in have:
                raise UserError(f"{folder}: has no mode {wanted!r}; it has {', '.join(have)}")
            label = name or f"{files.path(folder)} {wanted}"
            rows[label].append([score for score in scores if score.mode == wanted])
        folders.append(folder)
    return dict(rows), folders


def join(rows: Mapping[str, Sequence[Sequence[Score]]], base: str = "") -> list[dict[str, Any]]:
    """Return a record for each row, split and data set.

    Args:
      rows: name -> scores of each seed.
      base: name of the row that others are compared with; "" for none.

    Returns:
      `name, split, dataset, seeds`, `figures` and `gains`, both metric -> `{mean, low, high, n}`, n questions.

    Raises:
      UserError: base and another row have several seeds each, but not equally many.
    """
    places = sorted({(score.split, score.dataset) for seeds in rows.values() for seed in seeds for score in seed})
    records = []
    for split, dataset in places:
        values = {
            name: [question_values([s for s in seed if (s.split, s.dataset) == (split, dataset)]) for seed in seeds]
            for name, seeds in rows.items()
        }
        for name, seeds in values.items():
            others = values[base] * len(seeds) if base and len(values[base]) == 1 else values.get(base, [])
            if base and len(others) != len(seeds) and name != base:
                raise UserError(f"{name} has {len(seeds)} seeds and {base} {len(others)}; they do not pair up")
            figures, gains = {}, {}
            for metric in METRICS:
                own = common(seeds, metric)
                if own[0].size:
                    figures[metric] = two_stage_interval(own, same_questions=True)._asdict() | {"n": len(own[0])}
                both = common([*seeds, *others], metric)
                if base and name != base and both[0].size:
                    found = paired_difference(both[: len(seeds)], both[len(seeds) :], same_questions=True)
                    gains[metric] = found._asdict() | {"n": len(both[0])}
            if figures:
                record = {"name": name, "split": split, "dataset": dataset, "seeds": len(seeds)}
                records.append({**record, "figures": figures, "gains": gains})
    return records


def common(seeds: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> list[np.ndarray]:
    """Return for each of the seeds a metric of the questions for which all have it, in one order; [questions]."""
    shared = [q for q in seeds[0] if all(metric in seed.get(q, {}) for seed in seeds)]
    return [np.array([seed[q][metric] for q in shared], np.float64) for seed in seeds]


def remarks(folders: Sequence[str]) -> list[str]:
    """Return in what else than their policies the evaluations differ.

    Raises:
      UserError: they were sampled in different ways.
    """
    requests = [json.loads(files.read_bytes(os.path.join(folder, "request.json"))) for folder in folders]
    for key in ("samples", "temperature"):
        found = {request[key] for request in requests}
        if len(found) > 1:
            raise UserError(f"the evaluations have {key} {', '.join(map(str, sorted(found)))}; a table needs one")
    flat = [dict(configs.flatten(request["config"])) for request in requests]
    keys = sorted({key for each in flat for key in each if not key.startswith(PATHS)})
    different = [key for key in keys if len({json.dumps(each.get(key)) for each in flat}) > 1]
    return [f"**The evaluations differ in {', '.join(different)}.**"] if different else []


def markdown(records: Sequence[Mapping[str, Any]], base: str = "", notes: Sequence[str] = ()) -> str:
    """Return a table of means over all data sets, then one with intervals for each."""
    overview: dict[str, dict[str, Any]] = {}
    tables: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        place, figures = f"{record['dataset']} {record['split']}", record["figures"]
        means = {f"{place} {METRICS[metric]}": figure["mean"] for metric, figure in figures.items()}
        overview.setdefault(record["name"], {"": record["name"]}).update(means)
        row = {"": record["name"], "seeds": record["seeds"], "questions": figures["em"]["n"]}
        row |= {label: interval(figures.get(metric)) for metric, label in METRICS.items()}
        if base:
            gains = record["gains"]
            row |= {f"gain in {label}": interval(gains.get(metric), signed=True) for metric, label in METRICS.items()}
        tables.setdefault(f"{record['dataset']}, {record['split']}", []).append(row)
    parts = [markdown_table(list(overview.values()))]
    for title, rows in tables.items():
        parts += [f"### {title}\n", markdown_table(rows)]
    gains_over = f"; gains over {base} are paired by question, on the questions that both have" if base else ""
    parts.append(f"Means over questions with 95 % bootstrap intervals{gains_over}.\n")
    return "\n".join([*parts, *(f"{note}\n" for note in notes)])


if __name__ == "__main__":
    configs.run_main(main, arguments=("[NAME=]OUT[:MODE]", "[...]"))

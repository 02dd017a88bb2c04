"""Evaluations joined: for each row, split and data set the figures, and the gain over one of the rows."""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.report.evaluation import interval
from agentr1_jax.report.figures import question_values
from agentr1_jax.report.scores import Score, read_scores
from agentr1_jax.report.statistics import Interval, paired_difference, two_stage_interval
from agentr1_jax.report.tables import markdown_table
from agentr1_jax.runtime import config as configs
from experiments.evaluation.chunks import write_json
from experiments.evaluation.modes import MODES

METRICS = {"recall": "gold recall", "em": "EM", "f1": "F1"}
PATHS = ("tokenizer.", "policy.", "task.data_dir")
"""Keys of a config that say where things lie and whose policy it is, not how it was asked."""

Place = tuple[str, str]
"""Split and data set."""


def read_rows(arguments: Sequence[str]) -> tuple[dict[str, list[list[Score]]], list[str]]:
    """The rows that the arguments name, as the scores of each seed, and the folders they were read from.

    Raises:
      UserError: a folder without an evaluation, or without that mode.
    """
    rows: dict[str, list[list[Score]]] = collections.defaultdict(list)
    folders = []
    for argument in arguments:
        name, folder, mode = parse(argument)
        scores = read_scores(folder)
        have = [m for m in MODES if any(score.mode == m for score in scores)]
        for wanted in have if not name and not mode else [mode or "agent"]:
            if wanted not in have:
                raise UserError(f"{folder}: has no mode {wanted!r}; it has {', '.join(have)}")
            label = name or f"{files.path(folder)} {wanted}"
            rows[label].append([score for score in scores if score.mode == wanted])
        folders.append(folder)
    return dict(rows), folders


def parse(argument: str) -> tuple[str, str, str]:
    """`[NAME=]FOLDER[:MODE]` in three parts, "" for what is left out; the first `=` ends a name."""
    name, equals, rest = argument.partition("=")
    if not equals:
        name, rest = "", argument
    match = re.fullmatch(rf"(.*):({'|'.join(MODES)})", rest)
    return (name, match[1], match[2]) if match else (name, rest, "")


def join(rows: Mapping[str, Sequence[Sequence[Score]]], base: str = "") -> list[dict[str, Any]]:
    """A record for each row, split and data set.

    Args:
      rows: name -> scores of each seed.
      base: name of the row that others are compared with; "" for none.

    Returns:
      `name, split, dataset, seeds`, `figures` and `gains`, both metric -> `{mean, low, high, n}`, n questions.

    Raises:
      UserError: base and another row have several seeds each, but not equally many.
    """
    values = {name: [values_of(scores) for scores in seeds] for name, seeds in rows.items()}
    places = dict.fromkeys(place for seeds in values.values() for seed in seeds for place in sorted(seed))
    records = []
    for place in places:
        for name, seeds in values.items():
            figures, gains = {}, {}
            for metric in METRICS:
                own = common([seed.get(place, {}) for seed in seeds], metric)
                if own[0].size:
                    figures[metric] = _record(two_stage_interval(own, same_questions=True), len(own[0]))
                if base and name != base:
                    others = values[base] * len(seeds) if len(values[base]) == 1 else values[base]
                    if len(others) != len(seeds):
                        raise UserError(f"{name} has {len(seeds)} seeds and {base} {len(others)}; they do not pair up")
                    both = common([seed.get(place, {}) for seed in (*seeds, *others)], metric)
                    if both[0].size:
                        ours, theirs = both[: len(seeds)], both[len(seeds) :]
                        found = paired_difference(ours, theirs, same_questions=True)
                        gains[metric] = _record(found, len(both[0]))
            if figures:
                split, dataset = place
                record = {"name": name, "split": split, "dataset": dataset, "seeds": len(seeds)}
                records.append({**record, "figures": figures, "gains": gains})
    return records


def values_of(scores: Sequence[Score]) -> dict[Place, dict[str, dict[str, float]]]:
    """Split and data set -> question -> metric -> value."""
    parts: dict[Place, list[Score]] = collections.defaultdict(list)
    for score in scores:
        parts[score.split, score.dataset].append(score)
    return {place: question_values(members) for place, members in parts.items()}


def common(seeds: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> list[np.ndarray]:
    """For each of the seeds a metric of the questions for which all have it, in one order; float64 [questions]."""
    shared = [q for q in seeds[0] if all(metric in seed.get(q, {}) for seed in seeds)]
    return [np.array([seed[q][metric] for q in shared], np.float64) for seed in seeds]


def _record(found: Interval, questions: int) -> dict[str, float]:
    return {**found._asdict(), "n": questions}


def remarks(folders: Sequence[str]) -> list[str]:
    """In what else than their policies the evaluations differ.

    Raises:
      UserError: they were sampled in different ways.
    """
    requests = []
    for folder in dict.fromkeys(folders):
        requests.append(json.loads(files.read_bytes(os.path.join(folder, "request.json"))))
    for key in ("samples", "temperature"):
        found = {request[key] for request in requests}
        if len(found) > 1:
            raise UserError(f"the evaluations have {key} {', '.join(map(str, sorted(found)))}; a table needs one")
    flat = [dict(configs.flatten(request["config"])) for request in requests]
    keys = sorted({key for each in flat for key in each if not key.startswith(PATHS)})
    different = [key for key in keys if len({json.dumps(each.get(key)) for each in flat}) > 1]
    return [f"**The evaluations differ in {', '.join(different)}.**"] if different else []


def markdown(records: Sequence[Mapping[str, Any]], base: str = "", notes: Sequence[str] = ()) -> str:
    """A table of means over all data sets, then one with intervals for each."""
    places = list(dict.fromkeys((record["split"], record["dataset"]) for record in records))
    overview: dict[str, dict[str, Any]] = {}
    for record in records:
        row = overview.setdefault(record["name"], {"": record["name"]})
        for metric, label in METRICS.items():
            if metric in record["figures"]:
                row[f"{record['dataset']} {record['split']} {label}"] = record["figures"][metric]["mean"]
    parts = [markdown_table(list(overview.values()))]
    for split, dataset in places:
        rows = []
        for record in records:
            if (record["split"], record["dataset"]) == (split, dataset):
                row = {"": record["name"], "seeds": record["seeds"], "questions": record["figures"]["em"]["n"]}
                row |= {label: interval(record["figures"].get(metric)) for metric, label in METRICS.items()}
                if base:
                    row |= {
                        f"gain in {label}": interval(record["gains"].get(metric), signed=True)
                        for metric, label in METRICS.items()
                    }
                rows.append(row)
        parts += [f"### {dataset}, {split}\n", markdown_table(rows)]
    intervals = "Means over questions with 95 % bootstrap intervals"
    gains = f"; gains over {base} are paired by question, on the questions that both have" if base else ""
    return "\n".join([*parts, f"{intervals}{gains}.\n", *(f"{note}\n" for note in notes)])


def write(path: str, text: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the table, and its figures beside it, each renamed into place."""
    with files.atomic_write(path) as out:
        out.write(text)
    write_json(f"{os.path.splitext(path)[0]}.json", records)

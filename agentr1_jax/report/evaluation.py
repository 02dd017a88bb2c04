"""An evaluation as Markdown: what was asked, figures with intervals, outcomes, kinds of question, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from agentr1_jax.errors import inert
from agentr1_jax.report.tables import markdown_table

QUALITY = {"recall": "gold recall", "all_gold": "all gold", "em": "EM", "f1": "F1"}
EFFORT = {
    "steps": "steps",
    "tool_calls": "tool calls",
    "prompt_tokens": "prompt tokens",
    "response_tokens": "response tokens",
}
NAMES = {"all": "all questions", "mean": "mean of data sets"}


def interval(figure: Mapping[str, Any] | None, signed: bool = False) -> str:
    """`0.412 [0.380, 0.444]`; `-` where nothing was measured."""
    if figure is None:
        return "-"
    numbers = [figure[key] for key in ("mean", "low", "high")]
    digits = 3 if max(abs(x) for x in numbers) < 10 else 1
    mean, low, high = (f"{x:{'+' if signed else ''},.{digits}f}" for x in numbers)
    return f"{mean} [{low}, {high}]"


def quality_rows(evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    """The main figures, a row for each mode, split and data set."""
    return [
        {
            "mode": g["mode"],
            "split": g["split"],
            "data set": NAMES.get(g["dataset"], g["dataset"]),
            "questions": str(g["questions"]),
            **_cells(g["figures"], QUALITY),
        }
        for g in evaluation["groups"]
    ]


def quality_table(evaluation: Mapping[str, Any], *, title: str) -> Table:
    """The main figures for the terminal."""
    table = Table(title=Text(title), title_justify="left")
    for name in ("mode", "split", "data set", "questions", *QUALITY.values()):
        table.add_column(name)
    for row in quality_rows(evaluation):
        table.add_row(*(Text(inert(cell).replace(" [", "\n[")) for cell in row.values()))
    return table


def markdown(evaluation: Mapping[str, Any]) -> str:
    """Return the page of what evaluation.json holds: `request, unfinished, versions, groups, differences`."""
    request = evaluation["request"]
    sampling = f"temperature {request['temperature']}, {request['samples']} sample(s) a question"
    versions = ", ".join(f"{name} {version}" for name, version in evaluation["versions"].items())
    parts = [
        "# Evaluation\n",
        f"Task {request['config']['task']['name']}; {sampling}; seed {request['seed']}. Versions: {versions}.\n",
        markdown_table(
            [
                {"mode": mode, "policy": request["sources"][mode], "hash of its parameters": digest}
                for mode, digest in request["policies"].items()
            ]
        ),
        "A figure is a mean over questions with its 95 % bootstrap interval. What the infrastructure failed is left "
        "out of it, and counted as failed; whatever the policy did wrong counts as a wrong answer.\n",
        *(
            f"Left out, since it is not finished: {u['mode']} on {u['split']}, {u['answered']} of {u['questions']} "
            "questions answered.\n"
            for u in evaluation["unfinished"]
        ),
    ]
    for split in dict.fromkeys(group["split"] for group in evaluation["groups"]):
        groups = [group for group in evaluation["groups"] if group["split"] == split]
        parts += [f"## Split {split}\n", *_sections(groups)]
        parts += _compare_modes([d for d in evaluation["differences"] if d["split"] == split])
    return "\n".join(parts)


def _sections(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tables of a split."""

    def place(g: Mapping[str, Any]) -> dict[str, Any]:
        return {"mode": g["mode"], "data set": NAMES.get(g["dataset"], g["dataset"])}

    counts = [
        {"questions": g["questions"], "failed": f"{g['failed_trajectories']} of {g['trajectories']}"} for g in groups
    ]
    quality = [place(g) | count | _cells(g["figures"], QUALITY) for g, count in zip(groups, counts, strict=True)]
    parts = [markdown_table(quality)]
    if names := dict.fromkeys(key for g in groups for key in g["figures"] if key.startswith("pass@")):
        rows = [place(g) | _cells(g["figures"], {name: name for name in names}) for g in groups]
        parts += ["### pass@k\n", markdown_table(rows)]
    parts += ["### Effort\n", markdown_table([place(g) | _cells(g["figures"], EFFORT) for g in groups])]
    outcomes = sorted({name for g in groups for name in g["outcomes"]})
    rows = [
        place(g)
        | {"trajectories": g["trajectories"]}
        | {name: g["outcomes"].get(name, {"share": 0.0})["share"] for name in outcomes}
        for g in groups
        if g["dataset"] != "mean"
    ]
    parts += ["### Outcomes\n", "Shares of all trajectories, failed ones included.\n", markdown_table(rows)]
    rows = [
        place(g) | {"kind": kind, "questions": max(f["n"] for f in figures.values())} | _cells(figures, QUALITY)
        for g in groups
        if g["dataset"] != "all"
        for kind, figures in g["kinds"].items()
        if figures
    ]
    return parts + (["### Kinds of question\n", markdown_table(rows)] if rows else [])


def _cells(figures: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, str]:
    return {label: interval(figures.get(key)) for key, label in labels.items()}


def _compare_modes(differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table with one row for each pair of modes and data set."""
    if not differences:
        return []
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for d in differences:
        place = {"modes": f"{d['ours']} − {d['theirs']}", "data set": NAMES.get(d["dataset"], d["dataset"])}
        row = rows.setdefault((d["ours"], d["theirs"], d["dataset"]), place | {"questions": 0})
        row["questions"] = max(row["questions"], d["n"])
        row[QUALITY[d["metric"]]] = interval(d, signed=True)
    note = "Differences on the questions that both modes have, resampled in pairs.\n"
    columns = ["modes", "data set", "questions", *QUALITY.values()]
    return ["### Modes compared\n", note, markdown_table(list(rows.values()), columns)]

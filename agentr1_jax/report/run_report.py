"""The report of a run, whether it is running, stopped or finished: as a page, and in a terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from agentr1_jax import files
from agentr1_jax.errors import UserError, inert
from agentr1_jax.report.curves import plot_learning_curve
from agentr1_jax.report.facts import Decode
from agentr1_jax.report.inspector import PageHead, write_report
from agentr1_jax.report.selection import Selection, Source, choose
from agentr1_jax.report.tables import summary_table
from agentr1_jax.report.terminal import print_source
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.runtime.run_folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a report knows of token ids.

    Attributes:
      decode: token ids -> text; an empty text shows the id.
      template_ids: ids that only templates put into prompts, for their colour.
    """

    decode: Decode
    template_ids: Collection[int] = ()


def write_run_report(
    folder: RunFolder,
    selection: Selection,
    tokens: Tokens,
    *,
    out: files.PathLike | None = None,
    notes: Sequence[str] = (),
) -> list[str]:
    """Write the page of a run from what its folder holds; the folder may be in use.

    Args:
      folder: of the run.
      selection: what to show.
      tokens: of the run's tokenizer.
      out: HTML file to write; `report.html` in the folder unless given.
      notes: sentences to show on the page.

    Returns:
      a sentence for each file that could not be read; the rest is shown.

    Raises:
      UserError: the folder holds no run, or the run has no such RL batch or group.
    """
    config, faults = folder.read_config(), list[str]()
    sources = choose(folder, selection, faults)
    records = _records(folder, faults)
    summary = _summary(folder, config, records, faults)
    timeline = folder.file("timeline.png")
    with tempfile.TemporaryDirectory() as scratch:
        curve = os.path.join(scratch, "curve.png")
        plot_learning_curve(curve, records, title=folder.path)
        write_report(
            folder.file("report.html") if out is None else out,
            (trajectory for source in sources for trajectory in source.read(faults)),
            decode=tokens.decode,
            title=folder.path,
            head=PageHead(
                summary,
                notes=lambda: [_contents(sources), *notes, *faults],
                curve_png=curve,
                timeline_png=timeline if files.exists(timeline) else None,
                config=config,
            ),
            template_ids=tokens.template_ids,
            is_shown=lambda uid: any(source.is_shown(uid) for source in sources),
        )
    return faults


def print_run_report(
    console: Console, folder: RunFolder, selection: Selection, tokens: Tokens, notes: Sequence[str] = ()
) -> None:
    """Print what `write_run_report` writes, without tokens; arguments and errors are the same."""
    config, faults = folder.read_config(), list[str]()
    sources = choose(folder, selection, faults)
    console.print(summary_table(_summary(folder, config, _records(folder, faults), faults), title=folder.path))
    for note in (_contents(sources), *notes):
        console.print(Text(inert(note), style="dim"))
    for source in sources:
        print_source(console, source, tokens.decode, faults)
    for fault in faults:
        console.print(Text(inert(fault), style="bold red"))


def _contents(sources: Sequence[Source]) -> str:
    """Return a sentence on what is shown."""
    counts: dict[str, int | None] = {}
    for source in sources:
        before = counts.get(source.name, 0)
        counts[source.name] = None if source.shown is None or before is None else before + len(source.shown)
    shown = ", ".join(f"all of {name}" if n is None else f"{n} of {name}" for name, n in counts.items())
    return (
        f"Trajectories: {shown or 'none are recorded yet'}. Others: python -m experiments.report RUN --update=17,18, "
        "--worst=32 or --group=624."
    )


def _records(folder: RunFolder, faults: list[str]) -> list[dict[str, Any]]:
    """Return the metrics of the run so far."""
    try:
        return read_metrics(folder.file("metrics.jsonl"))
    except FileNotFoundError:
        return []
    except (UserError, OSError) as error:
        faults.append(str(error))
        return []


def _summary(
    folder: RunFolder, config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], faults: list[str]
) -> Mapping[str, Any]:
    """Return the figures of a finished run, or where an unfinished one stands."""
    try:
        summary = json.loads(files.read_bytes(folder.file("summary.json")))
        if isinstance(summary, dict):
            return summary
        faults.append(f"{folder.file('summary.json')}: not a summary")
    except FileNotFoundError:
        pass
    except (ValueError, OSError) as error:
        faults.append(f"{folder.file('summary.json')}: not a summary ({error})")
    last = {record.get("phase"): record for record in records}
    planned = {"rl": config, "warm_start": config.get("warm_start"), "pretraining": config.get("pretrain")}
    out: dict[str, Any] = {}
    for phase, section in planned.items():
        if phase in last:
            out[f"{phase} updates".replace("_", " ")] = (
                f"{last[phase].get('update')} of {(section or {}).get('updates')}"
            )
    for key in ("rollout/reward", "rollout/em", "rollout/steps"):
        if key in last.get("rl", {}):
            out[key.removeprefix("rollout/")] = last["rl"][key]
    for phase, how in (("eval", "greedy"), ("eval_sampled", "sampled")):
        if "eval/em" in last.get(phase, {}):
            out[f"em {how}, after update {last[phase].get('update')}"] = last[phase]["eval/em"]
    return out

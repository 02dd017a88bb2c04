"""The report of a run: what it shows, that it reads one trajectory at a time, and files that are damaged."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pages
import pytest
import recorded_runs
from rich.console import Console

from agentr1_jax import trajectory_io
from agentr1_jax.errors import UserError, inert
from agentr1_jax.report.run_report import Tokens, print_run_report, write_run_report
from agentr1_jax.report.selection import Selection, choose
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.train import build
from agentr1_jax.trajectory import Trajectory
from agentr1_jax.trajectory_io import read_jsonl, read_rewards, read_uids, write_jsonl

ROOT = Path(__file__).parents[2]
BATCH = recorded_runs.GROUPS * recorded_runs.SAMPLES


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    recorded_runs.write_run(folder, 3)
    return folder


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Path:
    """A copy of the stored run, to be damaged."""
    return Path(shutil.copytree(stored, tmp_path / "run"))


@pytest.fixture(scope="module")
def tokens(stored: Path) -> Tokens:
    tokenizer = build.load_tokenizer(str(stored / "tokenizer.model"))
    return Tokens(tokenizer.decode, frozenset(tokenizer.added.values()))


def chosen(run: Path, selection: Selection) -> dict[str, list[str]]:
    """Uids that are shown, by the name of their file."""
    out: dict[str, list[str]] = {}
    for source in choose(RunFolder(str(run)), selection, []):
        out.setdefault(source.name, []).extend(filter(source.is_shown, read_uids(source.path)))
    return out


def write(run: Path, selection: Selection, tokens: Tokens) -> tuple[str, list[str]]:
    """The page, and the sentences on what could not be read."""
    faults = write_run_report(RunFolder(str(run)), selection, tokens)
    return (run / "report.html").read_text(), faults


def printed(run: Path, selection: Selection, tokens: Tokens) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    print_run_report(console, RunFolder(str(run)), selection, tokens)
    return console.export_text()


def test_a_report_has_whole_groups_of_the_newest_batch_and_some_of_everything(stored: Path) -> None:
    shown = chosen(stored, Selection(most=20))
    assert list(shown) == ["rl_000002", "eval_000001", "rl_000000", "eval_before"], "the newest first"
    assert shown["rl_000002"] == [f"rl/{g:06d}/{s}" for g in (32, 33) for s in range(8)]
    assert shown["rl_000000"] == [f"rl/000000/{s}" for s in range(8)], "one whole group, though it has more than 5"
    assert shown["eval_before"] == [f"eval_before/{k:06d}/0" for k in range(5)]


def test_members_of_a_group_that_are_written_apart_are_shown_together(run: Path) -> None:
    (source,) = (s for s in choose(RunFolder(str(run)), Selection(updates=(2,)), []))
    batch = list(read_jsonl(source.path))
    write_jsonl(source.path, [*batch[1:], batch[0]])
    assert sorted(chosen(run, Selection(most=8))["rl_000002"]) == [f"rl/000032/{s}" for s in range(8)]


def test_updates_groups_and_the_worst_are_chosen(stored: Path) -> None:
    assert {name: len(uids) for name, uids in chosen(stored, Selection(updates=(0, -1))).items()} == {
        "rl_000002": BATCH,
        "rl_000000": BATCH,
    }
    for group in (0, 15, 16, 20, 47):
        (uids,) = chosen(stored, Selection(group=group)).values()
        assert uids == [f"rl/{group:06d}/{s}" for s in range(8)]
    paths = [stored / "trajectories" / f"rl_{u:06d}.jsonl.gz" for u in (0, 1)]
    rewards = {uid: reward for path in paths for uid, reward in read_rewards(path)}
    worst = [uid for uids in chosen(stored, Selection(updates=(0, 1), worst=10)).values() for uid in uids]
    assert len(worst) == 10
    assert max(rewards[uid] for uid in worst) <= min(r for uid, r in rewards.items() if uid not in worst)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(updates=(7,)), "has no RL batch 7; those from 0 to 2 are recorded"),
        (Selection(group=99), "group 99 is not in the recorded RL batches; the newest batch has 32 to 47"),
        (Selection(updates=(0,), group=20), r"group 20 is not in the RL batches \[0\]"),
    ],
)
def test_what_is_not_recorded_is_refused(stored: Path, selection: Selection, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(RunFolder(str(stored)), selection, [])


def test_rewards_are_read_as_trajectories_have_them(stored: Path, tmp_path: Path) -> None:
    path = stored / "trajectories" / "rl_000000.jsonl.gz"
    assert [(t.uid, t.total_reward) for t in read_jsonl(path)] == list(read_rewards(path))
    (dropped,) = read_jsonl(path, lambda uid: uid == "rl/000003/5")
    record = trajectory_io.to_json(dropped) | {"outcome": "tool_failure"}
    write_jsonl(tmp_path / "one.jsonl.gz", [trajectory_io.from_json(record)])
    assert list(read_rewards(tmp_path / "one.jsonl.gz")) == [("rl/000003/5", None)]
    unknown = [{**step, "reward": None} for step in record["steps"]]
    counted = trajectory_io.from_json(record | {"outcome": "failure_as_zero", "steps": unknown})
    write_jsonl(tmp_path / "one.jsonl.gz", [counted])
    assert list(read_rewards(tmp_path / "one.jsonl.gz")) == [("rl/000003/5", 0.0)] and counted.total_reward == 0


@pytest.mark.parametrize("selection", [Selection(), Selection(updates=(1,), worst=3), Selection(group=17)])
def test_one_trajectory_is_in_memory_at_a_time(
    run: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, selection: Selection
) -> None:
    alive: weakref.WeakSet[Trajectory] = weakref.WeakSet()
    seen, most, parsed = 0, 0, trajectory_io.from_json

    def counted(record: dict) -> Trajectory:
        nonlocal seen, most
        gc.collect(0)
        alive.add(trajectory := parsed(record))
        seen, most = seen + 1, max(most, len(alive))
        return trajectory

    monkeypatch.setattr(trajectory_io, "from_json", counted)
    page, _ = write(run, selection, tokens)
    assert seen == len(pages.island(page)["trajectories"]), "others are not parsed"
    printed(run, selection, tokens)
    # The one before lives until the next one has been parsed.
    assert most <= 2


def test_the_worst_are_shown_beside_their_groups(run: Path, tokens: Tokens) -> None:
    page, _ = write(run, Selection(updates=(1,), worst=3), tokens)
    listed = pages.island(page)["trajectories"]
    shown = {facts["uid"] for facts in listed if facts["blob"] is not None}
    assert len(shown) == 3 == len(pages.unpack(page))
    groups = {facts["group"] for facts in listed}
    assert len(listed) == 8 * len(groups) and groups == {uid.rpartition("/")[0] for uid in shown}


def test_a_run_that_goes_on_is_shown_as_far_as_it_is_whole(run: Path, tokens: Tokens) -> None:
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"index": 3, "phase": "rl", "upd')
    (run / "trajectories" / "rl_000003.jsonl.gz.partial").write_bytes(b"\x1f\x8b half a file")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    page, faults = write(run, Selection(), tokens)
    assert faults == [] and "3 of 4" in page and "64 of rl_000002" in pages.island(page)["notes"][0]
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before | {run / "report.html": after[run / "report.html"]}


def test_damaged_files_are_a_sentence_each_and_the_rest_is_shown(run: Path, tokens: Tokens) -> None:
    newest = run / "trajectories" / "rl_000002.jsonl.gz"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    (run / "trajectories" / "eval_000001.jsonl.gz").write_bytes(b"nonsense")
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "summary.json").write_text("[")
    page, faults = write(run, Selection(), tokens)
    assert [re.search(r"(\w+)\.json", fault)[1] for fault in faults] == [
        "rl_000002",
        "eval_000001",
        "metrics",
        "summary",
    ]
    assert set(faults) <= set(pages.island(page)["notes"])
    names = {uid.split("/")[0] for uid in pages.unpack(page)}
    assert names == {"rl", "eval_before"}
    assert all(fault[:40] in printed(run, Selection(), tokens).replace("\n", "") for fault in faults)
    (run / "metrics.jsonl").unlink()
    assert not any("metrics" in fault for fault in write(run, Selection(), tokens)[1])


def test_deep_json_of_earlier_versions_is_cut(run: Path, tokens: Tokens) -> None:
    deep: list = []
    for _ in range(900):
        deep = [deep]
    path = run / "trajectories" / "rl_000002.jsonl.gz"
    first, *rest = read_jsonl(path)
    step = dataclasses.replace(
        first.steps[0], action_key=None, info={"a": deep}, tool_calls=[{"arguments": {"a": deep}}]
    )
    steps, row = (step, *first.steps[1:]), {**first.row, "question": deep, "answers": [deep]}
    write_jsonl(path, [dataclasses.replace(first, steps=steps, row=row, info={"a": deep}), *rest])
    page, faults = write(run, Selection(), tokens)
    assert first.uid in {t["uid"] for t in pages.island(page)["trajectories"]} and faults == []
    assert first.uid in printed(run, Selection(updates=(2,)), tokens)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, tokens: Tokens) -> None:
    with pytest.raises(UserError, match="no run"):
        write_run_report(RunFolder(str(tmp_path)), Selection(), tokens)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.json").write_text('{"format": 3}')
    page, faults = write(tmp_path, Selection(), tokens)
    assert faults == [] and "none are recorded yet" in pages.island(page)["notes"][0]


def test_the_terminal_has_accounts_and_the_members_of_a_group(stored: Path, tokens: Tokens) -> None:
    text = printed(stored, Selection(group=20), tokens)
    (members,) = re.findall(r"group rl/000020 .*?(?=rl/000020/0)", text, re.DOTALL)
    assert len(re.findall(r"^ +\d ", members, re.MULTILINE)) == 8 and "where it parts from sample" in members
    assert text.count("gold answer: Tolmezzo") == 8
    (trajectory,) = read_jsonl(stored / "trajectories" / "rl_000001.jsonl.gz", lambda uid: uid == "rl/000020/0")
    for step in trajectory.steps:
        term = step.account["outcome in its group"]
        assert f"return {term.plus['return']:g} − group mean 0.4".replace("-", "−") in text
        assert f"{np.mean(step.advantages):+.3g}".replace("-", "−") in text


def test_nothing_in_a_terminal_obeys_a_text() -> None:
    hostile = "\x1b]0;owned\x07\x9b2J\u202e[red]a\ud800"
    assert inert(hostile) == "�]0;owned��2J�[red]a�"
    assert inert("“ü\n\t日本”") == "“ü\n\t日本”"


def test_a_terminal_does_not_obey_the_files_of_a_run(run: Path, tokens: Tokens) -> None:
    (run / "summary.json").write_text(json.dumps({"em\x1b[2J": "\x1b]0;owned\x07"}))
    console = Console(width=120, file=io.StringIO())
    print_run_report(console, RunFolder(str(run)), Selection(updates=(2,), worst=1), tokens, ["\x1b[2J"])
    assert "owned" in (text := console.file.getvalue()) and "\x1b" not in text


def test_the_command_writes_a_page_or_prints_and_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    def report(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "experiments.report", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = report(run, "--update=1,last", "--worst=4", f"--out={tmp_path / 'page.html'}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(pages.unpack((tmp_path / "page.html").read_text())) == 4 and not (run / "report.html").exists()
    (run / "tokenizer.model").unlink()
    text = report(run, "--group=3", "--text")
    assert text.returncode == 0 and "Tokens are shown by their ids" in text.stdout and "group mean" in text.stdout
    wrong = report(run, "--update=newest")
    assert wrong.returncode == 2 and "--update=newest: write numbers" in wrong.stderr
    assert "Traceback" not in wrong.stderr + done.stderr + text.stderr


def test_metrics_of_the_last_records_say_where_a_run_stands(run: Path, tokens: Tokens) -> None:
    with open(run / "metrics.jsonl", "a") as metrics:
        for index, record in enumerate(({"phase": "eval", "update": 3, "eval/em": 0.25}, {"phase": "other"}), start=3):
            metrics.write(json.dumps({"index": index, **record}) + "\n")
    assert "em greedy, after update 3" in printed(run, Selection(group=0), tokens)
    (run / "summary.json").write_text('{"em_after": 0.875}')
    text = printed(run, Selection(group=0), tokens)
    assert "em_after" in text and "after update 3" not in text

"""Run folder: trajectories and pending rollouts of several processes, and a folder that not all processes share."""

from __future__ import annotations

import json
import os

import builders
import numpy as np
import pytest
from changes import changed
from pair import run_two

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.run_folder import BEFORE_CONFIG, RESUMABLE, RunFolder, batch_name, read_trajectories
from configs import base


@pytest.fixture
def folder(tmp_path):
    return RunFolder(str(tmp_path / "run"))


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return [builders.trajectory(rng, [3, 2], group=i // 2, sample=i % 2) for i in range(6)]


def uids(trajectories):
    return [t.uid for t in trajectories]


def test_pending_rollouts_of_removed_checkpoints_are_removed_and_damaged_ones_are_skipped(folder, batch, caplog):
    for number in (3, 4, 5):
        folder.write_pending(number, batch)
    folder.remove_pending_except([4, 5])
    assert sorted(os.listdir(folder.file("pending"))) == ["4.p0.jsonl.gz", "5.p0.jsonl.gz"]
    with open(folder.file("pending", "5.p0.jsonl.gz"), "wb") as file:
        file.write(b"x")
    assert folder.read_pending(5) == [] and "sampled again" in caplog.text
    assert uids(folder.read_pending(4)) == uids(batch) and folder.read_pending(9) == []
    folder.write_pending(4, [])
    assert folder.read_pending(4) == []
    RunFolder(f"{folder.path}2").write_pending(1, [])
    assert not os.path.exists(f"{folder.path}2")


def test_pending_rollouts_that_an_earlier_start_wrote_later_are_removed(folder, batch):
    folder.write_pending(12, batch)
    os.rename(folder.file("pending", "12.p0.jsonl.gz"), folder.file("pending", "12.p1.jsonl.gz"))  # Of process 1.
    folder.write_pending(10, batch[:2])
    folder.remove_pending_after(10)
    assert folder.read_pending(12) == [] and uids(folder.read_pending(10)) == uids(batch[:2])


def test_files_of_processes_of_an_earlier_start_are_removed(folder, batch, monkeypatch):
    """After a resume with another number of processes a batch would otherwise be there twice."""

    def write_with(count):
        monkeypatch.setattr(processes, "process_count", lambda: count)
        for index in range(count):
            monkeypatch.setattr(processes, "process_index", lambda index=index: index)
            folder.write_trajectories(batch_name(1), batch[index::count])
            folder.write_pending(count, batch[index::count])
            folder.remove_pending_except([count])
        names = (name for kind in ("pending", "trajectories") for name in os.listdir(folder.file(kind)))
        return sorted(name.split(".", 1)[1] for name in names)

    assert write_with(3) == [f"p{k}.jsonl.gz" for k in range(3) for _ in "ab"]
    assert write_with(2) == [f"p{k}.jsonl.gz" for k in range(2) for _ in "ab"]
    assert write_with(1) == ["jsonl.gz", "p0.jsonl.gz"]
    assert write_with(2) == [f"p{k}.jsonl.gz" for k in range(2) for _ in "ab"]
    assert uids(read_trajectories(folder.batch_files()[1])) == uids([*batch[::2], *batch[1::2]])


def test_batches_are_found_by_their_update(folder, batch):
    with pytest.raises(UserError, match="has recorded no RL batch yet"):
        folder.batch_files()
    for name in ("eval_before", "demonstrations", *map(batch_name, range(5))):
        folder.write_trajectories(name, batch)
    assert sorted(folder.batch_files()) == [0, 1, 2, 3, 4]


def test_a_damaged_trajectory_file_is_named(folder, batch):
    folder.write_trajectories("eval_before", batch)
    path = folder.file("trajectories", "eval_before.jsonl.gz")
    with open(path, "r+b") as file:
        file.truncate(50)
    with pytest.raises(UserError, match=r"eval_before\.jsonl\.gz, line 1: not a trajectory"):
        read_trajectories([path])


def test_a_run_folder_keeps_to_its_config(tmp_path):
    def config(**changes: object) -> dict[str, object]:
        fields = {"run_dir": "a", "seed": 0, "sizes": [1, 2], "eval": {"every": 5, "rows": 8}, "mesh": {"data": 1}}
        return fields | changes

    run_dir = tmp_path / "run"
    assert not RunFolder(str(run_dir)).check_same_config(config())
    RunFolder(str(run_dir)).write_config(config())
    (run_dir / "metrics.jsonl").write_text('{"index": 0}\n')
    assert RunFolder(str(run_dir)).check_same_config(config(run_dir="b", mesh={"data": 2}))
    assert RunFolder(str(run_dir)).check_same_config(
        config(eval={"every": 6, "rows": 8}), may_differ=("run_dir", "eval")
    )
    before = (run_dir / "config.json").read_bytes()
    with pytest.raises(UserError) as caught:
        RunFolder(str(run_dir)).check_same_config(config(seed=1, sizes=[1, 3], new=2))
    assert "seed: 0 there, 1 here" in str(caught.value)
    assert "sizes: [1, 2] there, [1, 3] here" in str(caught.value)
    assert "new: '(no such key)' there, 2 here" in str(caught.value)
    assert "eval" not in str(caught.value)
    assert (run_dir / "config.json").read_bytes() == before
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.json", "metrics.jsonl"]


@pytest.mark.parametrize("place", ["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def test_a_start_that_failed_before_the_run_began_leaves_the_folder_to_a_corrected_config(place, tmp_path, request):
    path = str(tmp_path / "run") if place == "disk" else request.getfixturevalue("bucket")
    folder = RunFolder(path)
    folder.write_config({"seed": 0})
    if place == "disk":  # What `open_run` makes before the first update.
        os.makedirs(folder.file("checkpoints"))
        open(folder.file("metrics.jsonl"), "w").close()
    assert not folder.check_same_config({"seed": 0}) and not folder.check_same_config({"seed": 1})
    for name in ("checkpoints/3/state", "metrics.jsonl", "summary.json"):
        with files.atomic_write(folder.file(name)) as out:
            out.write("{}")
        with pytest.raises(UserError, match="seed: 0 there, 1 here"):
            folder.check_same_config({"seed": 1})
        assert folder.check_same_config({"seed": 0})
        files.remove(folder.file(name))
        if place == "disk" and name.startswith("checkpoints"):
            os.rmdir(folder.file("checkpoints", "3"))


@pytest.mark.parametrize(
    ("file", "is_foreign"),
    [
        ("my_tasks.py", False),
        ("lib/my_tasks.py", False),
        ("runs/one/evil.py", True),
        ("lib/../runs/one/evil.py", True),
        ("runs/evil.py", True),  # Unpacked with it, like the next.
        ("runs/lib/evil.py", True),
        ("../evil.py", True),
        ("link.py", True),
    ],
)
def test_code_that_came_with_a_run_is_told_from_that_of_the_working_directory(tmp_path, monkeypatch, file, is_foreign):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    os.symlink("../evil.py", "link.py")
    values = {"task": {"file": file, "verifiers": {"source": "some_module"}}, "credit": {"file": ""}}
    foreign = {"task.file": file} if is_foreign else {}
    for path in ("runs/one", "runs/far/below", str(tmp_path / "work" / "runs" / "one")):
        assert RunFolder(path).risks(values) == foreign
    values = {"context": {"file": file}, "credit": {"file": file}, "task": {"verifiers": {"source": file}}}
    assert len(RunFolder("runs/one").risks(values)) == 3 * is_foreign
    assert RunFolder("runs/one").risks({"credit": {"file": "runs/one/evil.pyc"}}), "Python executes it, too"
    for run in ("gs://bucket/one", "one", str(tmp_path / "elsewhere")):
        assert RunFolder(run).risks({"credit": {"file": "my.py"}}) == {}
    monkeypatch.chdir("/")
    assert RunFolder(str(tmp_path)).risks({"credit": {"file": str(tmp_path / "evil.py")}})


@pytest.mark.parametrize("run", ["runs/one", "link/one"])
def test_modules_that_python_would_import_from_a_run(tmp_path, monkeypatch, run):
    for folder in ("work/runs/one", "work/lib", "disk/one"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    os.symlink("../disk", "link")
    module = f"{run.replace('/', '.')}.evil"
    for task in (
        {"gymnasium": {"id": f"{module}:Lake-v1"}},
        {"multihop": {"reward_functions": ["lib.mine:brevity=0.2", f"{module}:brevity=0.2"]}},
        {"verifiers": {"source": module}},
    ):
        assert len(RunFolder(run).risks({"task": task})) == 1
    own = {"gymnasium": {"id": "Lake-v1"}, "multihop": {"reward_functions": ["lib.mine:brevity=0.2", "json:dumps=1"]}}
    assert RunFolder(run).risks({"task": own}) == {}


def test_environment_variables_go_to_no_url_unasked(tmp_path):
    values = {"task": {"http": {"url": "HTTP://host?a=${HOME}"}, "name": "$HOME", "note": "https://host for $5"}}
    assert RunFolder(str(tmp_path)).risks(values) == {"task.http.url": "HTTP://host?a=${HOME}"}


def test_credentials_in_urls_are_not_stored_and_may_change(tmp_path):
    folder, key = RunFolder(str(tmp_path / "run")), "task.multihop.retriever.url"

    def config(url, **kwargs):
        return configs.resolve(changed(base.get_config("multihop"), task__multihop__retriever__url=url), **kwargs)

    first = config("https://user:secret@host?token=secret&shard=1")
    folder.write_config(first)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"index": 0}\n')
    assert "secret" not in (tmp_path / "run" / "config.json").read_text() + str(config("HTTPS://user:secret@host"))
    assert folder.check_same_config(first)
    folder.write_config(config("https://user:secret@host?token=secret&shard=1", credentials=True))  # Of an old version.
    for same in ("https://user:other@host?token=x&shard=1", "https://user:$NAME@host?token=$NAME&shard=1"):
        assert folder.check_same_config(config(same))
    for other in ("https://user:secret@host?token=secret&shard=2", "https://host?token=secret&shard=1"):
        with pytest.raises(UserError, match=key) as caught:
            folder.check_same_config(config(other))
        assert "secret" not in str(caught.value)
    instruction = "Look at https://user:word@host."
    kept = configs.resolve(changed(base.get_config("multihop"), task__multihop__instruction=instruction))
    assert kept["task"]["multihop"]["instruction"] == instruction, "a prompt stays as it is"


@pytest.mark.parametrize(("format", "name"), [({}, r"of agentr1_jax 0\.1\.0, commit 41ce720"), ({"format": 99}, "99")])
def test_folders_of_other_versions_are_refused(tmp_path, format, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"seed": 0, **format}))
    with pytest.raises(UserError, match=f"run: the run folder has the format {name}, this version reads.*CHANGELOG"):
        RunFolder(str(tmp_path / "run")).check_same_config({"seed": 0})


def test_other_folders_are_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="not empty"):
        RunFolder(str(tmp_path)).check_same_config({"seed": 0})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not a config"):
        RunFolder(str(tmp_path)).check_same_config({"seed": 0})


def test_a_start_that_was_killed_before_it_wrote_its_config_does_not_block_the_next(tmp_path):
    for left in BEFORE_CONFIG:
        (tmp_path / left).touch()
    assert not RunFolder(str(tmp_path)).check_same_config({"seed": 0})


def test_keys_that_may_change_are_in_the_base_config():
    resolved = configs.resolve(base.get_config())
    assert set(RESUMABLE) <= resolved.keys() | dict(configs.flatten(resolved)).keys()


CHILD = """
import os, sys
from agentr1_jax.runtime import processes
from agentr1_jax.errors import UserError
from agentr1_jax.runtime.run_folder import check_common_folder

processes.initialize()
index = processes.process_index()
check_common_folder(sys.argv[1])
os.chdir(os.path.join(sys.argv[1], str(index)))
try:
    check_common_folder("run")
except UserError as error:
    os.write(1, f"refused: {error}".encode())
"""


def test_a_folder_that_is_two_places_is_refused_by_both_processes(tmp_path):
    for index in range(2):
        (tmp_path / str(index)).mkdir()
    first, second = (out.partition("refused: ")[2] for out in run_two(CHILD, str(tmp_path)))
    assert first == second
    assert first.startswith(f"run: not all processes share this folder: what process 0 writes ({tmp_path}/0/run on ")
    assert (
        f"is not seen by process 1 ({tmp_path}/1/run on " in first and "process 0 (" not in first.partition("is not")[2]
    )
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    assert os.listdir(tmp_path / "0" / "run") == [] and os.listdir(tmp_path / "1") == []

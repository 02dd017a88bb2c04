"""Downloads from a local server that drops, lies and forgets: what is whole arrives, and tasks read it."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from plays import multihop_task
from programs import program
from question_records import PARAGRAPHS, hotpot, musique, wiki

from agentr1_jax import files
from agentr1_jax.contrib.bfcl.rows import read_tasks
from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.errors import RetryableError, UserError
from agentr1_jax.runtime.lock import lock_folder
from agentr1_jax.tasks import make_task
from agentr1_jax.text.tokenizer import load_tokenizer
from agentr1_jax.tools.search import read_corpus

prepare_data = program("prepare_data")
ROOT = Path(__file__).parents[2]
PROBLEMS = [{"question": f"What is {i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>.\n#### {i + 1}"} for i in range(9)]


class Server(http.server.ThreadingHTTPServer):
    """Serves `contents`, ranges too; before that, each request meets the next fault of `plan`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents, self.plan, self.asked = {}, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path[1:], wanted))
        fault = self.server.plan.pop(0) if self.server.plan else None
        data = self.server.contents.get(self.path[1:])
        if isinstance(fault, int) or data is None:
            self.send_error(fault or 404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and fault != "no ranges" else 0
        self.send_response(206 if start else 200)
        if fault != "no length":
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : start + 10] if fault in ("drops", "no length") else data[start:])

    def log_message(self, *args):
        """Silent."""


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def archive(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, data in {"__MACOSX/._train.json": b"\0", **members}.items():
            packed.writestr(name, data)
    return out.getvalue()


@pytest.fixture
def sets(server, monkeypatch):
    """Small files in the official formats, served where the table says."""
    rex = [*PARAGRAPHS[:2], ["Max", ["Another dog."]]]
    parts = {
        "hotpotqa": {
            "hotpot_train_v1.1.json": json.dumps([hotpot(i) for i in range(6)]).encode(),
            "hotpot_dev_distractor_v1.json": json.dumps([hotpot(9, context=rex)]).encode(),
        },
        "2wiki": {
            "data_ids_april7.zip": archive(
                **{
                    "data/train.json": json.dumps([wiki(i, answer_id="Q1") for i in range(3)]),
                    "data/dev.json": json.dumps([wiki(8)]),
                    "data/id_aliases.json": json.dumps({"Q_id": "Q1", "aliases": ["OH"]}),
                }
            )
        },
        "musique": {
            "musique_ans_v1.0_train.jsonl": lines([musique(i) for i in range(3)]),
            "musique_ans_v1.0_dev.jsonl": lines([musique(i) for i in range(7, 9)]),
        },
        "gsm8k": {"train.jsonl": lines(PROBLEMS[:6]), "test.jsonl": lines(PROBLEMS[6:])},
    }
    table = {}
    for name, given in parts.items():
        server.contents |= {f"{name}/{file}": data for file, data in given.items()}
        published = {
            file: prepare_data.File(f"{server.url}/{name}/{file}", len(data), hashlib.sha256(data).hexdigest())
            for file, data in given.items()
        }
        assert published.keys() == prepare_data.SETS[name].files.keys()
        table[name] = prepare_data.SETS[name]._replace(files=published)
    monkeypatch.setattr(prepare_data, "SETS", table)
    monkeypatch.setattr(prepare_data, "PAUSE", 0.0)
    return table


def prepare(folder, name, questions=0, mirror=""):
    work = folder / ".downloads" / name
    prepare_data.prepare(name, str(folder), work, mirror, questions)
    assert not work.exists()


def whole(folder):
    """Names of all files but downloads, with their contents."""
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and ".downloads" not in p.parts}


def test_tasks_read_what_is_written(sets, server, tmp_path):
    for name in sets:
        prepare(tmp_path, name)
    everything = ["hotpotqa", "2wikimultihopqa", "musique"]
    task = multihop_task(tmp_path, datasets=everything)
    assert (task.size("train"), task.size("eval")) == (6 + 3 + 3, 1 + 1 + 2)
    rows = [task.row("eval", i) for i in range(4)] + [task.row("train", i) for i in range(12)]
    titles = {passage.id: passage.title for passage in task.corpus}
    assert all({titles[gold] for gold in row["gold_ids"]} == {"Jaws", "Steven"} for row in rows)
    assert {row["id"]: row["answers"] for row in rows if row["id"] in ("w1", "w8", "h1", "2hop__7_1")} == {
        "w1": ["Ohio", "OH"],
        "w8": ["Ohio"],
        "h1": ["Ohio"],
        "2hop__7_1": ["Ohio", "State of Ohio"],
    }
    assert all(row["evidences"] for row in rows if row["dataset"] == "2wikimultihopqa")
    corpus = read_corpus(tmp_path / "multihop/corpus_hotpotqa.jsonl.gz")
    assert [passage.title for passage in corpus] == ["Jaws", "Steven", "Rex", "Max"]
    problems = make_task("gsm8k", TaskContext(data_dir=str(tmp_path)))
    assert (problems.size("train"), problems.row("eval", 0)["answers"]) == (6, ["7"])
    record = json.loads((tmp_path / "SOURCES.json").read_text())
    assert (
        record["2wiki"]["files"]["data_ids_april7.zip"]["sha256"] == sets["2wiki"].files["data_ids_april7.zip"].sha256
    )
    assert record["musique"]["counts"] == {"train questions": 3, "dev questions": 2, "passages": 3}


def test_what_is_there_is_not_asked_for_again(sets, server, tmp_path):
    prepare(tmp_path, "gsm8k")
    prepare(tmp_path, "hotpotqa")
    before, asked = whole(tmp_path), len(server.asked)
    for name in ("gsm8k", "hotpotqa"):
        prepare(tmp_path, name)
    assert len(server.asked) == asked and whole(tmp_path) == before
    (tmp_path / "gsm8k/test.jsonl.gz").unlink()  # As if stopped before its last file was moved.
    prepare(tmp_path, "gsm8k")
    assert whole(tmp_path) == before


def test_a_laptop_keeps_some_questions_and_their_passages(sets, tmp_path):
    chosen = {}
    for questions in (2, 4, 0):
        prepare(tmp_path, "hotpotqa", questions)
        with gzip.open(tmp_path / "multihop/questions_hotpotqa_train.jsonl.gz", "rt") as file:
            chosen[questions] = {json.loads(line)["id"] for line in file}
    assert [len(ids) for ids in chosen.values()] == [2, 4, 6] and chosen[2] < chosen[4]


def test_a_half_download_goes_on(sets, server, tmp_path):
    path = tmp_path / ".downloads/gsm8k/train.jsonl.partial"
    path.parent.mkdir(parents=True)
    path.write_bytes(server.contents["gsm8k/train.jsonl"][:100])
    shutil.copy(path, tmp_path / "elsewhere")
    (path.parent / "test.jsonl").write_bytes(server.contents["gsm8k/test.jsonl"])  # Put there by hand.
    prepare(tmp_path, "gsm8k")
    assert server.asked == [("gsm8k/train.jsonl", "bytes=100-")]
    assert gzip.decompress((tmp_path / "gsm8k/train.jsonl.gz").read_bytes()) == server.contents["gsm8k/train.jsonl"]


def test_a_server_that_drops_is_asked_for_the_rest(sets, server, tmp_path):
    server.plan = ["drops", 503, "drops", 429, "no length", "drops"] * 3 + ["no ranges"]
    prepare(tmp_path, "gsm8k")
    ranges = [wanted for name, wanted in server.asked if name == "gsm8k/train.jsonl"]
    assert ranges[:4] == [None, "bytes=10-", "bytes=10-", "bytes=20-"] and len(ranges) == 19
    assert gzip.decompress((tmp_path / "gsm8k/train.jsonl.gz").read_bytes()) == server.contents["gsm8k/train.jsonl"]


def test_a_server_that_stays_away_is_given_up_and_nothing_is_lost(sets, server, tmp_path):
    server.plan = ["drops"] + [503] * prepare_data.ATTEMPTS
    with pytest.raises(RetryableError, match=r"train\.jsonl: .*status 503; 10 of \d+ bytes are in .*goes on there"):
        prepare(tmp_path, "gsm8k")
    assert whole(tmp_path) == {}
    prepare(tmp_path, "gsm8k")
    assert server.asked[-2] == ("gsm8k/train.jsonl", "bytes=10-")


def test_another_file_is_refused_and_kept_aside(sets, server, tmp_path):
    right = server.contents["gsm8k/test.jsonl"]
    server.contents["gsm8k/test.jsonl"] = right.replace(b"What", b"That")
    with pytest.raises(UserError, match=r"test\.jsonl: not the published file: .* it is kept as .*test\.jsonl\.wrong"):
        prepare(tmp_path, "gsm8k")
    assert whole(tmp_path) == {} and (tmp_path / ".downloads/gsm8k/test.jsonl.wrong").exists()
    server.contents["gsm8k/test.jsonl"] = b"<html>Too many users have viewed this file</html>"
    with pytest.raises(UserError, match=rf"test\.jsonl: 49 bytes where {len(right):,} were published, .*a page"):
        prepare(tmp_path, "gsm8k")
    server.contents["gsm8k/test.jsonl"], server.asked = right, []
    prepare(tmp_path, "gsm8k")
    assert server.asked == [("gsm8k/test.jsonl", None)]  # train.jsonl was whole.


def test_a_mirror_and_what_it_lacks(sets, server, tmp_path):
    server.contents |= {f"copy/{name}": data for name, data in server.contents.items()}
    del server.contents["copy/gsm8k/test.jsonl"]
    with pytest.raises(UserError, match=r"/copy/gsm8k/test\.jsonl: status 404, there is no such file; name a --mirror"):
        prepare(tmp_path, "gsm8k", mirror=f"{server.url}/copy/")
    assert [name for name, _ in server.asked] == ["copy/gsm8k/train.jsonl", "copy/gsm8k/test.jsonl"]


def test_files_of_others_are_not_replaced(sets, server, tmp_path):
    theirs = tmp_path / "gsm8k/test.jsonl.gz"
    theirs.parent.mkdir()
    theirs.write_bytes(b"mine")
    with pytest.raises(
        UserError, match=r"test\.jsonl\.gz: this file is not from this command, .* choose another FOLDER"
    ):
        prepare(tmp_path, "gsm8k")
    assert theirs.read_bytes() == b"mine" and server.asked == []
    (tmp_path / "SOURCES.json").write_text("[1")
    with pytest.raises(UserError, match=r"SOURCES\.json: not what this command writes"):
        prepare(tmp_path, "hotpotqa")


def test_the_pinned_checksums_are_those_of_the_files_that_tests_use(server, data_dir, tmp_path):
    """The whole command, with the real table: GSM8K, BFCL and the tokenizers come out as in the data folder."""
    expected = {}
    for name in ("gsm8k", "bfcl", "tokenizers"):
        data = prepare_data.SETS[name]
        for file, path in zip(data.files, data.paths, strict=True):
            found = (data_dir / path).read_bytes()
            expected[path] = server.contents[f"{name}/{file}"] = gzip.decompress(found) if data.packed else found
    command = [sys.executable, "-m", "experiments.prepare_data", tmp_path / "data", "gsm8k", "bfcl", "tokenizers"]
    done = subprocess.run([*command, f"--mirror={server.url}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"export AGENTR1_DATA={tmp_path}/data" in done.stderr, done.stderr
    for path, content in expected.items():
        written = (tmp_path / "data" / path).read_bytes()
        assert (gzip.decompress(written) if path.endswith(".gz") else written) == content
    assert len(read_tasks(tmp_path / "data/bfcl_v4")[0]) == len(read_tasks(data_dir / "bfcl_v4")[0])
    assert load_tokenizer(str(tmp_path / "data/tokenizers/minimind-6400")).vocab_size == 6400
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["SOURCES.json", "bfcl_v4", "gsm8k", "tokenizers"]


def test_mistakes_are_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for folder, name, mirror, message in (
        (tmp_path, "hotpot", "", r"unknown data set 'hotpot'; did you mean 'hotpotqa'\? Known are hotpotqa, 2wiki"),
        (tmp_path / "file", "gsm8k", "", "/file/.downloads: Not a directory$"),
        (tmp_path, "gsm8k", "here", "--mirror is 'here'; it must be like https://HOST/FOLDER"),
    ):
        with pytest.raises(UserError, match=message):
            prepare_data.prepare_all(str(folder), [name], mirror, 0)
    with lock_folder(tmp_path / ".downloads"), pytest.raises(UserError, match="another run is at work there .*folder"):
        prepare_data.prepare_all(str(tmp_path), ["gsm8k"], "", 0)


def test_a_full_disk(sets, server, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 0, 10**6))
        big = prepare_data.File(f"{server.url}/gsm8k/train.jsonl", 10**9, "")
        with pytest.raises(UserError, match=r"0\.00 GB are free, and 1\.00 GB are needed; free some space"):
            prepare_data.download(big, tmp_path / "x", prepare_data.make_progress())
    assert server.asked == []

    def fails(data, work, out):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))

    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(UserError, match="No space left on device; free some space"))
        patch.setattr(prepare_data, "copy_files", fails)
        prepare_data.prepare_all(str(tmp_path), ["gsm8k"], "", 0)
    assert whole(tmp_path) == {}
    server.asked.clear()
    prepare_data.prepare_all(str(tmp_path), ["gsm8k"], "", 0)
    assert server.asked == [] and "train.jsonl.gz" in whole(tmp_path)


def test_into_a_bucket(sets, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data.tempfile, "gettempdir", lambda: str(tmp_path))
    prepare_data.prepare_all(bucket, ["gsm8k", "musique"], "", 0)
    prepare(tmp_path / "local", "gsm8k")
    assert files.read_bytes(f"{bucket}/gsm8k/test.jsonl.gz") == (tmp_path / "local/gsm8k/test.jsonl.gz").read_bytes()
    assert set(json.loads(files.read_bytes(f"{bucket}/SOURCES.json"))) == {"gsm8k", "musique"}
    assert not list(tmp_path.glob("agentr1_jax*"))

"""Download real data from their official addresses, into the folder that tasks read.

    python -m experiments.prepare_data FOLDER [hotpotqa 2wiki musique gsm8k bfcl tokenizers] [--questions=2000]
    export AGENTR1_DATA=FOLDER

FOLDER may be `gs://BUCKET/FOLDER`. Without names it gets all sets. `--questions` keeps that many questions of each
split of the multi-hop sets, and their passages alone: enough for a laptop. `--mirror=URL` downloads `URL/SET/FILE`.

Every file has a published size and SHA-256 (docs/data.md), and is refused with any other. A download that stopped goes
on. A set appears in FOLDER when all of it is there; FOLDER/SOURCES.json says what it was made of. Files that this
command did not write are never replaced.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import hashlib
import heapq
import json
import os
import shutil
import tempfile
import time
import urllib.parse
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import httpx
from absl import flags, logging
from rich import progress as bars

from agentr1_jax import files
from agentr1_jax.errors import DISK_FULL, RetryableError, UserError, user_error
from agentr1_jax.http import is_http_url, retry_pause
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.lock import lock_folder
from agentr1_jax.tasks.multihop.sources import Question, check_name, read_questions

MIRROR = flags.DEFINE_string("mirror", "", "address of a copy: files are MIRROR/SET/FILE; else the official addresses")
QUESTIONS = flags.DEFINE_integer(
    "questions", 0, "questions of each split of the multi-hop sets; 0 for all", lower_bound=0
)

RECORD = "SOURCES.json"
ATTEMPTS, PAUSE = 5, 1.0
"""Attempts in a row that bring nothing, and the longest pause before the second, in seconds."""
CHUNK = 1 << 20
"""Bytes that are copied at once."""


class File(NamedTuple):
    """A published file: its address, of one revision where the host has revisions; size in bytes; SHA-256."""

    url: str
    size: int
    sha256: str


class DataSet(NamedTuple):
    """A published data set.

    Attributes:
      folder: where its files go, below FOLDER.
      licence: its licence, as its authors state it.
      files: files to download, by name.
      multihop: its name in the task `multihop`; "" for files that are copied as they are.
      splits: split -> file with its questions, for `multihop`; one of `files`, or a member of an archive among them.
      packed: True if the copies of the files are gzipped.
    """

    folder: str
    licence: str
    files: Mapping[str, File]
    multihop: str = ""
    splits: Mapping[str, str] = {}
    packed: bool = True

    @property
    def paths(self) -> list[str]:
        """Paths of the files that it becomes, relative to FOLDER; those of questions behind that of their passages."""
        if self.multihop:
            names = [f"corpus_{self.multihop}", *(f"questions_{self.multihop}_{split}" for split in self.splits)]
            return [f"{self.folder}/{name}.jsonl.gz" for name in names]
        return [f"{self.folder}/{name}{'.gz' if self.packed else ''}" for name in self.files]


def _files(name: str) -> dict[str, File]:
    """Return the files of a set that the table beside this file lists: set, file, bytes, sha256, url."""
    _, *rows = [line.split("\t") for line in Path(__file__).with_suffix(".tsv").read_text().splitlines()]
    return {file: File(url, int(size), sha256) for of, file, size, sha256, url in rows if of == name}


def _multihop(name: str, multihop: str, licence: str, train: str, dev: str) -> DataSet:
    return DataSet("multihop", licence, _files(name), multihop, {"train": train, "dev": dev})


SETS: Mapping[str, DataSet] = {
    "hotpotqa": _multihop(
        "hotpotqa", "hotpotqa", "CC BY-SA 4.0", "hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json"
    ),
    "2wiki": _multihop("2wiki", "2wikimultihopqa", "Apache-2.0", "train.json", "dev.json"),
    "musique": _multihop(
        "musique", "musique", "CC BY 4.0", "musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl"
    ),
    "gsm8k": DataSet("gsm8k", "MIT", _files("gsm8k")),
    "bfcl": DataSet("bfcl_v4", "Apache-2.0", _files("bfcl")),
    "tokenizers": DataSet("tokenizers", "Apache-2.0", _files("tokenizers"), packed=False),
}
"""The sets by the names of the command line."""


def main(argv: Sequence[str]) -> None:
    """Prepare the sets that are named, or all."""
    folder = argv[1]
    prepare_all(folder, argv[2:] or list(SETS), MIRROR.value, QUESTIONS.value)
    if files.is_remote(folder):
        logging.info("copy it to the disk of each host, and let AGENTR1_DATA name that folder")
    else:
        logging.info("export AGENTR1_DATA=%s", os.path.abspath(folder))


def prepare_all(folder: str, names: Sequence[str], mirror: str, questions: int) -> None:
    """Prepare sets one after the other; see `prepare`. Raises UserError, also where a disk does not do its part."""
    with user_error():
        for name in names:
            check_name(name, SETS, "data set")
    if mirror and not is_http_url(mirror):
        raise UserError(f"--mirror is {mirror!r}; it must be like https://HOST/FOLDER")
    files.check_reachable(folder, "FOLDER")
    remote = files.is_remote(folder)
    work = Path(tempfile.gettempdir(), "agentr1_jax_downloads") if remote else Path(folder, ".downloads")
    try:
        with lock_folder(work):
            for name in names:
                prepare(name, folder, work / name, mirror, questions)
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror or error}"
        if error.errno in DISK_FULL:
            what += "; free some space: the same command goes on where it stopped"
        raise UserError(what) from error


def prepare(name: str, folder: str, work: Path, mirror: str, questions: int) -> None:
    """Download one data set, convert it and move it into `folder`; do nothing where that is done already.

    Args:
      name: a key of SETS.
      folder: FOLDER, on a disk or in a bucket.
      work: folder on a disk for downloads and what is made of them; removed at the end.
      mirror: address with the files as `mirror/SET/FILE`; "" for the official addresses.
      questions: see `write_multihop`.

    Raises:
      UserError: a file is not to be had or is another one, a disk is full, or `folder` holds a file of other origin.
    """
    data, record = SETS[name], os.path.join(folder, RECORD)
    questions = questions if data.multihop else 0
    origin = {each: file._asdict() for each, file in data.files.items()}
    known = _read_record(record)
    mine = known.get(name, {})
    there = {path: _size(os.path.join(folder, path)) for path in data.paths}
    if mine.get("written") == there and mine["files"] == origin and mine["questions"] == questions:
        logging.info("%s: is there", name)
        return
    for path, found in there.items():
        if found is not None and path not in mine.get("written", {}):
            raise UserError(
                f"{os.path.join(folder, path)}: this file is not from this command, by {RECORD}, and is not replaced; "
                "choose another FOLDER or move the file away"
            )
    size = sum(file.size for file in data.files.values())
    logging.info("%s: %.1f MB to download; licence: %s", name, size / 1e6, data.licence)
    with make_progress() as progress:
        for each, file in data.files.items():
            (work / each).parent.mkdir(parents=True, exist_ok=True)
            url = f"{mirror.rstrip('/')}/{name}/{urllib.parse.quote(each)}" if mirror else file.url
            download(file._replace(url=url), work / each, progress)
    logging.info("%s: converting", name)
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    for archive in work.glob("*.zip"):
        unpack(archive, {*data.splits.values(), "id_aliases.json"})
    counts = write_multihop(data, work, out, questions) if data.multihop else copy_files(data, work, out)
    written = {path: _size(os.fspath(out / path)) for path in data.paths}
    mine = {"licence": data.licence, "files": origin, "questions": questions, "counts": counts, "written": written}
    with files.atomic_write(record) as record_file:
        json.dump({**known, name: mine}, record_file, indent=1)
    for path in data.paths:  # After the record: a start after a kill in between finds them to be ours, and incomplete.
        _move(out / path, os.path.join(folder, path))
    shutil.rmtree(work)
    logging.info("%s: %s", name, ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "is there")


def _read_record(path: str) -> dict[str, Any]:
    if not files.exists(path):
        return {}
    try:
        return dict(json.loads(files.read_bytes(path)))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not what this command writes ({error}); choose another FOLDER") from error


def _size(path: str) -> int | None:
    """Return the size of a file in bytes; None if there is none."""
    where = files.path(path)
    return int(where.stat().length) if where.exists() else None


def _move(source: Path, to: str) -> None:
    if files.is_remote(to):
        files.copy(source, to)
    else:
        Path(to).parent.mkdir(parents=True, exist_ok=True)
        source.replace(to)


def make_progress() -> bars.Progress:
    """Return the bars of downloads."""
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn())
    return bars.Progress(*columns, bars.TransferSpeedColumn(), bars.TimeRemainingColumn())


def download(file: File, path: Path, progress: bars.Progress) -> None:
    """Download a file to `path`, unless it is there, and check it; what `path.partial` holds is not asked for again.

    Raises:
      RetryableError: the server is away, busy, or drops the connection again and again.
      UserError: it has no such file, or another one.
    """
    partial = path.with_name(f"{path.name}.partial")
    bar = progress.add_task(path.name, total=file.size)
    failures = 0
    while not path.exists():
        before = partial.stat().st_size if partial.exists() else 0
        if before >= file.size:
            partial.replace(path)
            break
        _check_space(path.parent, file.size - before)
        progress.update(bar, completed=before)
        try:
            _append_rest(file, partial, lambda done: progress.update(bar, completed=done))
        except (httpx.RequestError, RetryableError) as error:
            after = partial.stat().st_size if partial.exists() else 0
            failures = 1 if after > before else failures + 1
            if failures == ATTEMPTS:
                raise RetryableError(
                    f"{file.url}: {type(error).__name__}: {error}; {after:,} of {file.size:,} bytes are in {partial}, "
                    f"and the same command goes on there; or name a --mirror, or put the file at {path} yourself"
                ) from error
            time.sleep(retry_pause(PAUSE, failures))
    progress.update(bar, completed=file.size)
    size, sha256 = path.stat().st_size, _sha256(path)
    if (size, sha256) != (file.size, file.sha256):
        wrong = path.with_name(f"{path.name}.wrong")
        path.replace(wrong)
        raise UserError(
            f"{file.url}: not the published file: {size:,} bytes with the SHA-256 {sha256}, not {file.size:,} bytes "
            f"with {file.sha256}; it is kept as {wrong}, and the same command downloads it again"
        )


def _append_rest(file: File, partial: Path, show: Any) -> None:
    """Append to `partial` what it lacks of a file; from the start where the server knows no ranges.

    Raises:
      httpx.RequestError, RetryableError: another attempt may bring more.
      UserError: the server has no such file, or one of another size.
    """
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with httpx.stream("GET", file.url, headers=headers, follow_redirects=True, timeout=30) as response:
        status = response.status_code
        if status == 429 or status >= 500:
            raise RetryableError(f"status {status}")
        if status not in (200, 206):
            raise UserError(f"{file.url}: status {status}, there is no such file; name a --mirror that has it")
        start = have if status == 206 else 0
        rest = response.headers.get("Content-Length")
        if rest is not None and start + int(rest) != file.size:
            raise UserError(
                f"{file.url}: {start + int(rest):,} bytes where {file.size:,} were published, so it is another file, "
                "or a page in its place; name a --mirror that has it"
            )
        with open(partial, "ab" if start else "wb") as out:
            for part in response.iter_raw():
                out.write(part)
                show(out.tell())
                if out.tell() > file.size:
                    return
    if partial.stat().st_size < file.size:
        raise RetryableError("the answer ended early")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: {free / 1e9:.2f} GB are free, and {needed / 1e9:.2f} GB are needed; free some space: the same "
            "command goes on where it stopped"
        )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, names: Iterable[str]) -> None:
    """Unpack the members with these names, whatever folder of the archive they are in, beside it."""
    with zipfile.ZipFile(archive) as packed:
        members = [each for each in packed.infolist() if os.path.basename(each.filename) in names]
        _check_space(archive.parent, sum(each.file_size for each in members))
        for member in members:
            with packed.open(member) as source, open(archive.parent / os.path.basename(member.filename), "wb") as out:
                shutil.copyfileobj(source, out, CHUNK)


def copy_files(data: DataSet, work: Path, out: Path) -> dict[str, int]:
    """Copy the files of a set from `work` to `out`; return no counts."""
    for name, path in zip(data.files, data.paths, strict=True):
        with open(work / name, "rb") as file, _create(out / path) as copy:
            shutil.copyfileobj(file, copy, CHUNK)
    return {}


def write_multihop(data: DataSet, work: Path, out: Path, questions: int) -> dict[str, int]:
    """Write questions and passages as `tasks/multihop` reads them; return counts of them and of what is missing.

    The corpus is made of the contexts of the questions that are kept, passages of equal title and text once.

    Args:
      data: one of the multi-hop sets.
      work: folder of its downloads.
      out: folder to write to.
      questions: questions to keep of each split, those whose ids have the lowest hashes; 0 for all.
    """
    counts: collections.Counter[str] = collections.Counter()
    passages: set[str] = set()
    corpus_path, *paths = data.paths
    with _create(out / corpus_path) as corpus:
        for (split, name), path in zip(data.splits.items(), paths, strict=True):
            found: Iterable[Question] = read_questions(work / name, counts)
            if questions:
                found = heapq.nsmallest(questions, found, key=lambda q: hashlib.sha256(q.row["id"].encode()).digest())
            with _create(out / path) as file:
                for question in found:
                    counts[f"{split} questions"] += 1
                    _write_line(file, _question_record(question, split))
                    for passage in question.passages:
                        if passage.id not in passages:
                            passages.add(passage.id)
                            _write_line(corpus, vars(passage))
    return {**counts, "passages": len(passages)}


def _question_record(question: Question, split: str) -> dict[str, Any]:
    row = dict(question.row)
    answer, *aliases = row.pop("answers")
    renamed = {"type": row.pop("kind"), "answer": answer, "answer_aliases": aliases, "orig_split": split}
    return {**row, **renamed, "context_ids": [passage.id for passage in question.passages]}


@contextlib.contextmanager
def _create(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file to write bytes to; one whose name ends in `.gz` is compressed, equal bytes to equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as raw:
        if path.suffix != ".gz":
            yield raw
            return
        with gzip.GzipFile("", "wb", 4, raw, mtime=0) as packed:
            yield cast(IO[bytes], packed)


def _write_line(file: IO[bytes], record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


if __name__ == "__main__":
    configs.run_main(main, ["FOLDER", "[SET...]"])

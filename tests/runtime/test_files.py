"""Files of run folders: local and in a bucket they behave alike, and appear whole or not at all."""

from __future__ import annotations

import importlib.util
import os

import pytest

from agentr1_jax import files
from agentr1_jax.errors import UserError
from experiments import fetch_data


@pytest.fixture(params=["local", "bucket"])
def folder(request, tmp_path):
    return str(tmp_path / "run") if request.param == "local" else f"{request.getfixturevalue('bucket')}/run"


def test_what_is_published_is_read_listed_moved_and_removed(folder):
    assert files.list_names(folder) == [] and not files.exists(folder) and not files.is_folder(folder)
    page, packed = os.path.join(folder, "page.txt"), os.path.join(folder, "below", "packed.gz")
    with files.atomic_write(page, errors="replace", newline="") as out:
        out.write("é\r\n\ud800")
    with files.atomic_write(packed, "wb") as out:
        out.write(b"\0" * 300_000)
    assert files.read_bytes(page) == "é\r\n?".encode()
    assert files.list_names(folder) == ["below", "page.txt"]
    assert files.file_sizes(folder) == {"page.txt": 5, "below/packed.gz": 300_000}
    assert files.is_folder(folder) and not files.is_file(folder)
    assert files.is_file(page) and files.exists(page) and not files.is_folder(page)

    files.copy(packed, page)
    assert files.file_sizes(folder)["page.txt"] == 300_000
    moved = os.path.join(folder, "damaged", "1.0")
    files.move_folder(os.path.join(folder, "below"), moved)
    assert files.file_sizes(folder) == {"page.txt": 300_000, "damaged/1.0/packed.gz": 300_000}
    files.remove(page)
    assert not files.exists(page) and files.list_names(folder) == ["damaged"]
    with pytest.raises(FileNotFoundError) as raised, files.open_bytes(page):
        pass
    assert raised.value.filename == page


def test_checksums_are_those_of_google_cloud_storage_on_disks_too(folder):
    long = b"1" * (2 * files.READ_BYTES + 1)
    for name, content in (("check", b"123456789"), ("below/long", long), ("below/none", b"")):
        with files.atomic_write(os.path.join(folder, name), "wb") as out:
            out.write(content)
    sums = {"check": "4waSgw==", "below/long": "EtU4OA==", "below/none": "AAAAAA=="}  # The first: of the standard.
    assert files.file_checksums(folder, sums) == sums


def test_what_breaks_off_leaves_the_old_file(folder):
    path = os.path.join(folder, "file")
    with files.atomic_write(path) as out:
        out.write("old")
    with pytest.raises(KeyboardInterrupt), files.atomic_write(path) as out:
        out.write("new")
        raise KeyboardInterrupt
    assert files.read_bytes(path) == b"old" and files.list_names(folder) == ["file"]


def test_what_writes_to_local_folders_alone_gets_one(folder):
    with pytest.raises(ValueError), files.local_folder(os.path.join(folder, "profile")) as place:
        os.makedirs(os.path.join(place, "a", "b"))
        with open(os.path.join(place, "a", "b", "trace"), "wb") as out:
            out.write(b"12345")
        raise ValueError
    assert files.file_sizes(folder) == {"profile/a/b/trace": 5}


def test_a_listing_is_never_out_of_date(bucket):
    """Others write there too, by other ways."""
    import tensorstore

    name = bucket.removeprefix(files.PREFIX)
    root, _, below = name.partition("/")
    with files.atomic_write(f"{bucket}/one") as out:
        out.write("1")
    assert files.list_names(bucket) == ["one"]
    store = tensorstore.KvStore.open({"driver": "gcs", "bucket": root, "path": f"{below}/"}).result()
    store.write(b"two", b"2").result()
    assert files.list_names(bucket) == ["one", "two"] and files.file_sizes(bucket) == {"one": 1, "two": 1}
    store.write(b"one", None).result()
    assert files.list_names(bucket) == ["two"] and not files.exists(f"{bucket}/one")


def test_an_object_that_stands_for_a_folder_is_nothing_in_it(bucket):
    """The console of Google Cloud makes such objects."""
    from google.cloud import storage

    root, _, below = bucket.removeprefix(files.PREFIX).partition("/")
    storage.Client().bucket(root).blob(f"{below}/").upload_from_string(b"")
    assert files.list_names(bucket) == []


def test_places_are_compared_whatever_their_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert files.same_path("run", tmp_path / "link" / "run") and not files.same_path("run", "other")
    assert files.same_path("gs://b/run/", "gs://b/run") and not files.same_path("gs://b/run", "run")
    assert files.absolute_path("gs://b/run/x") == "gs://b/run/x" and files.absolute_path("run") == str(tmp_path / "run")


def test_a_bucket_without_the_extra_is_refused_by_its_name(monkeypatch):
    files.prepare.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for use in (files.exists, files.list_names, files.read_bytes):
        with pytest.raises(UserError, match=r"gs:// paths need gcsfs.*pip install 'agentr1_jax\[gcs\]'"):
            use("gs://b/run")
    with pytest.raises(UserError, match=r"^run_dir: gs:// paths need"):
        files.check_reachable("gs://b/run", "run_dir")
    files.check_reachable("/nowhere", "run_dir")


def test_a_bucket_that_does_not_answer_is_said(bucket, monkeypatch):
    def refused(path):
        raise OSError("Forbidden")

    files.check_reachable(bucket, "run_dir")
    monkeypatch.setattr("etils.epath.gpath._GPath.exists", refused)
    with pytest.raises(UserError, match=r"run_dir: gs://.* cannot be reached \(OSError: Forbidden\).*credentials"):
        files.check_reachable(bucket, "run_dir")


@pytest.mark.nightly
def test_a_data_folder_is_copied_to_a_worker_once(bucket, tmp_path):
    """What launch/worker.sh does with --data=gs://...; an empty folder is a mistake of the user."""
    here = tmp_path / "data"
    with pytest.raises(UserError, match=r"--data=gs://.*/data: no such folder in the bucket, or an empty one"):
        fetch_data.main(["", f"{bucket}/data", str(here)])
    for name in ("multihop/a.jsonl", "tokenizers/b/tokenizer.json"):
        with files.atomic_write(f"{bucket}/data/{name}") as out:
            out.write(name)
    fetch_data.main(["", f"{bucket}/data", str(here)])
    assert (here / "tokenizers/b/tokenizer.json").read_text() == "tokenizers/b/tokenizer.json"
    (here / "multihop/a.jsonl").write_text("MULTIHOP/a.jsonl")  # As long: it is taken for the same file.
    (here / "tokenizers/b/tokenizer.json").write_text("half")
    fetch_data.main(["", f"{bucket}/data", str(here)])
    assert (here / "multihop/a.jsonl").read_text() == "MULTIHOP/a.jsonl"
    assert (here / "tokenizers/b/tokenizer.json").read_text() == "tokenizers/b/tokenizer.json"

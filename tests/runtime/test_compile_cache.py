"""Compiled programs survive: what is found, what is compiled again, and what a bad folder or file does."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from small_runs import ROOT, UNOPTIMISED, command

from agentr1_jax.runtime import compile_cache
from agentr1_jax.runtime.compile_cache import CompileCounter, cached_jit


@pytest.mark.parametrize(
    ("setting", "run_dir", "folder"),
    [
        ("{runs}/.programs", "/shared/runs/mine/", "/shared/runs/.programs"),
        ("{runs}/.programs", "mine", "./.programs"),
        ("{runs}/.programs", "gs://bucket/runs/mine", "gs://bucket/runs/.programs"),
        ("/scratch/programs", "runs/mine", "/scratch/programs"),
    ],
)
def test_the_folder_lies_beside_the_runs(setting: str, run_dir: str, folder: str):
    assert compile_cache.cache_folder(setting, run_dir) == folder


@pytest.fixture
def folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder in which this process keeps its programs as those other than 0 do; JAX's cache is off."""
    monkeypatch.setattr(compile_cache, "_folder", [str(tmp_path)])
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # It remembers from the first compilation whether it is used.
    yield tmp_path
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def mesh_of(*devices: int) -> Mesh:
    return Mesh(np.array([jax.devices()[i] for i in devices]), ("data",), axis_types=(AxisType.Auto,))


def make(mesh: Mesh, factor: float = 3.0):
    """A program with a donated argument, and such an argument."""
    lies = NamedSharding(mesh, P("data"))

    def scaled(x, table):
        return factor * x, {"sum": x.sum() + table.sum()}

    program = cached_jit(scaled, mesh, donate_argnums=0, out_shardings=(lies, NamedSharding(mesh, P())))
    return program, jax.device_put(np.arange(8.0, dtype=np.float32), lies)


def call(program, x, rows: int = 2) -> tuple[list[float], float, int, int]:
    """What it returns, how many programs were compiled for that, and how many were found."""
    counter = CompileCounter()
    y, more = program(x, np.ones((rows, 2), np.float32))
    assert x.is_deleted(), "it was to be donated"
    assert y.sharding.device_set == x.sharding.device_set
    return np.asarray(y).tolist(), float(more["sum"]), counter.count - counter.loaded, counter.loaded


def test_a_program_is_compiled_once_for_all_starts(folder):
    mesh = mesh_of(2, 3)
    expected = [3.0 * i for i in range(8)]
    program, x = make(mesh)
    assert call(program, x) == (expected, 32.0, 1, 0)
    assert call(program, make(mesh)[1]) == (expected, 32.0, 0, 0)
    assert call(*make(mesh)) == (expected, 32.0, 0, 1)
    assert call(make(mesh)[0], make(mesh)[1], rows=3) == (expected, 34.0, 1, 0)
    assert len(list(folder.iterdir())) == 2 and all(p.name.startswith("scaled-") for p in folder.iterdir())


def test_other_programs_and_other_devices_are_other_files(folder, monkeypatch):
    for mesh, factor in ((mesh_of(0, 1), 3.0), (mesh_of(0, 1), 5.0), (mesh_of(2, 3), 3.0), (mesh_of(1, 0), 3.0)):
        assert call(*make(mesh, factor)) == ([factor * i for i in range(8)], 32.0, 1, 0)
    monkeypatch.setattr(compile_cache, "_cpu_features", lambda: "another CPU")
    assert call(*make(mesh_of(0, 1)))[2:] == (1, 0)
    assert len(list(folder.iterdir())) == 5


def flip(stored: bytes) -> bytes:
    middle = len(stored) // 2
    return stored[:middle] + bytes([stored[middle] ^ 1]) + stored[middle + 1 :]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], flip, lambda _: zlib.compress(b"no program")])
def test_a_damaged_file_is_stepped_over_and_replaced(folder, caplog, damage):
    mesh = mesh_of(0, 1)
    right = call(*make(mesh))[:2]
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert call(*make(mesh)) == (*right, 1, 0)
    assert "cannot be used" in caplog.text and str(path) in caplog.text
    assert call(*make(mesh)) == (*right, 0, 1)


def test_every_compilation_is_counted_and_nothing_else():
    x = jnp.arange(7.0)
    jax.block_until_ready(x)
    counter = CompileCounter()
    f = jax.jit(lambda x: x * 3 + 1)
    f(x)
    assert counter.count == 1 and (counter.seconds > 0 or counter.loaded == 1)
    f(x)
    assert counter.count == 1
    f(np.ones((2, 3), np.float32))
    assert counter.count == 2


def test_what_cannot_be_kept_can_be_run(folder, monkeypatch, caplog):
    (folder / "file").write_text("")
    monkeypatch.setattr(compile_cache, "_folder", [str(folder / "file" / "programs")])
    assert call(*make(mesh_of(0, 1)))[2:] == (1, 0)
    assert "scaled is not kept in" in caplog.text


def test_process_0_and_gpus_leave_it_to_jax(folder, monkeypatch):
    plain = type(jax.jit(len))
    assert not isinstance(make(mesh_of(0, 1))[0], plain)
    monkeypatch.setattr(compile_cache, "_folder", [])
    assert isinstance(make(mesh_of(0, 1))[0], plain)


CHILD = """
import sys, jax
from agentr1_jax.runtime import compile_cache
from agentr1_jax.runtime.compile_cache import CompileCounter
counter = CompileCounter()
compile_cache.enable(sys.argv[1])
assert float(jax.jit(lambda x: x + 1.5)(1.0)) == 2.5
print(counter.loaded, counter.count - counter.loaded)
"""


def start(folder) -> tuple[list[int], str]:
    """How many programs a process that keeps them in a folder found and compiled, and its warnings."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, folder], cwd=ROOT, capture_output=True, text=True, timeout=300, env=own_cache()
    )
    assert done.returncode == 0, done.stderr
    return [int(n) for n in done.stdout.split()], done.stderr


def own_cache() -> dict[str, str]:
    own = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "", "VENV_PYTHON": sys.executable}
    return os.environ | UNOPTIMISED | own


def test_a_damaged_file_of_jax_is_replaced(tmp_path):
    assert start(tmp_path / "programs")[0] == [0, 1]
    (path,) = (tmp_path / "programs").glob("*-cache")
    path.write_bytes(path.read_bytes()[:-20])
    found, warned = start(tmp_path / "programs")
    assert found == [0, 1] and "Error reading persistent compilation cache entry" in warned
    assert start(tmp_path / "programs") == ([1, 0], "")


def test_a_folder_that_cannot_be_made_is_warned_of(tmp_path):
    (tmp_path / "file").write_text("")
    found, warned = start(tmp_path / "file" / "programs")
    assert found == [0, 1] and f"compiled programs cannot be kept in {tmp_path}/file/programs" in warned


def programs(output: str) -> dict[int, tuple[int, int]]:
    """Of each process: programs of its start that were found, and that were compiled."""
    said = re.findall(r"^(?:\[(\d)\] )?.*programs of this start: (\d+) from the cache, (\d+) compiled", output, re.M)
    return {int(process or 0): (int(found), int(compiled)) for process, found, compiled in said}


@pytest.mark.slow
def test_a_second_run_of_two_processes_finds_what_was_kept(tmp_path):
    """Process 0 compiles nothing; process 1 small programs alone, which no `cached_jit` made."""
    starts, files = [], []
    for name in ("one", "two"):
        arguments = [
            "bash",
            "launch/local.sh",
            "--processes=2",
            *command("quickstart", tmp_path / name, warm_start__updates=0, learner__rows=4),
        ]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=500, env=own_cache())
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        starts.append(programs(done.stdout))
        files.append({path.name for path in (tmp_path / ".programs").glob("*-program")})
    assert files[0] == files[1] and {name.partition("-")[0] for name in files[0]} >= {"update", "prefill", "decode"}
    assert starts[1][0][1] == 0 and starts[1][1][0] == len(files[0])
    with open(tmp_path / "two" / "summary.json", encoding="utf-8") as summary:
        assert json.load(summary)["recompiles_after_warmup"] == 0

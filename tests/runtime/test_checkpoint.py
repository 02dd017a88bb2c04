"""Checkpoints: what was saved comes back, also on another mesh, also when its buffers were donated meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pair
import pytest
import tiny

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import OptimizerConfig
from agentr1_jax.learner.optimizer import make_optimizer
from agentr1_jax.learner.update import init_state
from agentr1_jax.policy.params import init_params
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.checkpoint import COMMITTED, INVENTORY, Checkpoints, find_newest_intact, sharded_shapes
from agentr1_jax.train.restore import newest_checkpoint

OPTIMIZER = make_optimizer(OptimizerConfig())
RECORD = {"phase": "rl", "update": 7, "seconds": 12.5, "results": {"em_before": 0.25}, "totals": {}, "name": "é"}


def make_state(key):
    return init_state(init_params(tiny.POLICY, key, critic="shared_trunk"), OPTIMIZER)


def state_on(mesh):
    """A state on a mesh, and what to restore it into."""
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    layout = shardings(shapes, mesh)
    return jax.jit(make_state, out_shardings=layout)(jax.random.key(0)), sharded_shapes(shapes, layout)


def save(folder, step, state, record, keep=3):
    checkpoints = Checkpoints(folder, keep)
    checkpoints.save(step, state, record)
    checkpoints.close()


def restore(folder, like):
    with contextlib.closing(Checkpoints(folder, keep=3)) as checkpoints:
        return checkpoints.restore(like)


def assert_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)


def test_a_state_comes_back_on_its_own_mesh_and_on_another(tmp_path):
    state, like = state_on(tiny.mesh(2, 2, 2))
    assert restore(tmp_path, like) is None
    save(tmp_path, 3, state, RECORD)
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    for mesh in (tiny.mesh(2, 2, 2), tiny.mesh(8), tiny.mesh()):
        like = sharded_shapes(shapes, shardings(shapes, mesh))
        restored, record = restore(tmp_path, like)
        assert record == RECORD
        assert_equal(restored, state)
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, like)
        assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_a_state_may_be_donated_while_it_is_being_written(tmp_path):
    big = jnp.arange(4_000_000, dtype=jnp.float32)
    expected = np.array(big)
    like = {"x": jax.ShapeDtypeStruct(big.shape, big.dtype, sharding=big.sharding)}
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"x": big}, {})
    assert float(overwrite(big)[5]) == -1
    checkpoints.close()
    np.testing.assert_array_equal(restore(tmp_path, like)[0]["x"], expected)


def numbers(value=0.0):
    """A small state whose values tell which checkpoint it came from, and what to restore it into."""
    state = {"a": jnp.full((30, 100), value), "b": {"c": jnp.full(7, value)}}
    return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save_steps(folder, steps=(1, 2, 3)):
    checkpoints = Checkpoints(folder, keep=3)
    for step in steps:
        checkpoints.save(step, numbers(float(step))[0], {"step": step})
    checkpoints.close()


def restore_step(folder):
    state, record = restore(folder, numbers()[1])
    assert all((np.asarray(leaf) == record["step"]).all() for leaf in jax.tree.leaves(state))
    return record["step"]


def test_the_newest_are_kept_and_the_newest_is_restored(tmp_path):
    save_steps(tmp_path, (1, 2, 4, 5))
    save(tmp_path, 5, numbers(-1.0)[0], {"step": -1})  # It exists already.
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()) == [2, 4, 5]
    assert restore_step(tmp_path) == 5


def flip(path, bit):
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        flip(path, 4 * path.stat().st_size)
    else:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def test_whatever_file_of_the_newest_is_damaged_the_one_before_serves_or_nothing_is_lost(tmp_path, caplog):
    save_steps(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "3"
    names = sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file())
    # A checkpoint of an early version has no inventory, and is read.
    ways = ("missing", "truncated", "flipped")
    cases = [(name, ways[i % 3]) for i, name in enumerate(names) if name != INVENTORY]
    for number, (name, how) in enumerate([*cases, *((INVENTORY, how) for how in ways)]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", folder)
        damage(folder / "checkpoints" / "3" / name, how)
        caplog.clear()
        step = restore_step(folder)
        if "/" in name or (name == INVENTORY and how != "missing"):
            assert step == 2 and f"checkpoint 3 of {folder}" in caplog.text, name
            assert name in caplog.text or (name, how) == (INVENTORY, "flipped")  # It may be taken at its word.
            assert (folder / "checkpoints.damaged" / "3.0").is_dir()
        else:
            assert step == 3, name
    save_steps(folder, (3,))  # In place of the damaged one.
    assert restore_step(folder) == 3


@pytest.mark.slow
def test_two_hundred_single_bits_are_found(tmp_path):
    """Wherever they are: parameters, optimizer state, record of the progress, Orbax's own files."""
    state, like = state_on(tiny.mesh(2, 2, 2))
    for step in (1, 2):
        save(tmp_path, step, state, RECORD)
    newest = tmp_path / "checkpoints" / "2"
    paths = sorted(path for path in newest.rglob("*") if path.is_file() and path.parent != newest)
    sizes = np.asarray([path.stat().st_size for path in paths])
    rng = np.random.default_rng(0)
    chosen = [*range(len(paths)), *rng.choice(len(paths), 200 - len(paths), p=sizes / sizes.sum())]
    for path, size in ((paths[i], int(sizes[i])) for i in chosen):
        bit = int(rng.integers(8 * size))
        flip(path, bit)
        assert find_newest_intact(str(newest.parent)) == (1, [2]), (path, bit)
        flip(path, bit)
    assert find_newest_intact(str(newest.parent)) == (2, [])
    flip(paths[int(sizes.argmax())], 4 * int(sizes.max()))
    restored, _ = restore(tmp_path, like)
    assert_equal(restored, state)
    assert (tmp_path / "checkpoints.damaged" / "2.0").is_dir()


TWO_PROCESSES = """
import contextlib, pathlib, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from agentr1_jax.runtime import processes
processes.initialize()
from test_checkpoint import Checkpoints, flip
values = {step: np.random.default_rng(step).normal(size=(400, 100)).astype(np.float32) for step in (1, 2)}
sharding = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x"))
like = {"a": jax.ShapeDtypeStruct((400, 100), np.float32, sharding=sharding)}
run = pathlib.Path(sys.argv[1])
with contextlib.closing(Checkpoints(run, 3)) as checkpoints:
    for step in (1, 2):
        a = jax.make_array_from_callback((400, 100), sharding, lambda place: values[step][place])
        checkpoints.save(step, {"a": a}, {"step": step})
processes.barrier()
if processes.process_index() == 0:
    flip(max(run.glob("checkpoints/2/state/ocdbt.process_1/d/*"), key=lambda path: path.stat().st_size), 1000)
processes.barrier()
with contextlib.closing(Checkpoints(run, 3)) as checkpoints:
    state, record = checkpoints.restore(like)
assert all((shard.data == values[1][shard.index]).all() for shard in state["a"].addressable_shards)
print(record["step"])
"""


@pytest.mark.slow
def test_files_of_every_process_are_checked(tmp_path):
    assert [said.split()[-1] for said in pair.run_two(TWO_PROCESSES, str(tmp_path))] == ["1", "1"]


def test_checkpoints_without_checksums_are_read_and_it_is_said(tmp_path, caplog):
    """Those of version 0.2.0."""
    save_steps(tmp_path)
    path = tmp_path / "checkpoints" / "3" / INVENTORY
    path.write_text(json.dumps({name: size for name, (size, _) in json.loads(path.read_text()).items()}))
    caplog.set_level("INFO")
    assert restore_step(tmp_path) == 3 and "has no checksums" in caplog.text
    damage(next(tmp_path.glob("checkpoints/3/state/d/*")), "truncated")
    assert restore_step(tmp_path) == 2


def test_two_damaged_ones_and_all_damaged(tmp_path):
    save_steps(tmp_path)
    for step in (3, 2):
        damage(tmp_path / "checkpoints" / str(step) / "record" / "metadata", "missing")
    assert find_newest_intact(str(tmp_path / "checkpoints")) == (1, [3, 2])
    assert restore_step(tmp_path) == 1
    damage(tmp_path / "checkpoints" / "1" / "record" / "metadata", "missing")
    with pytest.raises(UserError, match=r"all checkpoints are damaged \(\[1\]\)"):
        restore(tmp_path, numbers()[1])


def test_a_state_of_another_shape_is_told_from_damage(tmp_path):
    state = {"a": jnp.ones((30, 100))}  # One leaf: Orbax leaves the reads of others behind when one fails.
    save(tmp_path, 3, state, {})
    for name, shape in (("d", (30, 100)), ("a", (4, 5))):
        like = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=state["a"].sharding)}
        with pytest.raises(UserError, match=r"checkpoints/3: cannot be read .* another version of the code"):
            restore(tmp_path, like)
    assert not (tmp_path / "checkpoints.damaged").exists()


def test_checkpoints_in_a_bucket_come_back_and_damaged_ones_are_kept_aside(bucket):
    save_steps(bucket, (1, 2, 3, 4))
    folder = f"{bucket}/checkpoints"
    assert files.list_names(folder) == ["2", "3", "4"] and restore_step(bucket) == 4
    expected = json.loads(files.read_bytes(f"{folder}/4/{INVENTORY}"))
    sizes = {name: size for name, (size, _) in expected.items()}
    assert sizes.items() <= files.file_sizes(f"{folder}/4").items() and any(n.startswith("state/") for n in expected)

    record = files.read_bytes(f"{folder}/4/record/metadata")
    with files.atomic_write(f"{folder}/4/record/metadata", "wb") as out:
        out.write(record.replace(b"4", b"5"))
    part = next(name for name in files.file_sizes(f"{folder}/3") if name.startswith("state/ocdbt"))
    files.remove(f"{folder}/3/{part}")
    assert find_newest_intact(folder) == (2, [4, 3])
    assert restore_step(bucket) == 2
    assert files.list_names(folder) == ["2"] and files.list_names(f"{folder}.damaged") == ["3.0", "4.0"]
    save_steps(bucket, (3, 4))
    assert restore_step(bucket) == 4

    files.remove(f"{folder}/4/{COMMITTED}")  # As if it was still being written.
    assert find_newest_intact(folder) == (3, []) and newest_checkpoint(bucket) == f"{folder}/3"
    assert restore_step(bucket) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        rng = np.random.default_rng(0)
        state = {"x": jnp.asarray(rng.normal(size=300_000), jnp.float32)}  # 1.2 MB, which do not compress.
        like = {"x": jax.ShapeDtypeStruct(state["x"].shape, jnp.float32, sharding=state["x"].sharding)}
        checkpoints = Checkpoints(tmp_path, keep=3)
        checkpoints.save(1, state, {"step": 1})
        with pytest.raises(UserError, match="the disk is full, and the checkpoint under way is lost"):
            checkpoints.save(2, state, {"step": 2})
            checkpoints.close()
        restored, record = restore(tmp_path, like)
        assert record == {"step": 1}
        assert_equal(restored, state)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)

"""Checkpoints: what was saved comes back, also on another mesh, also when its buffers were donated meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import OptimizerConfig
from agentr1_jax.learner.optimizer import make_optimizer
from agentr1_jax.learner.update import init_state
from agentr1_jax.policy.params import init_params
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.checkpoint import INVENTORY, Checkpoints, find_newest_intact, sharded_shapes

OPTIMIZER = make_optimizer(OptimizerConfig())
RECORD = {"phase": "rl", "update": 7, "seconds": 12.5, "results": {"em_before": 0.25}, "totals": {}, "name": "é"}


def make(key):
    return init_state(init_params(tiny.POLICY, key, critic="shared_trunk"), OPTIMIZER)


def state_on(mesh, seed=0):
    """A state on a mesh, and what to restore it into."""
    shapes = jax.eval_shape(make, jax.random.key(0))
    layout = shardings(shapes, mesh)
    return jax.jit(make, out_shardings=layout)(jax.random.key(seed)), sharded_shapes(shapes, layout)


def assert_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(state_on(tiny.mesh())[1]) is None
    checkpoints.close()


def test_a_state_comes_back_on_its_own_mesh_and_on_another(tmp_path):
    state, like = state_on(tiny.mesh(2, 2, 2))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(3, state, RECORD)
    checkpoints.close()
    for mesh in (tiny.mesh(2, 2, 2), tiny.mesh(8), tiny.mesh()):
        like = state_on(mesh)[1]
        again = Checkpoints(tmp_path, keep=2)
        restored, record = again.restore(like)
        again.close()
        assert record == RECORD
        assert_equal(restored, state)
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, like)
        assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_the_newest_are_kept_and_the_newest_is_restored(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 5):
        checkpoints.save(step, {"x": jnp.full(3, step)}, {"step": step})
    checkpoints.save(5, {"x": jnp.zeros(3, jnp.int32)}, {"step": -1})
    checkpoints.close()
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal())
    assert kept == [2, 5]
    again = Checkpoints(tmp_path, keep=2)
    restored, record = again.restore({"x": jax.ShapeDtypeStruct((3,), jnp.int32, sharding=jnp.zeros(3).sharding)})
    again.close()
    assert record == {"step": 5} and restored["x"].tolist() == [5, 5, 5]


def test_a_state_may_be_donated_while_it_is_being_written(tmp_path):
    big = jnp.arange(4_000_000, dtype=jnp.float32)
    expected = np.array(big)
    like = {"x": jax.ShapeDtypeStruct(big.shape, big.dtype, sharding=big.sharding)}
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"x": big}, {})
    assert float(overwrite(big)[5]) == -1
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    restored, _ = again.restore(like)
    again.close()
    np.testing.assert_array_equal(restored["x"], expected)


def test_a_state_of_another_shape_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": jnp.zeros((4, 3))}, {})
    sharding = jnp.zeros(1).sharding
    with pytest.raises(UserError, match="cannot be read"):
        checkpoints.restore({"x": jax.ShapeDtypeStruct((4, 5), jnp.float32, sharding=sharding)})
    with pytest.raises(UserError, match="cannot be read"):
        checkpoints.restore({"y": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=sharding)})
    checkpoints.close()


def numbers():
    """A small state whose values tell which checkpoint it came from, and what to restore it into."""
    state = {"a": jnp.ones((30, 100)), "b": {"c": jnp.ones(7)}}
    return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def write_three(folder, steps=(1, 2, 3)):
    state, like = numbers()
    checkpoints = Checkpoints(folder, keep=3)
    for step in steps:
        checkpoints.save(step, jax.tree.map(lambda x, s=step: x * s, state), {"step": step})
    checkpoints.close()
    return like


def files_of(folder, step):
    root = folder / "checkpoints" / str(step)
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def damage(path, how):
    if how == "missing":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def restored_step(folder, like):
    checkpoints = Checkpoints(folder, keep=3)
    state, record = checkpoints.restore(like)
    checkpoints.close()
    for leaf in jax.tree.leaves(state):
        assert (np.asarray(leaf) == record["step"]).all()
    return record["step"]


def test_whatever_file_of_the_newest_is_damaged_the_one_before_serves_or_nothing_is_lost(tmp_path, caplog):
    like = write_three(tmp_path / "run")
    for number, name in enumerate(files_of(tmp_path / "run", 3)):
        for how in ("missing", "truncated"):
            folder = tmp_path / f"{how}{number}"
            shutil.copytree(tmp_path / "run", folder)
            damage(folder / "checkpoints" / "3" / name, how)
            caplog.clear()
            step = restored_step(folder, like)
            if "/" in name or (name == INVENTORY and how == "truncated"):
                assert step == 2 and f"checkpoint 3 of {folder}" in caplog.text, name
                assert (folder / "checkpoints.damaged" / "3.0").is_dir()
                assert restored_step(folder, like) == 2
                write_three(folder, (3,))
                assert restored_step(folder, like) == 3
            else:
                assert step == 3, name


def test_two_damaged_ones_and_all_damaged(tmp_path):
    like = write_three(tmp_path)
    for step in (3, 2):
        damage(tmp_path / "checkpoints" / str(step) / "record" / "metadata", "missing")
    assert find_newest_intact(str(tmp_path / "checkpoints")) == (1, [3, 2])
    assert restored_step(tmp_path, like) == 1
    damage(tmp_path / "checkpoints" / "1" / "record" / "metadata", "missing")
    with pytest.raises(UserError, match=r"all checkpoints are damaged \(\[1\]\)"):
        Checkpoints(tmp_path, keep=3).restore(like)


def test_a_state_of_another_shape_is_told_from_damage(tmp_path):
    write_three(tmp_path)
    _, like = numbers()
    other = {"a": like["a"], "d": like["b"]["c"]}
    with pytest.raises(UserError, match=r"checkpoints/3: cannot be read .* another version of the code"):
        Checkpoints(tmp_path, keep=3).restore(other)
    assert not (tmp_path / "checkpoints.damaged").exists()


def test_one_of_an_earlier_version_has_no_inventory_and_is_read(tmp_path):
    like = write_three(tmp_path)
    (tmp_path / "checkpoints" / "3" / INVENTORY).unlink()
    assert restored_step(tmp_path, like) == 3


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
        again = Checkpoints(tmp_path, keep=3)
        restored, record = again.restore(like)
        again.close()
        assert record == {"step": 1}
        assert_equal(restored, state)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)

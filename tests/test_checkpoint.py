"""Checkpoints: what was saved comes back, also on another mesh, also when its buffers were donated meanwhile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agentr1_jax.learner.optimizer import make_optimizer
from agentr1_jax.learner.update import init_state
from agentr1_jax.policy.params import init_params
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.checkpoint import Checkpoints, abstract

OPTIMIZER = make_optimizer(name="adamw", max_grad_norm=1.0, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)
RECORD = {"phase": "rl", "update": 7, "seconds": 12.5, "results": {"em_before": 0.25}, "totals": {}, "name": "é"}


def make(key):
    return init_state(init_params(tiny.POLICY, key, critic="shared_trunk"), OPTIMIZER)


def state_on(mesh, seed=0):
    """A state on a mesh, and what to restore it into."""
    shapes = jax.eval_shape(make, jax.random.key(0))
    layout = shardings(shapes, mesh)
    return jax.jit(make, out_shardings=layout)(jax.random.key(seed)), abstract(shapes, layout)


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
    with pytest.raises(ValueError):
        checkpoints.restore({"x": jax.ShapeDtypeStruct((4, 5), jnp.float32, sharding=sharding)})
    with pytest.raises(ValueError):
        checkpoints.restore({"y": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=sharding)})
    checkpoints.close()

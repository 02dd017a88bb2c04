"""The profiler switch: which batches it names, and traces that end whatever happens."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest

from agentr1_jax.errors import UserError
from agentr1_jax.runtime import monitoring
from agentr1_jax.runtime.monitoring import parse_profile_updates, trace_updates


def test_updates_are_half_open_ranges():
    assert list(parse_profile_updates("3:5")) == [3, 4]
    assert list(parse_profile_updates("0:1")) == [0]
    assert not parse_profile_updates("")


@pytest.mark.parametrize("text", ["3", ":", "3:", ":3", "5:3", "3:3", "-1:3", "a:b", "1:2:3", " 1:2", "1:2\n", "1.0:2"])
def test_malformed_updates_are_the_users_mistake(text):
    with pytest.raises(UserError, match="profile_updates is .*a:b"):
        parse_profile_updates(text)


def traces(folder):
    return sorted(folder.glob("profile/plugins/profile/*/*.xplane.pb"))


def batch():
    jnp.arange(4.0).sum().block_until_ready()


class Spy:
    """Stands in for `jax.profiler` and notes what was begun and ended."""

    ProfileOptions = jax.profiler.ProfileOptions

    def __init__(self):
        self.seen = []

    def trace(self, folder, profiler_options):
        return self._between("trace")

    def StepTraceAnnotation(self, name, step_num):
        return self._between(f"{name} {step_num}")

    @contextlib.contextmanager
    def _between(self, name):
        self.seen.append(f"+{name}")
        try:
            yield
        finally:
            self.seen.append(f"-{name}")


@pytest.mark.parametrize(
    ("batches", "seen"),
    [
        (range(0, 5), ["+trace", "+rl 1", "-rl 1", "+rl 2", "-rl 2", "-trace"]),
        (range(2, 3), ["+trace", "+rl 2", "-rl 2", "-trace"]),
        (range(3, 5), []),
    ],
)
def test_the_trace_covers_the_batches_and_no_more(monkeypatch, tmp_path, batches, seen):
    spy = Spy()
    monkeypatch.setattr(monitoring, "jax", type("jax", (), {"profiler": spy}))
    with trace_updates(tmp_path, range(1, 3), enabled=True) as begin:
        for update in batches:
            begin(update)
            if update == 3:
                assert spy.seen == seen
    assert spy.seen == seen


def test_a_trace_is_written_also_when_the_run_is_stopped(tmp_path):
    with trace_updates(tmp_path / "whole", range(1, 2), enabled=True) as begin:
        for update in range(3):
            begin(update)
            batch()
            assert len(traces(tmp_path / "whole")) == int(update == 2)

    def stopped():
        with trace_updates(tmp_path / "stopped", range(1, 9), enabled=True) as begin:
            for update in range(3):
                begin(update)
                batch()
                if update == 2:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    (found,) = traces(tmp_path / "stopped")
    assert found.stat().st_size > 0
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


@pytest.mark.parametrize(("updates", "enabled"), [(range(0), True), (range(0, 3), False)])
def test_nothing_is_written_unless_asked_for(tmp_path, updates, enabled):
    with trace_updates(tmp_path, updates, enabled) as begin:
        begin(0)
        batch()
    assert not list(tmp_path.iterdir())

import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.metrics import MetricsWriter, read_metrics


def test_records_are_read_back(tmp_path: pathlib.Path) -> None:
    record = {
        "phase": "rl",
        "update": 3,
        "loss": np.float32(0.5),
        "norm": jnp.asarray(2.0),
        "half": jnp.asarray(1.5, jnp.bfloat16),
        "tokens": np.int64(7),
        "skipped": np.bool_(True),
        "parts": {"em": 1.0, "hist": np.arange(2)},
        "bad": float("nan"),
        "worse": jnp.asarray(-jnp.inf),
    }
    with MetricsWriter(tmp_path / "run", next_index=0) as writer:
        writer.write(record)
        # Flushed: readable while the writer is still open.
        (stored,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert stored == {
        "index": 0,
        "phase": "rl",
        "update": 3,
        "loss": 0.5,
        "norm": 2.0,
        "half": 1.5,
        "tokens": 7,
        "skipped": True,
        "parts": {"em": 1.0, "hist": [0, 1]},
        "bad": "nan",
        "worse": "-inf",
    }
    assert math.isnan(float(stored["bad"]))
    assert float(stored["worse"]) == -math.inf


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.sampled_from([b"", b'{"ind', b'{"index": 7}']))
def test_a_resumed_file_has_no_seam(
    tmp_path_factory: pytest.TempPathFactory, written: int, checkpoint: int, after: int, cut_short: bytes
) -> None:
    checkpoint = min(checkpoint, written)
    run_dir = tmp_path_factory.mktemp("run")
    with MetricsWriter(run_dir, next_index=0) as writer:
        for update in range(written):
            writer.write({"update": update, "life": 1})
    with open(run_dir / "metrics.jsonl", "ab") as raw:
        raw.write(cut_short)
    with MetricsWriter(run_dir, next_index=checkpoint) as writer:
        for update in range(checkpoint, checkpoint + after):
            writer.write({"update": update, "life": 2})
        assert writer.next_index == checkpoint + after
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [record["index"] for record in records] == list(range(checkpoint + after))
    assert [record["update"] for record in records] == list(range(checkpoint + after))
    assert [record["life"] for record in records] == [1] * checkpoint + [2] * after
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]


def test_a_disabled_writer_counts_and_writes_nothing(tmp_path: pathlib.Path) -> None:
    writer = MetricsWriter(tmp_path / "run", next_index=4, enabled=False)
    writer.write({"loss": 1.0})
    writer.close()
    assert writer.next_index == 5
    assert not (tmp_path / "run").exists()


def test_a_corrupt_line_is_named_and_kept(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = json.dumps({"index": 0}) + "\nnonsense\n" + json.dumps({"index": 2}) + "\n"
    path.write_text(text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        MetricsWriter(tmp_path, next_index=1)
    assert path.read_text() == text


def test_what_is_no_metric_is_refused(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, next_index=0) as writer:
        with pytest.raises(TypeError, match="object"):
            writer.write({"loss": object()})
        assert writer.next_index == 0
    assert read_metrics(tmp_path / "metrics.jsonl") == []

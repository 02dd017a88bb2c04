"""The benchmark of a chip, on devices of a CPU: every part has its figures, and what they compare agrees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_part_has_its_figures(tmp_path):
    sizes = ["--contexts=320", "--slots=16", "--behind=64", "--repeats=1", f"--out={tmp_path}/chip"]
    sizes += [
        "--config.rollout.cache=pages",
        "--config.mesh.fsdp=2",
        "--config.rollout.swap_slots=0",
        "--config.credit.name=grpo",
    ]
    environment = {**os.environ, "AGENTR1_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.bench_chip", "--config=configs/quickstart.py", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "chip.json").read_text())["figures"]
    assert {f["part"] for f in figures} == {"gap", "decode", "pages", "prefill", "attention", "update", "weights"}
    faults = {f["part"]: f["fault"] for f in figures if f["fault"]}
    assert not faults or list(faults) == ["update"] and "sums over CPU devices need float32" in faults["update"]
    for f in figures:
        if f["part"] == "gap":
            assert f["also"]["mean |gap|, nats"] < 1e-5
        elif not f["fault"]:
            assert f["seconds"] > 0
    assert (tmp_path / "chip.md").read_text().count("\n") > len(figures)

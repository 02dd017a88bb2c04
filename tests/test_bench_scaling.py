"""The weak-scaling bench: what it makes of the rounds of its layouts, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import program

bench = program("bench_scaling")
ROOT = Path(__file__).parent.parent
ONCE = {"exchanges": 3, "gathered_bytes": 8, "compiled": 20, "recompiles": 0, "exchanged_bytes": 50, "tokens": 6}


def said(seconds, processor, **changes):
    """What a process says of a round; a view takes a tenth of the seconds, an exchange a hundredth."""
    factors = {"view": 0.1, "rollout": 1.0, "learn": 2.0, "exchange": 0.01}
    return {name: {"seconds": f * seconds, "processor": f * processor} for name, f in factors.items()} | ONCE | changes


def test_a_round_is_as_long_as_its_slowest_process_and_costs_what_all_cost():
    out = bench.joined([said(1.0, 0.5), said(3.0, 0.25, recompiles=2, exchanges=4)])
    assert (out["rollout"], out["learn"], out["view"]) == (3.0, 6.0, pytest.approx(0.3))
    assert (out["rollout_processor"], out["learn_processor"]) == (0.75, 1.5)
    assert (out["tokens"], out["exchanged_bytes"]) == (12, 100)
    assert (out["recompiles"], out["exchanges"], out["gathered_bytes"]) == (2, 4, 8)


def test_ratios_are_of_a_unit_of_work_and_medians_of_the_rounds():
    """Four devices have four times the work of one: in five times the seconds a unit takes 1.25 times as long."""
    rounds = {
        "1x1": [bench.joined([said(s, 1.0)]) for s in (1.0, 2.0, 9.0)],
        "2x2": [bench.joined([said(s, 1.0), said(1.0, 3.0)]) for s in (10.0, 8.0, 30.0)],
    }
    out = bench.figures(rounds)
    assert (out["1x1"]["rollout"], out["2x2"]["rollout"]) == (2.0, 10.0)
    for phase in ("rollout", "learn"):
        assert out["1x1"][f"{phase}_per_work"] == out["1x1"][f"{phase}_processor_per_work"] == 1
        assert out["2x2"][f"{phase}_per_work"] == pytest.approx(10 / 4 / 2)
        assert out["2x2"][f"{phase}_processor_per_work"] == pytest.approx(4 / 4 / 1)
        assert out["1x1"][f"{phase}_spread"] == pytest.approx(8 / 2)
    assert out["2x2"]["exchange_share"] == pytest.approx(0.1 / (1 + 10 + 20))


def test_a_layout_has_as_much_work_as_devices():
    assert [bench.Layout.of(name).total for name in ("1x1", "1x8", "2x2")] == [1, 8, 4]


@pytest.mark.slow
def test_devices_and_processes_do_their_share_and_nothing_is_compiled_again(tmp_path):
    small = ["--slots=4", "--groups=1", "--rows=2", "--width=32", "--layers=1", "--rounds=2"]
    command = [sys.executable, "-m", "experiments.bench_scaling", "--layouts=1x1,1x2,2x1", *small]
    done = subprocess.run(
        [*command, f"--json={tmp_path / 'out.json'}"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads((tmp_path / "out.json").read_text())["layouts"]
    assert list(out) == ["1x1", "1x2", "2x1"] and all(name in done.stdout for name in out)
    tokens = bench.SAMPLES * bench.STEPS * bench.RESPONSE
    assert [x["tokens"] for x in out.values()] == [tokens, 2 * tokens, 2 * tokens]
    for x in out.values():
        assert x["recompiles"] == 0 and x["compiled"] > 5 and x["exchanges"] == 3
        assert all(x[phase] > 0 for phase in ("view", "rollout", "learn")) and x["rollout_processor"] > 0
    assert out["1x2"]["gathered_bytes"] > 0 == out["1x1"]["gathered_bytes"] == out["2x1"]["gathered_bytes"]
    assert out["2x1"]["exchange"] > 0

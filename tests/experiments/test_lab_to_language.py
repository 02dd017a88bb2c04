"""What `lab_to_language` counts: contrasts, rank correlations, the best return, the lab's choices."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from plays import play, play_expert

from agentr1_jax.errors import UserError
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.keydoor import WORTH
from experiments import lab_to_language as study
from experiments.lab import inquiry


def test_the_contrast_is_what_grpo_loses_more_than_schemes_of_returns_to_go():
    rng = np.random.default_rng(0)
    cells = [(layout, noise) for layout in study.LAYOUTS for noise in study.NOISES]
    regrets = {(*cell, scheme): rng.normal(size=8) for cell in cells for scheme in study.LATE_KEY}
    for scheme in study.TO_GO:
        regrets["before", 1.5, scheme] -= 3.0
    lines = study.contrast_rows(regrets)
    assert lines[0]["contrast"] == "noise before the choice" and float(lines[0]["p"]) < 0.001
    by_hand = [
        regrets["before", 1.5, "grpo"][i] - sum(regrets["before", 1.5, scheme][i] for scheme in study.TO_GO) / 3
        for i in range(8)
    ]
    assert lines[0]["mean [95 %]"].startswith(f"{np.mean(by_hand):.3f} [")
    adds = lines[-1]
    assert float(adds["p"]) < 0.05 and 2 < float(adds["mean [95 %]"].split()[0]) < 5
    assert all(float(line["p"]) > 0.05 for line in lines[1:-1])


def test_the_best_return_takes_the_best_of_each_room_and_opens_the_door():
    task = make_task("keydoor", rooms_before=5, rooms=0)
    best = [
        1 + sum(max(WORTH[thing] for thing in room) for room in task.row("eval", i)["rooms"][:5]) for i in range(20)
    ]
    assert study.best_return("before", 5, "eval", 20) == pytest.approx(np.mean(best))


def test_an_inquiry_is_answered_from_what_is_seen():
    task = inquiry.make_inquiry(inquiry.InquiryConfig(mistakes=0.0), None)
    for i in range(20):
        row = task.row("eval", i)
        (name,) = row["answers"]
        assert set(row["seen"][0]) & set(row["seen"][1]) == {name} and name in row["question"]
        *looks, end = play_expert(task, row, limit=6, seed=i)
        assert [t.action_key for t in looks] == ["look left", "look right"]
        assert end.action_key == f"say {name.lower()}" and end.metrics["return"] == pytest.approx(inquiry.BEST_RETURN)
    *_, wrong = play(task, row, [f"say {next(p for p in row['people'] if p != name).lower()}"])
    assert wrong.terminated and wrong.metrics["em"] == wrong.reward == 0


def test_equal_orders_correlate():
    scores = [np.full(5, float(i)) for i in range(8)]
    same = study.rank_correlation(scores, [-x for x in scores])
    assert same["rank correlation"] == "1.00" and same["95 % of seeds"] == "[1.00, 1.00]"
    assert float(same["p, permutations"]) < 0.01
    assert study.rank_correlation(scores, scores)["rank correlation"] == "-1.00"


def test_the_labs_choices_become_arms(tmp_path):
    with open(tmp_path / "lab.csv", "w", newline="") as out:
        lines = csv.DictWriter(out, ["process", "scheme", "area", "arguments"])
        lines.writeheader()
        for scheme in study.ORDER[1:]:
            lines.writerow({"process": "noise_before", "scheme": scheme, "area": 0.5, "arguments": "{}"})
    with pytest.raises(UserError, match="grpo not run on noise_before"):
        study.read_lab(tmp_path, "noise_before")
    with open(tmp_path / "lab.csv", "a", newline="") as out:
        csv.writer(out).writerows([["noise_before", "grpo", x, "{'lam': 0.9}"] for x in (0.25, 0.75)])
    arm, areas = study.read_lab(tmp_path, "noise_before")["grpo"]
    assert arm == "grpo(lam=0.9)" and areas.tolist() == [0.25, 0.75]

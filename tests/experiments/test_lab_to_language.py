"""What `lab_to_language` counts: contrasts, rank correlations, the best return, the lab's choices."""

from __future__ import annotations

import csv
import itertools

import numpy as np
import pytest
from plays import play, play_expert
from programs import program

from agentr1_jax.errors import UserError
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.keydoor import WORTH

study = program("lab_to_language")


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


def test_an_inquiry_is_answered_from_what_is_seen(user_files):
    from experiments.lab import inquiry  # Registers its task, which no other test must see.

    task = inquiry.make_inquiry(inquiry.InquiryConfig(mistakes=0.0), None)
    for i in range(20):
        row = task.row("eval", i)
        (name,) = row["answers"]
        assert set(row["seen"][0]) & set(row["seen"][1]) == {name} and name in row["question"]
        *looks, end = play_expert(task, row, limit=6, seed=i)
        assert [t.action_key for t in looks] == ["look left", "look right"]
        assert end.action_key == f"say {name.lower()}" and end.metrics["return"] == pytest.approx(inquiry.BEST_RETURN)
    told = [
        {str([row["question"], row["seen"]]) for row in map(task.row, [s] * 4000, range(4000))} for s in task.splits
    ]
    assert all(not one & other for one, other in itertools.combinations(told, 2))
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
        lines = csv.DictWriter(out, ["process", "scheme", "area", "lr", "arguments"])
        lines.writeheader()
        for scheme in study.ORDER[1:]:
            lines.writerow({"process": "noise_before", "scheme": scheme, "area": 0.5, "lr": 0.1, "arguments": "{}"})
    with pytest.raises(UserError, match="grpo not run on noise_before"):
        study.read_lab(tmp_path, "noise_before")
    with open(tmp_path / "lab.csv", "a", newline="") as out:
        csv.writer(out).writerows([["noise_before", "grpo", x, 0.1 * 2**8, "{'lam': 0.9}"] for x in (0.25, 0.75)])
    found = study.read_lab(tmp_path, "noise_before")
    # The geometric mean of 7 times .1 and once .1·2⁸ is .2, which stands for the config's 5e-4.
    assert found["rloo"][0] == "rloo+optimizer.lr=0.00025"
    assert found["grpo"][0] == "grpo(lam=0.9)+optimizer.lr=0.064" and found["grpo"][1].tolist() == [0.25, 0.75]


def test_rates_are_tried_until_the_best_is_between_others():
    best = {"grpo": 1.25e-4, "gigpo": 5e-4, "reinforce": 1e-3, "step_gae": 4e-3, "state_baseline": 1.0}
    asked = []

    def regret(tried):
        asked.append({scheme: len(rates) for scheme, rates in tried.items()})
        return {s: {rate: abs(np.log(rate / best[s])) for rate in rates} for s, rates in tried.items()}

    found = study.choose_rates(regret)
    chosen = {scheme: next(iter(regrets)) for scheme, regrets in found.items()}
    assert chosen == {**best, "state_baseline": 8e-3}  # The limit.
    assert sorted(found["grpo"]) == [6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3] and len(found["gigpo"]) == 3
    assert len(asked) == 4


def test_a_stopped_run_is_no_result(tmp_path):
    (tmp_path / "grpo" / "seed0").mkdir(parents=True)
    with pytest.raises(UserError, match="seed0 is not finished"):
        study.score(str(tmp_path), "grpo", 0, 1.0)

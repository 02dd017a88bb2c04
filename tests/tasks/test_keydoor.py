"""KeyDoor: its rules, its exact optimum against all action sequences, its expert, and what is refused."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from configured import configured_task
from hypothesis import given, settings
from hypothesis import strategies as st
from plays import play

from agentr1_jax.envs.base import Task
from agentr1_jax.envs.tabular import policy_return
from agentr1_jax.envs.tabular_task import NO_ACTION
from agentr1_jax.errors import UserError
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.keydoor import WORTH, game
from agentr1_jax.trajectory import Outcome
from configs import keydoor

TASK = make_task("keydoor")
SMALL = make_task("keydoor", rooms=1, key_count=2, noise=0.5)
SPLITS = ("train", "eval", "dev")


def expected_return(game_, actions):
    """Expected return of a fixed sequence of actions, by all that can happen."""

    def worth(state, t):
        chances = game_.outcomes(state, actions[t])
        return sum(c.probability * (c.reward + (0 if c.state is None else worth(c.state, t + 1))) for c in chances)

    return worth(game_.start, 0)


def sequences(row):
    """All that can be said in all rooms."""
    first, *middle, last = ([f"take {thing}" for thing in room] for room in row["rooms"])
    return itertools.product([*first, "go on"], *([*room, "go on"] for room in middle), [*last, "open door"])


def test_it_is_a_task_whose_rows_are_plain_json():
    task: Task = TASK
    row = task.row("train", 5)
    assert json.loads(json.dumps(row)) == row == task.row("train", 5)
    assert row["id"] == "keydoor/train/5" and task.size("train") is None
    assert f"{row['door']} key" in row["rooms"][0] and row["door"] in row["question"]


def test_splits_have_no_keys_and_door_in_common():
    layouts = {split: {TASK.row(split, i)["layout"] for i in range(300)} for split in SPLITS}
    assert all(len(found) > 30 for found in layouts.values())
    for one, other in itertools.combinations(SPLITS, 2):
        assert not layouts[one] & layouts[other]


def test_the_key_pays_last_and_only_its_own_door():
    row = TASK.row("train", 0)
    keys = [thing.removesuffix(" key") for thing in row["rooms"][0] if thing.endswith(" key")]
    for colour in keys:
        _, *done = play(TASK, row, [f"take {colour} key", *["go on"] * 5, "open door"])
        opened = float(colour == row["door"])
        assert [t.reward for t in done] == [0] * 6 + [opened]
        assert [t.terminated for t in done] == [False] * 6 + [True] and done[-1].outcome is Outcome.ENV_DONE
        assert done[-1].metrics == {"em": opened, "success": opened, "return": opened}
        assert done[-1].reward_parts == {"goal": opened, "side": 0.0}


def test_a_thing_pays_its_worth_with_noise_of_the_seed():
    row = TASK.row("train", 0)
    thing = row["rooms"][1][0]
    texts = ["go on", f"take {thing}"]
    rewards = [play(TASK, row, texts, seed)[2].reward for seed in range(60)]
    assert set(rewards) == {WORTH[thing] - 0.3, WORTH[thing] + 0.3} and 15 < sum(r > 0.2 for r in rewards) < 45
    assert play(TASK, row, texts, 7)[2] == play(TASK, row, texts, 7)[2]
    other_rooms = [play(TASK, row, [*["go on"] * i, f"take {row['rooms'][i][0]}"], 7)[-1].reward for i in range(1, 6)]
    assert len({reward > 0.2 for reward in other_rooms}) == 2


def test_what_is_no_action_costs_a_step_and_is_told():
    row = TASK.row("train", 0)
    _, wrong, spaced = play(TASK, row, ["take unicorn", f"  TAKE  {row['rooms'][1][0]} "])
    assert wrong.info["errors"] == {"no_action": 1} and wrong.reward == 0
    assert wrong.observation.text == f"{NO_ACTION} Room 2: {', '.join(row['rooms'][1])}."
    assert spaced.info["errors"] == {} and spaced.reward != 0
    assert play(TASK, row, ["open door"])[1].info["errors"] == {"no_action": 1}  # Only in the last room.


@settings(max_examples=30)
@given(st.integers(0, 50), st.data())
def test_equal_keys_are_equal_futures(index, data):
    """Whatever was said before: where the state key is equal, the same actions are expected to earn the same."""
    row = SMALL.row("train", index)
    one, other = (data.draw(st.sampled_from(list(sequences(row)))) for _ in range(2))
    opening, first, *_ = play(SMALL, row, one)
    second = play(SMALL, row, other)[1]
    same = first.observation.state_key == second.observation.state_key
    whole = game(row, noise=0.0)
    keys = [text if text.endswith("key") else "" for text in (one[0], other[0])]
    assert same == (keys[0] == keys[1]) and opening.state_key != first.observation.state_key
    if same:
        start = [sum(c.reward * c.probability for c in whole.outcomes(whole.start, said[0])) for said in (one, other)]
        rest = [
            expected_return(whole, said) - paid for said, paid in zip(((one[0], *other[1:]), other), start, strict=True)
        ]
        assert rest[0] == pytest.approx(rest[1])
    assert second.observation.state_key.startswith(row["id"])


@pytest.mark.parametrize("index", range(4))
def test_the_optimum_is_that_of_the_best_of_all_sequences(index):
    """Rooms follow each other whatever is said, and chance is only in what things pay: no plan needs to look."""
    row = SMALL.row("train", index)
    best = max(expected_return(game(row, noise=0.5), actions) for actions in sequences(row))
    assert SMALL.optimum(row) == pytest.approx(best, abs=1e-12)
    assert SMALL.optimum(row) == pytest.approx(1 + max(WORTH[thing] for thing in row["rooms"][1]), abs=1e-12)
    last = WORTH[row["rooms"][-1][0]]
    hurried = [
        max(WORTH.get(thing, 0.0) for thing in row["rooms"][0]),
        max(WORTH.get(thing, 0.0) for thing in row["rooms"][0]) + max(WORTH[thing] for thing in row["rooms"][1]),
    ]
    assert [SMALL.optimum(row, steps) for steps in (0, 1, 2)] == pytest.approx([0, *hurried]) and last < 1


def test_the_return_of_a_random_policy_is_the_mean_over_all_sequences():
    row = SMALL.row("train", 3)
    whole = game(row, noise=0.5)
    mean = np.mean([expected_return(whole, actions) for actions in sequences(row)])
    uniform = policy_return(whole, lambda state: dict.fromkeys(whole.actions(state), 1 / len(whole.actions(state))))
    assert uniform == pytest.approx(mean, abs=1e-12)


def test_episodes_of_the_expert_earn_what_its_policy_is_worth():
    """The environment draws from the same model that the exact return reads."""
    task, row = make_task("keydoor", rooms=1, noise=0.1, mistakes=0.0), TASK.row("eval", 0)
    returns = []
    for seed in range(60):
        expert, texts = task.expert(row, seed), []
        for observed in (None, *(game(row, noise=0.1).tell((i, "")) for i in range(1, 7))):
            texts.append(expert(observed))
        returns.append(play(task, row, texts, seed)[-1].metrics["return"])
    assert np.mean(returns) == pytest.approx(task.optimum(row), abs=4 * np.std(returns) / np.sqrt(len(returns)))


def test_the_expert_errs_as_often_as_told():
    def right_keys(mistakes):
        task = make_task("keydoor", mistakes=mistakes)
        rows = [task.row("train", i) for i in range(200)]
        return np.mean([task.expert(row, 1)(None) == f"take {row['door']} key" for row in rows])

    assert right_keys(0.0) == 1
    # Of mistakes, the first named (one of four things) and any of five actions are as likely.
    assert right_keys(0.8) == pytest.approx(0.2 + 0.4 / 4 + 0.4 / 5, abs=0.1)
    said = {TASK.expert(TASK.row("train", 0), seed)(None) for seed in range(60)}
    assert len(said) == 5 and said == {TASK.expert(TASK.row("train", 0), seed)(None) for seed in range(60)}


def test_the_potential_counts_what_the_open_door_lacks():
    row = TASK.row("train", 0)
    opening, right = play(TASK, row, [f"take {row['door']} key"])
    assert (opening.potential, right.observation.potential) == (-1.0, -0.5)
    assert play(TASK, row, ["go on"])[1].observation.potential == -1.0


def test_texts_hold_every_word_of_other_splits():
    texts = TASK.texts(1000)
    words = {word.strip(".,:") for text in texts for word in text.split()}
    assert len(texts) == 1000 and texts == TASK.texts(1000)
    rows = [TASK.row("eval", i) for i in range(100)]
    assert {word for row in rows for room in row["rooms"] for thing in room for word in thing.split()} <= words


@pytest.mark.parametrize(("split", "index"), [("practice", 0), ("train", -1)])
def test_rows_that_do_not_exist_are_told(split, index):
    with pytest.raises(ValueError, match="splits are dev, eval, train"):
        TASK.row(split, index)


def test_the_config_is_a_task_whose_door_can_be_reached():
    config = keydoor.get_config()
    assert configured_task(config).name == "keydoor"
    config.task.keydoor.rooms = 6
    with pytest.raises(UserError, match=r"8 steps away \(task\.keydoor\.rooms \+ 2\), beyond budget\.max_steps \(7\)"):
        configured_task(config)
    config.task.keydoor.rooms, config.warm_start.practice = 5, 0.25
    with pytest.raises(UserError, match=r"keydoor has no split 'practice'; set warm_start\.practice=0"):
        configured_task(config)

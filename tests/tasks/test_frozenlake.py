"""FrozenLake: its rules against Gymnasium's, its exact values against enumeration, its expert, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
from configured import configured_task
from hypothesis import given
from hypothesis import strategies as st
from plays import play

from agentr1_jax.envs.base import Action, Task
from agentr1_jax.envs.tabular import policy_return
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.frozenlake import distances, game
from agentr1_jax.trajectory import Outcome
from configs import frozenlake

TASK = make_task("frozenlake")
SLIPPERY = make_task("frozenlake", size=3, slip=2 / 3)
SPLITS = ("train", "eval", "dev")
GYM = {"layout": "SFFF/FHFH/FFFH/HFFG"}
"""Gymnasium's 4x4 map."""
ACTIONS = ("go west", "go south", "go east", "go north")
"""In the order of Gymnasium's action numbers 0 to 3."""


def gym_transitions(lake, cell, action):
    """Gymnasium's `P[s][a]` of a slippery lake: actions a − 1, a and a + 1 modulo 4, with a third each.

    Returns:
      (probability, cell, ended, reward) of each; a lone row stands for the map's cells.
    """
    size, out = len(lake), []
    for number in ((action - 1) % 4, action, (action + 1) % 4):
        row, column = cell
        if number == 0:
            column = max(column - 1, 0)
        elif number == 1:
            row = min(row + 1, size - 1)
        elif number == 2:
            column = min(column + 1, size - 1)
        else:
            row = max(row - 1, 0)
        letter = lake[row][column]
        out.append((Fraction(1, 3), (row, column), letter in "GH", float(letter == "G")))
    return out


def reached(lake, steps, choose, memo=None):
    """Probability of the goal within so many steps, by all that can happen; `choose` joins what the actions reach."""

    def worth(cell, left):
        if left == 0:
            return Fraction(0)
        if (cell, left) not in memo:
            memo[cell, left] = choose(
                sum(
                    p * (Fraction(reward) if ended else worth(to, left - 1))
                    for p, to, ended, reward in gym_transitions(lake, cell, action)
                )
                for action in range(4)
            )
        return memo[cell, left]

    memo = {}
    return float(worth((0, 0), steps))


def test_it_is_a_task_whose_rows_are_plain_json():
    task: Task = TASK
    row = task.row("train", 5)
    assert json.loads(json.dumps(row)) == row == task.row("train", 5)
    assert row["id"] == "frozenlake/train/5" and task.size("train") is None
    assert row["question"].replace(" ", "").endswith(row["layout"].replace("/", "\n"))


def test_splits_have_no_map_in_common_and_every_map_has_a_way():
    maps = {split: [TASK.row(split, i)["layout"] for i in range(120)] for split in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not set(maps[one]) & set(maps[other])
    assert all((0, 0) in distances(layout.split("/")) for found in maps.values() for layout in found)
    assert 0.1 < np.mean([layout.count("H") / 14 for layout in maps["train"]]) < 0.2
    assert TASK.optimum(TASK.row("train", 0)) == 1


def test_slipping_is_gymnasiums():
    lake = GYM["layout"].split("/")
    slippery = game(GYM, slip=2 / 3)
    cells = [(r, c) for r, c in itertools.product(range(4), range(4)) if lake[r][c] in "SF"]
    for cell, action in itertools.product(cells, range(4)):
        ours, theirs = {}, {}
        for chance in slippery.outcomes(cell, ACTIONS[action]):
            key = (chance.state, chance.reward, chance.success)
            ours[key] = ours.get(key, 0) + chance.probability
        for probability, to, ended, reward in gym_transitions(lake, cell, action):
            key = (None if ended else to, reward, bool(reward))
            theirs[key] = theirs.get(key, 0) + float(probability)
        assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("steps", [0, 3, 6, 20])
def test_values_within_steps_are_those_of_enumeration(steps):
    lake = GYM["layout"].split("/")
    task = make_task("frozenlake", slip=2 / 3)
    assert task.optimum(GYM, steps) == pytest.approx(reached(lake, steps, max), abs=1e-12)
    uniform = policy_return(game(GYM, slip=2 / 3), lambda cell: dict.fromkeys(ACTIONS, 0.25), steps=steps)
    assert uniform == pytest.approx(reached(lake, steps, lambda q: sum(q) / 4), abs=1e-12)


def test_the_optimum_of_gymnasiums_slippery_lake_is_the_known_one():
    assert make_task("frozenlake", slip=2 / 3).optimum(GYM) == pytest.approx(14 / 17, abs=1e-9)
    assert make_task("frozenlake").optimum(GYM, 5) == 0 and make_task("frozenlake").optimum(GYM, 6) == 1


def test_an_episode_goes_from_start_to_goal():
    texts = ["go south", "go south", "go east", "go east", "go south", "go east"]
    opening, *done = play(TASK, {"id": "gym", "question": "?", **GYM}, texts)
    assert opening.messages[0]["content"] == "?\nAt 1 1: east ice south ice west wall north wall"
    assert done[-2].observation.text == "At 4 3: east goal south wall west ice north ice"
    assert [t.reward for t in done] == [0, 0, 0, 0, 0, 1] and done[-1].outcome is Outcome.ENV_DONE
    assert done[-1].metrics == {"em": 1, "success": 1, "return": 1}
    potentials = [o.potential for o in (opening, *(t.observation for t in done[:-1]))]
    assert potentials == pytest.approx([-6 / 6, -5 / 6, -4 / 6, -3 / 6, -2 / 6, -1 / 6])


def test_a_hole_ends_the_episode_with_nothing():
    done = play(TASK, {"id": "gym", "question": "?", **GYM}, ["go east", "go south"])[-1]
    assert (done.reward, done.terminated, done.observation) == (0, True, None)
    assert done.metrics == {"em": 0, "success": 0, "return": 0} and done.outcome is Outcome.ENV_DONE


def test_cells_are_states_and_come_again():
    row = {"id": "gym", "question": "?", **GYM}
    opening, wall, east, nothing, back = play(TASK, row, ["go west", "go east", "fly away", "go west"])
    keys = [opening.state_key, *(t.observation.state_key for t in (wall, east, nothing, back))]
    assert keys == ["gym|[0, 0]", "gym|[0, 0]", "gym|[0, 1]", "gym|[0, 1]", "gym|[0, 0]"]
    assert nothing.info["errors"] == {"no_action": 1} and not back.info["errors"] and nothing.reward == 0


@given(st.integers(0, 20), st.integers(0, 99), st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=6))
def test_equal_seeds_and_actions_make_equal_episodes(index, seed, actions):
    row = SLIPPERY.row("train", index)

    async def run():
        env, out = SLIPPERY.env(), []
        await env.reset(row, seed)
        for action in actions:
            out.append(await env.step(Action(np.zeros(0, np.int32), action)))
            if out[-1].terminated:
                break
        return out

    assert asyncio.run(run()) == asyncio.run(run())


def test_slips_differ_between_seeds_and_visits():
    row = {"id": "open", "question": "?", "layout": "SFF/FFF/FFG"}
    seen = {play(SLIPPERY, row, ["go west"], seed)[1].observation.state_key for seed in range(30)}
    assert seen == {"open|[0, 0]", "open|[1, 0]"}  # A side of the start is a wall.
    stays = [[t.observation.state_key for t in play(SLIPPERY, row, ["go west"] * 2, seed)[1:]] for seed in range(40)]
    assert ["open|[0, 0]", "open|[1, 0]"] in stays and ["open|[0, 0]", "open|[0, 0]"] in stays


def expert_success(task, count):
    """Share of the expert's episodes of ten steps that reach the goal."""

    async def run(row, seed):
        env, expert, observed = task.env(), task.expert(row, seed), None
        await env.reset(row, seed)
        for _ in range(10):
            done = await env.step(Action(np.zeros(0, np.int32), expert(observed)))
            if done.terminated:
                break
            observed = done.observation.text
        return env.truncate()["success"]

    return np.mean([asyncio.run(run(task.row("train", i), i)) for i in range(count)])


def test_the_expert_is_as_good_as_its_mistakes_allow():
    assert expert_success(make_task("frozenlake", mistakes=0.0), 40) == 1
    assert 0.2 < expert_success(make_task("frozenlake", mistakes=0.6), 150) < 0.6
    assert expert_success(make_task("frozenlake", mistakes=0.0, slip=0.1), 60) > 0.5


def test_an_expert_that_is_shown_less_says_so():
    expert = TASK.expert(TASK.row("train", 0), 0)
    expert(None)
    with pytest.raises(ValueError, match=r"raise budget\.observation_tokens"):
        expert("At 1 [cut]")


def test_texts_hold_every_word_of_other_splits():
    words = {word for text in TASK.texts(500) for word in text.split()}
    assert {word for i in range(50) for word in TASK.row("eval", i)["question"].split()} <= words
    assert {"east", "goal", "hole", "wall", "go"} <= words and len(TASK.texts(7)) == 7


@pytest.mark.parametrize("holes", [0.0, 1.0])
def test_settings_that_leave_no_maps_are_refused(holes):
    with pytest.raises(ValueError, match="leave too few layouts"):
        make_task("frozenlake", holes=holes)


def test_the_config_is_a_task():
    assert configured_task(frozenlake.get_config()).name == "frozenlake"

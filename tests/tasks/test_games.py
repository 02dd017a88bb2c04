"""KeyDoor and FrozenLake: rules, exact values, experts, and what is refused."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from configured import configured_task
from plays import play, play_expert

from agentr1_jax.envs.tabular import NO_ACTION, action_values
from agentr1_jax.errors import UserError
from agentr1_jax.tasks import frozenlake, keydoor, make_task
from agentr1_jax.trajectory import Outcome
from configs import keydoor as keydoor_config

KEYDOOR = make_task("keydoor")
LAKE = make_task("frozenlake")
GYM = {"id": "gym", "question": "?", "layout": "SFFF/FHFH/FFFH/HFFG"}
"""Gymnasium's 4x4 map."""
ACTIONS = ("go west", "go south", "go east", "go north")
"""In the order of Gymnasium's action numbers 0 to 3."""


def optimum(game):
    """Expected return of the best policy."""
    return max(action_values(game)[game.start].values())


@pytest.mark.parametrize("task", [KEYDOOR, LAKE], ids=["keydoor", "frozenlake"])
def test_splits_have_no_layout_in_common(task):
    layouts = [{task.row(split, i)["layout"] for i in range(100)} for split in ("train", "eval", "dev")]
    assert all(len(found) > 30 for found in layouts)
    assert not layouts[0] & layouts[1] and not layouts[0] & layouts[2] and not layouts[1] & layouts[2]
    words = {word.strip(".,:") for text in task.texts(700) for word in text.split()}
    assert {word.strip(".,:") for i in range(50) for word in task.row("eval", i)["question"].split()} <= words


@pytest.mark.parametrize("holes", [0.0, 1.0])
def test_settings_that_leave_no_maps_are_refused(holes):
    with pytest.raises(ValueError, match="frozenlake: its settings leave too few layouts"):
        make_task("frozenlake", size=3, holes=holes)


def test_every_map_has_a_way():
    maps = [LAKE.row("train", i)["layout"] for i in range(100)]
    assert all((0, 0) in frozenlake.distances(layout.split("/")) for layout in maps)
    assert 0.1 < np.mean([layout.count("H") / 14 for layout in maps]) < 0.2


def gym_transitions(lake, cell, action):
    """Gymnasium's `P[s][a]` of a slippery lake: actions a − 1, a and a + 1 modulo 4, with a third each."""
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


def test_slipping_and_the_optimum_are_gymnasiums():
    lake = GYM["layout"].split("/")
    slippery = frozenlake.game(GYM, slip=2 / 3)
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
    assert optimum(slippery) == pytest.approx(14 / 17, abs=1e-9)


def test_an_episode_goes_over_the_ice_to_the_goal():
    texts = ["go south", "go south", "go east", "go east", "go south", "go east"]
    opening, *done = play(LAKE, GYM, texts)
    assert opening.messages[0]["content"] == "?\nAt 1 1: east ice south ice west wall north wall"
    assert done[-2].observation.text == "At 4 3: east goal south wall west ice north ice"
    assert [t.reward for t in done] == [0, 0, 0, 0, 0, 1] and done[-1].outcome is Outcome.ENV_DONE
    assert done[-1].metrics == {"em": 1, "success": 1, "return": 1, "expected_return": 1}
    potentials = [o.potential for o in (opening, *(t.observation for t in done[:-1]))]
    assert potentials == pytest.approx([-6 / 6, -5 / 6, -4 / 6, -3 / 6, -2 / 6, -1 / 6])

    hole = play(LAKE, GYM, ["go east", "go south"])[-1]
    assert (hole.reward, hole.terminated, hole.observation, hole.outcome) == (0, True, None, Outcome.ENV_DONE)
    assert hole.metrics == {"em": 0, "success": 0, "return": 0, "expected_return": 0}


def test_cells_are_states_and_come_again():
    opening, wall, east, nothing, back = play(LAKE, GYM, ["go west", "go east", "fly away", "go west"])
    keys = [opening.state_key, *(t.observation.state_key for t in (wall, east, nothing, back))]
    assert keys == ["gym|[0, 0]", "gym|[0, 0]", "gym|[0, 1]", "gym|[0, 1]", "gym|[0, 0]"]
    assert nothing.info["errors"] == {"no_action": 1} and not back.info["errors"] and nothing.reward == 0


def test_slips_differ_between_seeds_and_visits_and_equal_seeds_make_equal_episodes():
    slippery = make_task("frozenlake", size=3, slip=2 / 3)
    row = {"id": "open", "question": "?", "layout": "SFF/FFF/FFG"}
    episodes = [play(slippery, row, ["go west"] * 2, seed)[1:] for seed in range(40)]
    stays = [[t.observation.state_key for t in episode] for episode in episodes]
    assert {first for first, _ in stays} == {"open|[0, 0]", "open|[1, 0]"}  # A side of the start is a wall.
    assert ["open|[0, 0]", "open|[1, 0]"] in stays and ["open|[0, 0]", "open|[0, 0]"] in stays
    assert play(slippery, row, ["go west"] * 2, 7)[1:] == episodes[7]


def test_the_expert_is_as_good_as_its_mistakes_allow():
    def success(count, **keys):
        task = make_task("frozenlake", **keys)
        ends = [play_expert(task, task.row("train", i), limit=10, seed=i)[-1] for i in range(count)]
        return np.mean([end.metrics.get("success", 0) for end in ends])

    assert success(30, mistakes=0.0) == 1
    assert 0.2 < success(80, mistakes=0.6) < 0.6
    assert success(30, mistakes=0.0, slip=0.1) > 0.5


def test_an_expert_that_is_shown_less_says_so():
    expert = LAKE.expert(LAKE.row("train", 0), 0)
    expert(None)
    with pytest.raises(ValueError, match=r"raise budget\.observation_tokens"):
        expert("At 1 [cut]")


def test_the_key_pays_last_and_only_its_own_door():
    row = KEYDOOR.row("train", 0)
    keys = [thing.removesuffix(" key") for thing in row["rooms"][0] if thing.endswith(" key")]
    assert row["door"] in keys and row["door"] in row["question"]
    for colour in keys:
        opening, *done = play(KEYDOOR, row, [f"take {colour} key", *["go on"] * 5, "open door"])
        opened = float(colour == row["door"])
        assert [t.reward for t in done] == [0] * 6 + [opened]
        assert [t.terminated for t in done] == [False] * 6 + [True] and done[-1].outcome is Outcome.ENV_DONE
        assert done[-1].metrics == {"em": opened, "success": opened, "return": opened, "expected_return": opened}
        assert done[-1].reward_parts == {"goal": opened, "side": 0.0}
        assert (opening.potential, done[0].observation.potential) == (-1.0, -0.5 if opened else -1.0)


def test_a_thing_pays_its_worth_with_noise_of_the_seed():
    row = KEYDOOR.row("train", 0)
    thing = row["rooms"][1][0]
    rewards = [play(KEYDOOR, row, ["go on", f"take {thing}"], seed)[2].reward for seed in range(60)]
    worth = keydoor.WORTH[thing]
    assert set(rewards) == {worth - 0.3, worth + 0.3} and 15 < sum(reward > 0.2 for reward in rewards) < 45
    taken = [play(KEYDOOR, row, ["go on", f"take {thing}", *["go on"] * 4, "open door"], seed)[-1] for seed in range(9)]
    assert {t.metrics["expected_return"] for t in taken} == {worth} != {t.metrics["return"] for t in taken}
    other_rooms = [play(KEYDOOR, row, [*["go on"] * i, f"take {row['rooms'][i][0]}"], 7)[-1] for i in range(1, 6)]
    assert len({t.reward > 0.2 for t in other_rooms}) == 2


def test_what_is_no_action_costs_a_step_and_is_told():
    row = KEYDOOR.row("train", 0)
    _, wrong, spaced = play(KEYDOOR, row, ["take unicorn", f"  TAKE  {row['rooms'][1][0]} "])
    assert wrong.info["errors"] == {"no_action": 1} and wrong.reward == 0
    assert wrong.observation.text == f"{NO_ACTION} Room 2: {', '.join(row['rooms'][1])}."
    assert spaced.info["errors"] == {} and spaced.reward != 0
    assert (wrong.action_key, spaced.action_key) == (NO_ACTION, f"take {row['rooms'][1][0]}")
    assert play(KEYDOOR, row, ["open door"])[1].info["errors"] == {"no_action": 1}  # Only in the last room.


def test_the_optimum_is_that_of_the_best_of_all_sequences():
    """Rooms follow each other whatever is said, and chance is only in what things pay: no plan needs to look."""
    row = make_task("keydoor", rooms=1, key_count=2).row("train", 0)
    game = keydoor.game(row, noise=0.5)

    def expected_return(actions, state=game.start):
        chances = game.outcomes(state, actions[0])
        later = [expected_return(actions[1:], chance.state) if chance.state else 0 for chance in chances]
        return sum(c.probability * (c.reward + rest) for c, rest in zip(chances, later, strict=True))

    first, middle, last = ([f"take {thing}" for thing in room] for room in row["rooms"])
    sequences = itertools.product([*first, "go on"], [*middle, "go on"], [*last, "open door"])
    assert optimum(game) == pytest.approx(max(map(expected_return, sequences)), abs=1e-12)
    assert optimum(game) == pytest.approx(1 + max(keydoor.WORTH[thing] for thing in row["rooms"][1]), abs=1e-12)


def test_the_expert_errs_as_often_as_told():
    def right_keys(mistakes):
        task = make_task("keydoor", mistakes=mistakes)
        rows = [task.row("train", i) for i in range(200)]
        return np.mean([task.expert(row, 1)(None) == f"take {row['door']} key" for row in rows])

    assert right_keys(0.0) == 1
    # Of mistakes, the first named (one of four things) and any of five actions are as likely.
    assert right_keys(0.8) == pytest.approx(0.2 + 0.4 / 4 + 0.4 / 5, abs=0.1)
    assert len({KEYDOOR.expert(KEYDOOR.row("train", 0), seed)(None) for seed in range(60)}) == 5


def test_a_door_beyond_the_last_step_is_refused():
    config = keydoor_config.get_config()
    config.task.keydoor.rooms = 6
    with pytest.raises(
        UserError, match=r"8 steps away \(task\.keydoor\.rooms_before \+ rooms \+ 2\), beyond budget\.max_steps \(7\)"
    ):
        configured_task(config)
    config.task.keydoor.rooms, config.warm_start.practice = 5, 0.25
    with pytest.raises(UserError, match=r"keydoor has no split 'practice'; set warm_start\.practice=0"):
        configured_task(config)

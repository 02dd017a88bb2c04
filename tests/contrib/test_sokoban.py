"""Sokoban: its rules on drawn boards, its levels against a search forwards, its expert, and what is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from configured import configured_task
from hypothesis import given, settings
from hypothesis import strategies as st
from plays import play

from agentr1_jax.contrib.sokoban import (
    MOVES,
    SokobanConfig,
    draw_board,
    game,
    make_sokoban,
    next_state,
    read_level,
    solution_lengths,
)
from agentr1_jax.envs.base import Action
from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.envs.tabular import action_values, reachable
from agentr1_jax.errors import UserError
from agentr1_jax.trajectory import Outcome
from configs import sokoban


def sokoban_task(**settings):
    return make_sokoban(SokobanConfig(**settings), TaskContext())


TASK = sokoban_task()
TWO = sokoban_task(size=3, boxes=2, walls=0.0, least_moves=2, most_moves=6)


def shortest_solution(layout):
    """Moves of the shortest solution by a search forwards on rows of signs; None where there is none."""

    def step(board, move):
        board = [list(line) for line in board]
        size, (down, right) = len(board), MOVES[move]
        ((r, c),) = [(r, c) for r, line in enumerate(board) for c, sign in enumerate(line) if sign in "@+"]

        def at(r, c):
            return board[r][c] if 0 <= r < size and 0 <= c < size else "#"

        a, b = (r + down, c + right), (r + 2 * down, c + 2 * right)
        if at(*a) == "#" or (at(*a) in "$*" and at(*b) not in "_."):
            return None
        if at(*a) in "$*":
            board[b[0]][b[1]] = {"_": "$", ".": "*"}[at(*b)]
        board[a[0]][a[1]] = "+" if at(*a) in ".*" else "@"
        board[r][c] = "." if board[r][c] == "+" else "_"
        return tuple("".join(line) for line in board)

    start = tuple(layout.split("/"))
    seen, ahead = {start: 0}, [start]
    for board in ahead:
        if not any("$" in line for line in board):
            return seen[board]
        for move in MOVES:
            after = step(board, move)
            if after is not None and after not in seen:
                seen[after] = seen[board] + 1
                ahead.append(after)
    return None


@pytest.mark.parametrize("task", [TASK, TWO], ids=["one", "two"])
def test_every_level_has_a_solution_of_a_length_within_the_bounds(task):
    lengths = [shortest_solution(task.row("train", i)["layout"]) for i in range(40)]
    assert None not in lengths and min(lengths) == (3 if task is TASK else 2)
    assert len(set(lengths)) >= 4 and max(lengths) <= (10 if task is TASK else 6)


@pytest.mark.parametrize("layout", ["_#_/_$_/@_.", "@__/_$$/.._"])
def test_moves_left_are_those_of_a_search_forwards_from_every_state(layout):
    room, start = read_level(layout)
    left = solution_lengths(room, len(start[1]))
    states = reachable(game({"layout": layout}, on_target=0.1))
    assert len(states) > 20
    for state in states:
        assert left.get(state) == shortest_solution("/".join(draw_board(room, state)))
    assert any(state not in left for state in states)  # Deadlocks are states.


@pytest.mark.parametrize(
    ("before", "move", "after"),
    [
        ("___/_@_/__.", "up", "_@_/___/__."),
        ("_@_/___/__.", "up", "_@_/___/__."),  # The edge.
        ("_#_/_@_/__.", "up", "_#_/_@_/__."),  # A wall.
        ("___/@$_/__.", "right", "___/_@$/__."),
        ("___/_@$/__.", "right", "___/_@$/__."),  # A box against the edge,
        ("___/@$#/__.", "right", "___/@$#/__."),  # a wall,
        ("___/@$$/_..", "right", "___/@$$/_.."),  # and a box.
        ("___/$@_/__.", "right", "___/$_@/__."),  # Nothing is pulled.
        ("@__/*__/$_.", "right", "_@_/*__/$_."),
        ("_@_/_*_/_$_", "down", "_@_/_*_/_$_"),
        ("@__/$_./.__", "right", "_@_/$_./.__"),
        ("_+_/_$_/___", "left", "@._/_$_/___"),
    ],
)
def test_rules_on_drawn_boards(before, move, after):
    room, state = read_level(before)
    assert "/".join(draw_board(room, next_state(room, state, move))) == after


def test_a_box_comes_onto_targets_and_leaves_them():
    row = {"id": "two", "question": "?", "layout": "____/@$._/____/.$__"}
    opening, *done = play(TASK, row, ["right", "right", "fly", "Right"])
    assert opening.messages[0]["content"] == "?\n_ _ _ _\n@ $ . _\n_ _ _ _\n. $ _ _"
    assert done[0].observation.text == "_ _ _ _\n_ @ * _\n_ _ _ _\n. $ _ _"
    assert done[1].observation.text == "_ _ _ _\n_ _ + $\n_ _ _ _\n. $ _ _"
    assert [t.reward for t in done] == pytest.approx([0.1, -0.1, 0, 0])
    assert [dict(t.reward_parts) for t in done[:2]] == [{"goal": 0, "side": 0.1}, {"goal": 0, "side": -0.1}]
    assert done[2].info["errors"] == {"no_action": 1} and not done[3].terminated
    assert done[3].observation.state_key == done[1].observation.state_key


def test_the_last_box_pays_and_ends_the_episode():
    row = {"id": "two", "question": "?", "layout": "____/@$._/____/.$__"}
    *_, done = play(TASK, row, ["right", "down", "right", "down", "left"])
    assert (done.reward, done.terminated, done.outcome, done.observation) == (1, True, Outcome.ENV_DONE, None)
    assert done.metrics == pytest.approx({"em": 1, "success": 1, "return": 1.1, "expected_return": 1.1})


def test_the_potential_counts_moves_and_a_deadlock_is_farther_than_all():
    row = {"id": "one", "question": "?", "layout": "____/__$./_@__/____"}
    opening, *way = play(TASK, row, ["left", "right", "up", "right"])
    assert [o.potential for o in (opening, *(t.observation for t in way[:-1]))] == [-1, -3 / 2, -1, -1 / 2]
    assert way[-1].terminated
    stuck = play(TASK, row, ["right", "up"])[-1].observation
    assert stuck.text == "_ _ $ _\n_ _ @ .\n_ _ _ _\n_ _ _ _"
    room, start = read_level(row["layout"])
    assert stuck.potential == -(max(solution_lengths(room, 1).values()) + 1) / 2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 30), st.lists(st.sampled_from(list(MOVES)), max_size=12))
def test_the_best_return_is_the_goal_with_all_that_is_paid_on_the_way(index, texts):
    """What is paid for a box on a target is taken back where it leaves: no walk earns more than the optimum."""
    row = TWO.row("train", index)
    env = TWO.env()

    async def run():
        await env.reset(row, 0)
        for text in texts:
            if (await env.step(Action(np.zeros(0, np.int32), text))).terminated:
                break
        return env.truncate()

    on_targets = sum(sign == "*" for sign in row["layout"])
    cut = asyncio.run(run())
    played = game(row, on_target=0.1)
    optimum = max(action_values(played)[played.start].values())
    assert optimum == pytest.approx(1 + 0.1 * (1 - on_targets))
    assert cut["return"] <= optimum + 1e-9 and (cut["em"] == 1) == (cut["return"] > 0.5)


def expert_moves(task, row, seed):
    """Moves in which the expert solves a level; 0 where it does not within fifteen."""

    async def run():
        env, expert, observed = task.env(), task.expert(row, seed), None
        await env.reset(row, seed)
        for count in range(1, 16):
            done = await env.step(Action(np.zeros(0, np.int32), expert(observed)))
            if done.terminated:
                return count
            observed = done.observation.text
        return 0

    return asyncio.run(run())


def test_the_expert_is_as_good_as_its_mistakes_allow():
    perfect, poor = sokoban_task(mistakes=0.0), sokoban_task(mistakes=0.6)
    rows = [perfect.row("train", i) for i in range(25)]
    assert [expert_moves(perfect, row, 0) for row in rows] == [shortest_solution(row["layout"]) for row in rows]
    assert 0.1 < np.mean([expert_moves(poor, row, i) > 0 for i, row in enumerate(rows)]) < 0.9


def test_texts_hold_every_sign():
    signs = {sign for text in TASK.texts(400) for sign in text.split()}
    assert {"@", "+", "$", "*", ".", "#", "_", *MOVES} - {"*"} <= signs  # The last box ends the game: no * is shown.
    assert "*" in {sign for text in TWO.texts(400) for sign in text.split()}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"size": 6, "boxes": 2}, "size is 6 and boxes is 2: .* states; at most 2000 are allowed"),
        ({"walls": 1.0}, "leave too few layouts"),
        ({"least_moves": 11}, r"least_moves is 11, more than most_moves \(10\)"),
    ],
)
def test_wrong_settings_are_told(wrong, told):
    with pytest.raises(ValueError, match=told):
        sokoban_task(**wrong)


def test_the_config_is_a_task_whose_levels_can_be_solved_within_the_budget():
    config = sokoban.get_config()
    assert configured_task(config).name == "sokoban"
    config.task.sokoban.most_moves = 13
    with pytest.raises(
        UserError, match=r"up to task\.sokoban\.most_moves \(13\) moves, beyond budget\.max_steps \(12\)"
    ):
        configured_task(config)

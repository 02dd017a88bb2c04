"""Gymnasium's environments as a Task: against the bare ones step by step, in episodes of the agent, and what fails."""

from __future__ import annotations

import asyncio
import random
import sys
import warnings

import letters
import numpy as np
import pytest
from configured import configured_task

from agentr1_jax.contrib.gymnasium import (
    GymnasiumConfig,
    action_format,
    check_observation_space,
    make_gymnasium,
    observation_text,
)
from agentr1_jax.envs.base import Action, Task
from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.envs.tabular import NO_ACTION, GameRewards
from agentr1_jax.errors import UserError
from agentr1_jax.trajectory import Outcome
from configs import base, frozenlake

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces

LAKE = ("left", "down", "right", "up")
TAXI = ("south", "north", "east", "west", "pickup", "dropoff")
CASES = {
    "FrozenLake-v1": {"actions": LAKE},
    "Taxi-v4": {"actions": TAXI, "rewards": GameRewards(side=0.5)},
    "CartPole-v1": {"actions": ("left", "right"), "digits": 4, "success_return": 20.0},
}


def make_task(id, kwargs="", actions=(), **settings):
    return make_gymnasium(GymnasiumConfig(id=id, kwargs=kwargs, actions=actions, **settings), TaskContext())


def play(task, row, texts):
    """The first observation, then a transition for each text until the episode ends."""

    async def run():
        env, out = task.env(), []
        opening = await env.reset(row, 0)
        for text in texts:
            out.append(await env.step(Action(np.zeros(0, np.int32), text)))
            if out[-1].terminated or out[-1].truncated:
                break
        return opening, out, env.truncate()

    return asyncio.run(run())


@pytest.mark.parametrize("name", CASES)
def test_an_episode_is_the_bare_environments(name):
    """The same seed and actions: observations, rewards and ends agree, in episodes long enough to be truncated."""
    task, rng = make_task(name, **CASES[name]), np.random.default_rng(0)
    config = GymnasiumConfig(id=name, **CASES[name])
    weights = vars(config.rewards)
    ends = set()
    for index in range(3):
        row = task.row("train", index)
        chosen = rng.integers(0, len(config.actions), 300)
        opening, done, cut = play(task, row, [config.actions[i] for i in chosen])
        bare = gymnasium.make(name)
        first, _ = bare.reset(seed=index)
        assert opening.messages[0]["content"].endswith(observation_text(bare.observation_space, first, config.digits))
        total = 0.0
        for action, transition in zip(chosen, done, strict=False):
            after, reward, terminated, truncated, _ = bare.step(int(action))
            total += reward
            part = "goal" if terminated else "side"
            assert transition.reward == pytest.approx(weights[part] * reward)
            assert transition.reward_parts[part] == transition.reward
            assert (transition.terminated, transition.truncated) == (terminated, truncated and not terminated)
            if not terminated:
                assert transition.observation.text == observation_text(bare.observation_space, after, config.digits)
        assert cut["return"] == pytest.approx(total) and cut["em"] == float(total >= config.success_return)
        ends.add(done[-1].outcome)
        assert not (done[-1].terminated or done[-1].truncated) or done[-1].metrics == cut
        bare.close()
    assert ends <= {Outcome.ENV_DONE, Outcome.MAX_STEPS, None} and ends != {None}


def test_an_episode_of_the_agent_is_recorded():
    task = make_task("FrozenLake-v1", '{"is_slippery": false}', LAKE)
    checked: Task = task
    row = checked.row("eval", 3)
    assert row == {"id": "gymnasium/eval/3", "question": "", "seed": 10**9 + 3}
    way = ["down", "Down", "fly", "right", "right", "down", "right"]
    trajectory = letters.play(
        [text.lower() for text in way], task.env(), row=row, max_steps=9, context_tokens=2000, trajectory_tokens=4000
    )
    assert [step.reward for step in trajectory.steps] == [0, 0, 0, 0, 0, 0, 1]
    assert [step.info["errors"] for step in trajectory.steps] == [{}, {}, {"no_action": 1}, {}, {}, {}, {}]
    assert trajectory.outcome is Outcome.ENV_DONE and trajectory.metrics == {"em": 1, "success": 1, "return": 1}
    keys = [step.state_key for step in trajectory.steps]
    assert keys[:4] == [f"gymnasium/eval/3|{cell}" for cell in (0, 4, 8, 8)]


def test_a_limit_of_the_environment_truncates_and_the_budget_cuts():
    task = make_task("FrozenLake-v1", '{"is_slippery": false, "max_episode_steps": 2}', LAKE)
    row = task.row("train", 0)
    ended = letters.play(["left"] * 3, task.env(), row=row, max_steps=9, context_tokens=2000, trajectory_tokens=4000)
    assert ended.outcome is Outcome.MAX_STEPS and len(ended.steps) == 2 and ended.final_prompt_ids is not None
    cut = letters.play(["left"] * 3, task.env(), row=row, max_steps=1, context_tokens=2000, trajectory_tokens=4000)
    assert cut.outcome is Outcome.MAX_STEPS and len(cut.steps) == 1 and cut.metrics["return"] == 0


def test_what_is_no_action_does_not_reach_the_environment():
    task = make_task("FrozenLake-v1", '{"is_slippery": false}', LAKE, instruction="Over the ice.")
    opening, done, _ = play(task, task.row("train", 0), ["down", "7", "jump over", " DOWN "])
    assert opening.messages[0]["content"] == "Over the ice.\nSay one of: left, down, right, up.\n0"
    assert done[1].observation.text == f"{NO_ACTION} Say one of: left, down, right, up.\n4"
    assert [t.observation.text for t in (done[0], done[3])] == ["4", "8"]
    assert [t.action_key for t in done] == ["1", NO_ACTION, NO_ACTION, "1"]
    numbers = make_task("FrozenLake-v1")
    opening, done, _ = play(numbers, numbers.row("train", 0), ["4", "left", "3"])
    assert "Say a number from 0 to 3." in opening.messages[0]["content"]
    assert [t.info["errors"] for t in done] == [{"no_action": 1}, {"no_action": 1}, {}]


def test_ansi_is_the_environments_own_drawing_with_colours_as_brackets():
    task = make_task("FrozenLake-v1", '{"is_slippery": false}', LAKE, observation="ansi")
    opening, done, _ = play(task, task.row("train", 0), ["right"])
    assert opening.messages[0]["content"].endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert done[0].observation.text == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"


@pytest.mark.parametrize(
    ("space", "value", "told"),
    [
        (spaces.Discrete(5, start=2), np.int64(3), "3"),
        (spaces.MultiDiscrete([3, 4]), np.array([2, 1]), "2 1"),
        (spaces.Box(-9, 9, (3,)), np.array([1.23456, -0.000123456, np.inf], np.float32), "1.23 -0.000123 inf"),
        (spaces.Box(0, 255, (2, 2), np.uint8), np.array([[0, 255], [7, 1]], np.uint8), "0 255\n7 1"),
        (spaces.Box(-1, 1, ()), np.float32(0.5), "0.5"),
        (spaces.Text(9), "a b", "a b"),
        (spaces.Tuple([spaces.Discrete(9), spaces.Text(4)]), (4, "x"), "4; x"),
        (spaces.Dict({"b": spaces.Discrete(9), "a": spaces.MultiBinary(2)}), {"a": [0, 1], "b": 4}, "a: 0 1\nb: 4"),
    ],
    ids=str,
)
def test_observations_in_words(space, value, told):
    check_observation_space(space, 8)
    if isinstance(space, spaces.Dict):
        told = "\n".join(sorted(told.split("\n"), key=lambda line: list(space.spaces).index(line[0])))
    assert observation_text(space, value, 3) == told


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(5, start=-2), spaces.MultiDiscrete([3, 4, 2]), spaces.Text(6, min_length=2, charset="abc")],
    ids=str,
)
def test_what_is_drawn_can_be_said_and_is_an_action(space):
    actions, rng = action_format(space), random.Random(0)
    read = [actions.read(actions.sample(rng)) for _ in range(200)]
    assert all(space.contains(action) for action in read) and len({str(action) for action in read}) > 4


def test_what_breaks_a_space_is_no_action():
    numbers = action_format(spaces.MultiDiscrete([3, 4]))
    assert numbers.instruction == "Say 2 numbers: 0 to 2, 0 to 3."
    assert [numbers.read(said) for said in ("3 0", "0", "0 1 2", "a b", "", "-1 0")] == [None] * 6
    assert numbers.read(" 2,3 ").tolist() == [2, 3]
    text = action_format(spaces.Text(3, charset="ab"))
    assert text.instruction == "Say a text of 1 to 3 characters."
    assert [text.read(said) for said in ("abba", "c", " ", " ab ")] == [None, None, None, "ab"]


class Odd(gymnasium.Env):
    """Has any spaces, and does what it is told to."""

    def __init__(self, observed=None, acted=None, step=None):
        self.observation_space = spaces.Discrete(2) if observed is None else observed
        self.action_space = spaces.Discrete(2) if acted is None else acted
        self._step = step

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return self._step()


@pytest.fixture
def odd():
    """Registers an Odd environment; returns its id."""

    def register(**settings):
        gymnasium.register("Odd-v0", entry_point=lambda render_mode=None: Odd(**settings))
        return "Odd-v0"

    yield register
    gymnasium.registry.pop("Odd-v0", None)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"acted": spaces.Box(-1, 1, (2,))}, r"action space Box\(.*\) cannot be written as text; Discrete, MultiDis"),
        ({"observed": spaces.Sequence(spaces.Discrete(2))}, "observation space Sequence.* cannot be written as text"),
        (
            {"observed": spaces.Dict({"a": spaces.Graph(spaces.Discrete(2), None)})},
            r"observation space Graph.* \(in Dict.* Discrete, MultiDiscrete, MultiBinary, Box, Text, Tuple, Dict can",
        ),
        (
            {"observed": spaces.Box(0, 255, (84, 84))},
            r"observation space Box.* has 7056 numbers, more than task\.gymnasium\.most_numbers",
        ),
    ],
)
def test_spaces_without_words_are_refused_at_start(odd, settings, told):
    name = odd(**settings)
    with pytest.raises(ValueError, match=rf"task\.gymnasium\.id 'Odd-v0': its {told}"):
        make_task(name)


def test_what_draws_nothing_in_letters_is_refused_at_start(odd, monkeypatch):
    monkeypatch.setattr(Odd, "metadata", {"render_modes": ["human", "rgb"]})
    told = r"task\.gymnasium\.id 'Odd-v0': it draws nothing in letters \(its render modes are human, rgb\)"
    with warnings.catch_warnings(action="ignore"), pytest.raises(ValueError, match=told):
        make_task(odd(), observation="ansi")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"id": "Nowhere-v0"}, r"'Nowhere-v0' with kwargs {} cannot be made \(NameNotFound"),
        ({"kwargs": "[1]"}, r"task\.gymnasium\.kwargs: '\[1\]' is not .*it is no object\); write e\.g\. "),
        ({"kwargs": '{"nonsense": 1}'}, "cannot be made .*nonsense"),
        ({"actions": ("a", "b")}, r"has 2 names \(a, b\); its action space Discrete\(4\) needs 4 that differ"),
        ({"actions": ("a", "A", "b", "c")}, "needs 4 that differ"),
    ],
)
def test_wrong_settings_are_told(settings, told):
    with pytest.raises(ValueError, match=told):
        make_task(**{"id": "FrozenLake-v1"} | settings)


def test_a_missing_extra_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"pip install 'agentr1_jax\[gymnasium\]'"):
        make_task("FrozenLake-v1")


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (lambda: fail(ZeroDivisionError("of it")), "ZeroDivisionError: of it"),
        (lambda: fail(SystemExit(3)), "SystemExit: 3"),
        (lambda: (0, float("nan"), False, False, {}), "ValueError: Odd-v0: its reward is nan, after the action '1'"),
    ],
)
def test_what_an_environment_raises_is_its_episodes_failure(odd, step, told):
    task = make_task(odd(step=step))
    trajectory = letters.attempt(task, task.row("train", 0), "1")
    assert trajectory.outcome is Outcome.ENV_FAILURE and told in trajectory.info["error"]


def test_success_is_what_the_environment_says(odd):
    task = make_task(odd(step=lambda: (1, 5.0, True, False, {"is_success": False})))
    _, done, cut = play(task, task.row("train", 0), ["0"])
    assert done[0].metrics == cut == {"em": 0.0, "success": 0.0, "return": 5.0}


def test_rows_are_seeds():
    task = make_task("CartPole-v1")
    assert len({task.row(split, i)["seed"] for split in ("train", "eval", "dev") for i in (0, 1)}) == 6
    openings = {play(task, task.row("train", i), [])[0].messages[0]["content"] for i in (0, 1, 1)}
    assert len(openings) == 2


def test_the_expert_says_random_actions_and_texts_show_play():
    task = make_task("FrozenLake-v1", actions=LAKE)
    row = task.row("train", 0)
    assert {task.expert(row, seed)(None) for seed in range(40)} == set(LAKE)
    assert task.expert(row, 1)(None) == task.expert(row, 1)(None)
    texts = task.texts(40)
    assert len(texts) == 40 and {*LAKE} & {*texts} and any(text.startswith("Say one of") for text in texts)


def test_a_config_makes_it():
    config = frozenlake.get_config()
    base.set_task(config, "gymnasium")
    with pytest.raises(UserError, match=r"task\.gymnasium\.id is ''; it must have"):
        configured_task(config)
    config.task.gymnasium.id, config.task.gymnasium.actions = "FrozenLake-v1", LAKE
    task = configured_task(config)
    opening, *_ = play(task, task.row("eval", 0), [])
    assert "left, down, right, up" in opening.messages[0]["content"]

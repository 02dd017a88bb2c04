"""Task `gymnasium`: any environment of Gymnasium (https://gymnasium.farama.org), observations and actions as text.

Spaces are recognised by class name, so that this module can be imported without Gymnasium.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Le, MinLen
from pydantic.dataclasses import dataclass

from agentr1_jax.contrib import read_arguments
from agentr1_jax.envs.base import Action, Expert, Observation, Row, Transition
from agentr1_jax.envs.datasets import ProceduralTask
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tabular import NO_ACTION, REWARD_PARTS, GameRewards
from agentr1_jax.tools.base import run_in_thread
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import STRICT, Count, Finite

SEEDS = {"train": 0, "eval": 10**9, "dev": 2 * 10**9}
"""Seed of a split's first row."""
SUCCESS = ("is_success", "success")
"""Keys of the last step's info by which environments report success."""
SAMPLE_STEPS = 50
"""Limit on the random steps of one row in `texts`."""
OBSERVATION_SPACES = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text", "Tuple", "Dict")
ACTION_SPACES = ("Discrete", "MultiDiscrete", "Text")
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, config=STRICT)
class GymnasiumConfig:
    """Keys of `task.gymnasium`."""

    id: Annotated[str, MinLen(1)] = ""
    """id in Gymnasium's registry, e.g. FrozenLake-v1; module:Name-v0 imports the module first"""
    kwargs: str = ""
    """keyword arguments of gymnasium.make: the text of a JSON object; "" for none"""
    actions: tuple[str, ...] = ()
    """names of a Discrete space's actions, in order; () for numbers"""
    instruction: str = ""
    """first line of the opening, before the sentence that lists the actions"""
    observation: Literal["text", "ansi"] = "text"
    """text: written from the space; ansi: the environment's drawing, coloured parts in brackets"""
    digits: Annotated[int, Ge(1), Le(17)] = 3
    """significant digits of a Box's numbers"""
    most_numbers: Count = 256
    """limit on the numbers of an observation"""
    success_return: Finite = 1.0
    """least return of a successful episode (em), unless the environment reports success itself"""
    rewards: GameRewards = GameRewards()
    """weights of goal, the reward of the step that terminates, and side, that of all other steps"""


@register("gymnasium", GymnasiumConfig)
def make_gymnasium(config: GymnasiumConfig, run: TaskContext) -> ProceduralTask:
    """Return the Task. A row is a seed of `reset`; the expert takes random actions: it demonstrates their form only.

    The episodes of a group start in the same state, and their chance events are equal as long as their actions are.

    Raises:
      ValueError: see `TextGame`.
    """
    game = TextGame(config)

    def make_row(split: str, index: int) -> Row:
        return {"id": f"gymnasium/{split}/{index}", "question": config.instruction, "seed": SEEDS[split] + index}

    def make_expert(row: Row, seed: int) -> Expert:
        rng = random.Random(f"{row['id']}/expert/{seed}")
        return lambda observation: game.actions.sample(rng)

    return ProceduralTask(
        name="gymnasium",
        splits=tuple(SEEDS),
        make_row=make_row,
        make_env=lambda: GymnasiumEnv(game),
        reward_parts=REWARD_PARTS,
        make_expert=make_expert,
        make_texts=lambda: _texts(game, make_row),
    )


class TextGame:
    """An environment of Gymnasium's registry, and its observations and actions as text.

    Raises:
      ValueError: Gymnasium is not installed, does not know the id or refuses the arguments, or a space cannot be
        written as text.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config = config
        self.reward_weights = dataclasses.asdict(config.rewards)
        with contextlib.closing(self.make()) as env:
            try:
                self.actions = action_format(env.action_space, config.actions)
                if config.observation == "text":
                    check_observation_space(env.observation_space, config.most_numbers)
                elif "ansi" not in (modes := env.metadata.get("render_modes") or ()):
                    raise ValueError(
                        f"it draws nothing in letters (its render modes are {', '.join(modes) or 'none'}); set "
                        "task.gymnasium.observation=text"
                    )
            except ValueError as error:
                raise ValueError(f"task.gymnasium.id {config.id!r}: {error}") from error

    def make(self) -> Any:
        """Make an environment of Gymnasium. Raises ValueError where that fails."""
        try:
            import gymnasium
        except ImportError as error:
            raise ValueError(
                "task 'gymnasium' needs gymnasium, which is not installed: pip install 'agentr1_jax[gymnasium]'"
            ) from error
        kwargs = read_arguments("task.gymnasium.kwargs", self.config.kwargs)
        if self.config.observation == "ansi":
            kwargs["render_mode"] = "ansi"
        try:
            return gymnasium.make(self.config.id, disable_env_checker=True, **kwargs)
        except Exception as error:  # Environments raise what they like.
            raise ValueError(
                f"task.gymnasium.id {self.config.id!r} with kwargs {self.config.kwargs or '{}'} cannot be made "
                f"({type(error).__name__}: {error})"
            ) from error

    def observation_text(self, env: Any, value: Any) -> str:
        """Return an observation of an environment of Gymnasium as text."""
        if self.config.observation == "ansi":
            drawing = str(env.render())
            return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", drawing)).strip("\n")
        return observation_text(env.observation_space, value, self.config.digits)

    def opening(self, first: str) -> str:
        """Return the first message of an episode whose first observation is `first`."""
        return "\n".join(part for part in (self.config.instruction, self.actions.instruction, first) if part)


def _texts(game: TextGame, make_row: Callable[[str, int], Row]) -> Iterator[str]:
    """Yield openings, observations and actions of random play on training rows, without end."""
    yield NO_ACTION
    with contextlib.closing(game.make()) as env:
        for index in itertools.count():
            row = make_row("train", index)
            rng = random.Random(f"{row['id']}/texts")
            yield game.opening(game.observation_text(env, env.reset(seed=row["seed"])[0]))
            for _ in range(SAMPLE_STEPS):
                action = game.actions.sample(rng)
                value, _, terminated, truncated, _ = env.step(game.actions.read(action))
                yield from (action, game.observation_text(env, value))
                if terminated or truncated:
                    break


class GymnasiumEnv:
    """Env of a `TextGame`. A response that is no action is counted and answered without a step of the environment.

    Calls run in a thread, since an environment may compute for long. An exception of the environment fails the episode;
    the runner counts it as `env_failure`.
    """

    def __init__(self, game: TextGame) -> None:
        self._game = game
        self._env: Any = None
        self._success: float | None = None

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode with the row's seed; `seed` is not used."""
        self._row, self._return, self._success = row, 0.0, None
        self._text = await run_in_thread(self._begin, row["seed"])
        opening = self._game.opening(self._text)
        return Observation(messages=[{"role": "user", "content": opening}], state_key=self._key())

    async def step(self, action: Action) -> Transition:
        """Apply one response."""
        value = self._game.actions.read(action.text)
        if value is None:
            text = f"{NO_ACTION} {self._game.actions.instruction}\n{self._text}"
            return Transition(
                observation=Observation(text=text, role="user", state_key=self._key()),
                reward=0.0,
                reward_parts=dict.fromkeys(REWARD_PARTS, 0.0),
                action_key=NO_ACTION,
                info={"errors": {"no_action": 1}},
            )
        text, reward, terminated, truncated, info = await run_in_thread(self._apply, value)
        if not math.isfinite(reward):
            raise ValueError(f"{self._game.config.id}: its reward is {reward}, after the action {action.text!r}")
        self._text, self._return = text, self._return + reward
        self._success = next((float(info[key]) for key in SUCCESS if key in info), None)
        raw = dict(zip(REWARD_PARTS, (reward, 0.0) if terminated else (0.0, reward), strict=True))
        parts = {name: self._game.reward_weights[name] * value for name, value in raw.items()}
        return Transition(
            observation=None if terminated else Observation(text=text, role="user", state_key=self._key()),
            reward=sum(parts.values()),
            reward_parts=parts,
            terminated=terminated,
            truncated=truncated and not terminated,
            outcome=Outcome.ENV_DONE if terminated else Outcome.MAX_STEPS if truncated else None,
            metrics=self.truncate() if terminated or truncated else {},
            action_key=str(value),
            info={"errors": {}},
        )

    def truncate(self) -> Mapping[str, float]:
        """Return `success` (also as `em`) and the unweighted `return` of the episode so far."""
        success = float(self._return >= self._game.config.success_return) if self._success is None else self._success
        return {"em": success, "success": success, "return": self._return}

    def _begin(self, seed: int) -> str:
        if self._env is None:
            self._env = self._game.make()
            weakref.finalize(self, self._env.close)
        value, _ = self._env.reset(seed=seed)
        return self._game.observation_text(self._env, value)

    def _apply(self, action: Any) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        value, reward, terminated, truncated, info = self._env.step(action)
        text = self._game.observation_text(self._env, value)
        return text, float(reward), bool(terminated), bool(truncated), info

    def _key(self) -> str:
        return f"{self._row['id']}|{self._text}"


def observation_text(space: Any, value: Any, digits: int) -> str:
    """Return an observation of a space as text; `digits` is the number of significant digits of floats."""
    kind = type(space).__name__
    if kind == "Dict":
        return "\n".join(f"{key}: {observation_text(inner, value[key], digits)}" for key, inner in space.spaces.items())
    if kind == "Tuple":
        return "; ".join(observation_text(s, v, digits) for s, v in zip(space.spaces, value, strict=True))
    if kind == "Text":
        return str(value)
    array = np.atleast_1d(value)
    return "\n".join(_line(row, digits) for row in array.reshape(-1, array.shape[-1]))


def _line(values: np.ndarray, digits: int) -> str:
    if values.dtype.kind in "biu":
        return " ".join(str(int(x)) for x in values)
    return " ".join(f"{float(x):.{digits}g}" for x in values)


def check_observation_space(space: Any, most_numbers: int) -> None:
    """Raise ValueError where observations of a space cannot be written as text, or have more than `most_numbers`."""
    numbers = 0
    for inner in _leaves(space):
        if type(inner).__name__ not in OBSERVATION_SPACES:
            part = "" if inner is space else f" (in {space})"
            raise ValueError(
                f"its observation space {inner}{part} cannot be written as text; "
                f"{', '.join(OBSERVATION_SPACES)} can, or the environment's own text (task.gymnasium.observation=ansi)"
            )
        numbers += 1 if type(inner).__name__ in ("Discrete", "Text") else int(np.prod(inner.shape))
    if numbers > most_numbers:
        raise ValueError(
            f"its observation space {space} has {numbers} numbers, more than task.gymnasium.most_numbers "
            f"({most_numbers}); raise it, or wrap the environment"
        )


def _leaves(space: Any) -> Iterator[Any]:
    kind = type(space).__name__
    if kind not in ("Dict", "Tuple"):
        yield space
    else:
        yield from itertools.chain(*map(_leaves, space.spaces.values() if kind == "Dict" else space.spaces))


class ActionFormat(NamedTuple):
    """Text form of the actions of a space.

    Attributes:
      instruction: one sentence for the policy.
      read: text of a response -> the action; None where the text is no action.
      sample: returns the text of a random action.
    """

    instruction: str
    read: Callable[[str], Any]
    sample: Callable[[random.Random], str]


def action_format(space: Any, names: Sequence[str] = ()) -> ActionFormat:
    """Return the text form of a space of actions; `names` are those of a Discrete space, in order, () for numbers.

    Raises:
      ValueError: the space is none of `ACTION_SPACES`, or the names do not fit it.
    """
    kind = type(space).__name__
    if kind not in ACTION_SPACES or (kind == "MultiDiscrete" and len(space.shape) != 1):
        raise ValueError(
            f"its action space {space} cannot be written as text; {', '.join(ACTION_SPACES)} of one dimension can"
        )
    if names and kind != "Discrete":
        raise ValueError(f"task.gymnasium.actions names actions, and its action space {space} has none to name")
    if kind == "Discrete":
        return _discrete(space, [_normalize(name) for name in names])
    if kind == "MultiDiscrete":
        return _multi_discrete(space)
    return ActionFormat(
        f"Say a text of {space.min_length} to {space.max_length} characters.",
        lambda text: text.strip() if space.contains(text.strip()) else None,
        lambda rng: "".join(
            rng.choices(sorted(space.character_set), k=rng.randint(space.min_length, space.max_length))
        ),
    )


def _normalize(text: str) -> str:
    return " ".join(text.lower().split())


def _discrete(space: Any, names: Sequence[str]) -> ActionFormat:
    start, count = int(space.start), int(space.n)
    if names and (len(names) != count or len(set(names)) != count or not all(names)):
        raise ValueError(
            f"task.gymnasium.actions has {len(names)} names ({', '.join(names)}); its action space {space} needs "
            f"{count} that differ"
        )
    known = dict(zip(names or map(str, range(start, start + count)), range(start, start + count), strict=True))
    if names:
        instruction = f"Say one of: {', '.join(names)}."
    else:
        instruction = f"Say a number from {start} to {start + count - 1}."
    return ActionFormat(instruction, lambda text: known.get(_normalize(text)), lambda rng: rng.choice(list(known)))


def _multi_discrete(space: Any) -> ActionFormat:
    lows, counts = np.asarray(space.start).tolist(), np.asarray(space.nvec).tolist()
    ranges = [range(low, low + count) for low, count in zip(lows, counts, strict=True)]

    def read(text: str) -> Any:
        try:
            numbers = [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            return None
        fits = len(numbers) == len(ranges) and all(n in allowed for n, allowed in zip(numbers, ranges, strict=True))
        return np.asarray(numbers, space.dtype) if fits else None

    bounds = ", ".join(f"{allowed[0]} to {allowed[-1]}" for allowed in ranges)
    return ActionFormat(
        f"Say {len(ranges)} numbers: {bounds}.",
        read,
        lambda rng: " ".join(str(rng.choice(allowed)) for allowed in ranges),
    )

"""Task `gymnasium`: any environment of Gymnasium (https://gymnasium.farama.org), observations and actions as text."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import random
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic.dataclasses import dataclass

from agentr1_jax.contrib.gymnasium.spaces import ActionFormat, action_format, check_observation_space, observation_text
from agentr1_jax.envs.base import Action, Expert, Observation, Row, Transition
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tabular import NO_ACTION, REWARD_PARTS, GameRewards
from agentr1_jax.tools.base import run_in_thread
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import STRICT, Count, Finite

SEEDS = {"train": 0, "eval": 10**9, "dev": 2 * 10**9}
"""Seed of a split's first row; a split has 10^9 rows."""
SUCCESS = ("is_success", "success")
"""Keys of the last step's info by which environments report success."""
SAMPLE_STEPS = 50
"""Limit on the random steps of one row in `texts`."""
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


class GymnasiumTask:
    """An environment of Gymnasium's registry as a Task; a row is a seed of `reset`.

    The episodes of a group start in the same state, and their chance events are equal as long as their actions are.

    Raises:
      ValueError: Gymnasium is not installed, does not know the id or refuses the arguments, or a space cannot be
        written as text.
    """

    name = "gymnasium"

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config = config
        self.reward_weights = dataclasses.asdict(config.rewards)
        with contextlib.closing(self.make()) as env:
            try:
                self.action_format(env)
                if config.observation == "text":
                    check_observation_space(env.observation_space, config.most_numbers)
                elif "ansi" not in (modes := env.metadata.get("render_modes") or ()):
                    raise ValueError(
                        f"it draws nothing in letters (its render modes are {', '.join(modes) or 'none'}); set "
                        "task.gymnasium.observation=text"
                    )
            except ValueError as error:
                raise ValueError(f"task.gymnasium.id {config.id!r}: {error}") from error

    @property
    def reward_parts(self) -> Sequence[str]:
        """Reward of the last step, and of all other steps."""
        return REWARD_PARTS

    def row(self, split: str, index: int) -> Row:
        """Return row `index` of a split. Raises ValueError on another split or an index beyond its seeds."""
        if split not in SEEDS or not 0 <= index < SEEDS["eval"]:
            raise ValueError(f"gymnasium has no row {split!r} {index}; splits are {', '.join(SEEDS)}, rows start at 0")
        return {"id": f"gymnasium/{split}/{index}", "question": self.config.instruction, "seed": SEEDS[split] + index}

    def size(self, split: str) -> int | None:
        """Return None: rows are seeds."""
        return None

    def env(self) -> GymnasiumEnv:
        """Return a new environment."""
        return GymnasiumEnv(self)

    def expert(self, row: Row, seed: int) -> Expert:
        """Return an expert that takes random actions: it demonstrates their form only."""
        rng = random.Random(f"{row['id']}/expert/{seed}")
        with contextlib.closing(self.make()) as env:
            actions = self.action_format(env)
        return lambda observation: actions.sample(rng)

    def texts(self, count: int) -> Sequence[str]:
        """Return openings, observations and actions of random play on training rows, one per text."""
        return list(itertools.islice(self._texts(), count))

    def make(self) -> Any:
        """Make an environment of Gymnasium. Raises ValueError where that fails."""
        try:
            import gymnasium
        except ImportError as error:
            raise ValueError(
                "task 'gymnasium' needs gymnasium, which is not installed: pip install 'agentr1_jax[gymnasium]'"
            ) from error
        try:
            kwargs = json.loads(self.config.kwargs or "{}")
            if not isinstance(kwargs, dict):
                raise TypeError("it is no object")
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"task.gymnasium.kwargs: {self.config.kwargs!r} is not the text of a JSON object ({error}); write e.g. "
                '{"map_name": "8x8"}'
            ) from error
        if self.config.observation == "ansi":
            kwargs["render_mode"] = "ansi"
        try:
            return gymnasium.make(self.config.id, disable_env_checker=True, **kwargs)
        except Exception as error:  # Environments raise what they like.
            raise ValueError(
                f"task.gymnasium.id {self.config.id!r} with kwargs {self.config.kwargs or '{}'} cannot be made "
                f"({type(error).__name__}: {error})"
            ) from error

    def action_format(self, env: Any) -> ActionFormat:
        """Return the text form of the actions of an environment of Gymnasium."""
        return action_format(env.action_space, self.config.actions)

    def observation_text(self, env: Any, value: Any) -> str:
        """Return an observation of an environment of Gymnasium as text."""
        if self.config.observation == "ansi":
            drawing = str(env.render())
            return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", drawing)).strip("\n")
        return observation_text(env.observation_space, value, self.config.digits)

    def opening(self, actions: ActionFormat, first: str) -> str:
        """Return the first message of an episode whose first observation is `first`."""
        return "\n".join(part for part in (self.config.instruction, actions.instruction, first) if part)

    def _texts(self) -> Iterator[str]:
        yield NO_ACTION
        with contextlib.closing(self.make()) as env:
            actions = self.action_format(env)
            for index in itertools.count():
                row = self.row("train", index)
                rng = random.Random(f"{row['id']}/texts")
                yield self.opening(actions, self.observation_text(env, env.reset(seed=row["seed"])[0]))
                for _ in range(SAMPLE_STEPS):
                    action = actions.sample(rng)
                    value, _, terminated, truncated, _ = env.step(actions.read(action))
                    yield from (action, self.observation_text(env, value))
                    if terminated or truncated:
                        break


class GymnasiumEnv:
    """Env of a `GymnasiumTask`. A response that is no action is counted and answered without a step of the environment.

    Calls run in a thread, since an environment may compute for long. An exception of the environment fails the episode;
    the runner counts it as `env_failure`.
    """

    def __init__(self, task: GymnasiumTask) -> None:
        self._task = task
        self._env: Any = None
        self._success: float | None = None

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode with the row's seed; `seed` is not used."""
        self._row, self._return, self._success = row, 0.0, None
        self._text = await run_in_thread(self._begin, row["seed"])
        opening = self._task.opening(self._actions, self._text)
        return Observation(messages=[{"role": "user", "content": opening}], state_key=self._key())

    async def step(self, action: Action) -> Transition:
        """Apply one response."""
        value = self._actions.read(action.text)
        if value is None:
            text = f"{NO_ACTION} {self._actions.instruction}\n{self._text}"
            return Transition(
                observation=Observation(text=text, role="user", state_key=self._key()),
                reward=0.0,
                reward_parts=dict.fromkeys(REWARD_PARTS, 0.0),
                info={"errors": {"no_action": 1}},
            )
        text, reward, terminated, truncated, info = await run_in_thread(self._apply, value)
        if not math.isfinite(reward):
            raise ValueError(f"{self._task.config.id}: its reward is {reward}, after the action {action.text!r}")
        self._text, self._return = text, self._return + reward
        self._success = next((float(info[key]) for key in SUCCESS if key in info), None)
        raw = dict(zip(REWARD_PARTS, (reward, 0.0) if terminated else (0.0, reward), strict=True))
        parts = {name: self._task.reward_weights[name] * value for name, value in raw.items()}
        ended = terminated or truncated
        return Transition(
            observation=None if terminated else Observation(text=text, role="user", state_key=self._key()),
            reward=sum(parts.values()),
            reward_parts=parts,
            terminated=terminated,
            truncated=truncated and not terminated,
            outcome=Outcome.ENV_DONE if terminated else Outcome.MAX_STEPS if truncated else None,
            metrics=self.truncate() if ended else {},
            info={"errors": {}},
        )

    def truncate(self) -> Mapping[str, float]:
        """Return `success` (also as `em`) and the unweighted `return` of the episode so far."""
        success = float(self._return >= self._task.config.success_return) if self._success is None else self._success
        return {"em": success, "success": success, "return": self._return}

    def _begin(self, seed: int) -> str:
        if self._env is None:
            self._env = self._task.make()
            weakref.finalize(self, self._env.close)
            self._actions = self._task.action_format(self._env)
        value, _ = self._env.reset(seed=seed)
        return self._task.observation_text(self._env, value)

    def _apply(self, action: Any) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        value, reward, terminated, truncated, info = self._env.step(action)
        text = self._task.observation_text(self._env, value)
        return text, float(reward), bool(terminated), bool(truncated), info

    def _key(self) -> str:
        return f"{self._row['id']}|{self._text}"


@register("gymnasium", GymnasiumConfig)
def make_gymnasium(config: GymnasiumConfig, run: TaskContext) -> GymnasiumTask:
    """Return the Task; see `GymnasiumTask`."""
    return GymnasiumTask(config)

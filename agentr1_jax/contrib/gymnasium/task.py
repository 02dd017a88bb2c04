"""Any environment of Gymnasium (https://gymnasium.farama.org) as a Task: observations in words, actions by name."""

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
from typing import Any

from agentr1_jax.contrib.gymnasium.spaces import Actions, actions_of, check_observation_space, observation_text
from agentr1_jax.envs.base import Action, Expert, Observation, Row, Transition
from agentr1_jax.envs.tabular_task import NO_ACTION, REWARD_PARTS
from agentr1_jax.tools.threads import in_thread
from agentr1_jax.trajectory import Outcome

SEEDS = {"train": 0, "eval": 10**9, "dev": 2 * 10**9}
"""The seed of a split's first row; a split has as many as lie between."""
SUCCESS = ("is_success", "success")
"""Keys of the last step's info by which environments say that an episode went well."""
STEPS_OF_A_TEXT = 50
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclasses.dataclass(frozen=True)
class GymnasiumTask:
    """An environment of Gymnasium's registry as a Task; a row is a seed of `reset`.

    Members of a group start alike, and meet the same chance as long as they act alike.

    Attributes:
      id: by which `gymnasium.make` knows the environment; `module:Name-v0` imports the module first.
      kwargs: of `gymnasium.make`, as the text of a JSON object; "" for none.
      actions: names of a Discrete space's actions, in their order; () for numbers.
      instruction: opens an episode, before the sentence that says what can be said.
      observation: `text` (of the space) or `ansi` (what the environment draws; coloured parts stand in brackets).
      digits: significant digits of a Box's numbers.
      most_numbers: of an observation.
      success_return: an episode that returns so much counts as a success (`em`), where its last info has none of
        `SUCCESS`.
      reward_weights: of `goal`, the reward of the step that terminates, and `side`, that of all others.

    Raises:
      ValueError: Gymnasium is not installed, does not know the id or refuses the arguments, or a space has no words.
    """

    id: str
    kwargs: str = ""
    actions: Sequence[str] = ()
    instruction: str = ""
    observation: str = "text"
    digits: int = 3
    most_numbers: int = 256
    success_return: float = 1.0
    reward_weights: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(REWARD_PARTS, 1.0))

    name = "gymnasium"

    def __post_init__(self) -> None:
        if self.observation not in ("text", "ansi"):
            raise ValueError(f"task.gymnasium.observation is {self.observation!r}; choose text or ansi")
        if self.digits < 1:
            raise ValueError(f"task.gymnasium.digits is {self.digits}; it must be at least 1")
        with contextlib.closing(self.made()) as made:
            try:
                self.spoken(made)
                if self.observation == "text":
                    check_observation_space(made.observation_space, self.most_numbers)
                elif "ansi" not in (modes := made.metadata.get("render_modes") or ()):
                    raise ValueError(
                        f"it draws nothing in letters (its render modes are {', '.join(modes) or 'none'}); set "
                        "task.gymnasium.observation=text"
                    )
            except ValueError as error:
                raise ValueError(f"task.gymnasium.id {self.id!r}: {error}") from error

    @property
    def reward_parts(self) -> Sequence[str]:
        """What the end pays, and what is paid on the way."""
        return REWARD_PARTS

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split. Raises ValueError on another split or an index beyond its seeds."""
        if split not in SEEDS or not 0 <= index < SEEDS["eval"]:
            raise ValueError(f"gymnasium has no row {split!r} {index}; splits are {', '.join(SEEDS)}, rows start at 0")
        return {"id": f"gymnasium/{split}/{index}", "question": self.instruction, "seed": SEEDS[split] + index}

    def size(self, split: str) -> int | None:
        """None: there are as many rows as seeds."""
        return None

    def env(self) -> GymnasiumEnv:
        """A fresh environment."""
        return GymnasiumEnv(self)

    def expert(self, row: Row, seed: int) -> Expert:
        """Random actions: it knows how actions are said, and no more."""
        rng = random.Random(f"{row['id']}/expert/{seed}")
        with contextlib.closing(self.made()) as made:
            actions = self.spoken(made)
        return lambda observed: actions.drawn(rng)

    def texts(self, count: int) -> Sequence[str]:
        """Openings, observations and actions of random play on training rows, one a text."""
        return list(itertools.islice(self._texts(), count))

    def made(self) -> Any:
        """A new environment of Gymnasium's. Raises ValueError where there is none."""
        try:
            import gymnasium
        except ImportError as error:
            raise ValueError(
                "task 'gymnasium' needs gymnasium, which is not installed: pip install 'agentr1_jax[gymnasium]'"
            ) from error
        try:
            kwargs = json.loads(self.kwargs or "{}")
            if not isinstance(kwargs, dict):
                raise TypeError("it is no object")
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"task.gymnasium.kwargs: {self.kwargs!r} is not the text of a JSON object ({error}); write e.g. "
                '{"map_name": "8x8"}'
            ) from error
        if self.observation == "ansi":
            kwargs["render_mode"] = "ansi"
        try:
            return gymnasium.make(self.id, disable_env_checker=True, **kwargs)
        except Exception as error:  # Environments raise what they like.
            raise ValueError(
                f"task.gymnasium.id {self.id!r} with kwargs {self.kwargs or '{}'} cannot be made "
                f"({type(error).__name__}: {error})"
            ) from error

    def spoken(self, made: Any) -> Actions:
        """How the actions of an environment are said."""
        return actions_of(made.action_space, self.actions)

    def told(self, made: Any, observed: Any) -> str:
        """An observation of an environment in words."""
        if self.observation == "ansi":
            drawn = str(made.render())
            return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", drawn)).strip("\n")
        return observation_text(made.observation_space, observed, self.digits)

    def opening(self, actions: Actions, told: str) -> str:
        """The first message of an episode."""
        return "\n".join(part for part in (self.instruction, actions.told, told) if part)

    def _texts(self) -> Iterator[str]:
        yield NO_ACTION
        with contextlib.closing(self.made()) as made:
            actions = self.spoken(made)
            for index in itertools.count():
                row = self.row("train", index)
                rng = random.Random(f"{row['id']}/texts")
                yield self.opening(actions, self.told(made, made.reset(seed=row["seed"])[0]))
                for _ in range(STEPS_OF_A_TEXT):
                    said = actions.drawn(rng)
                    observed, _, terminated, truncated, _ = made.step(actions.read(said))
                    yield from (said, self.told(made, observed))
                    if terminated or truncated:
                        break


class GymnasiumEnv:
    """One episode at a time. A response that is no action does not reach the environment; it is told so and counted.

    Calls run in a thread of their own, since an environment may compute for long. What it raises is the episode's
    failure, which the runner counts as `env_failure`.
    """

    def __init__(self, task: GymnasiumTask) -> None:
        self._task = task
        self._env: Any = None
        self._success: float | None = None

    async def reset(self, row: Row, seed: int) -> Observation:
        """Starts an episode with the row's seed; `seed` is not used."""
        self._row, self._return, self._success = row, 0.0, None
        self._told = await in_thread(self._begin, row["seed"])
        opening = self._task.opening(self._actions, self._told)
        return Observation(messages=[{"role": "user", "content": opening}], state_key=self._key())

    async def step(self, action: Action) -> Transition:
        """Applies one response."""
        chosen = self._actions.read(action.text)
        if chosen is None:
            told = f"{NO_ACTION} {self._actions.told}\n{self._told}"
            return Transition(
                observation=Observation(text=told, role="user", state_key=self._key()),
                reward=0.0,
                reward_parts=dict.fromkeys(REWARD_PARTS, 0.0),
                info={"errors": {"no_action": 1}},
            )
        told, reward, terminated, truncated, info = await in_thread(self._apply, chosen)
        if not math.isfinite(reward):
            raise ValueError(f"{self._task.id}: its reward is {reward}, after the action {action.text!r}")
        self._told, self._return = told, self._return + reward
        self._success = next((float(info[key]) for key in SUCCESS if key in info), None)
        raw = dict(zip(REWARD_PARTS, (reward, 0.0) if terminated else (0.0, reward), strict=True))
        parts = {name: self._task.reward_weights[name] * value for name, value in raw.items()}
        ended = terminated or truncated
        return Transition(
            observation=None if terminated else Observation(text=told, role="user", state_key=self._key()),
            reward=sum(parts.values()),
            reward_parts=parts,
            terminated=terminated,
            truncated=truncated and not terminated,
            outcome=Outcome.ENV_DONE if terminated else Outcome.MAX_STEPS if truncated else None,
            metrics=self.cut() if ended else {},
            info={"errors": {}},
        )

    def cut(self) -> Mapping[str, float]:
        """`em`, which is also `success`, and the unweighted `return` of the episode so far."""
        success = float(self._return >= self._task.success_return) if self._success is None else self._success
        return {"em": success, "success": success, "return": self._return}

    def _begin(self, seed: int) -> str:
        if self._env is None:
            self._env = self._task.made()
            weakref.finalize(self, self._env.close)
            self._actions = self._task.spoken(self._env)
        observed, _ = self._env.reset(seed=seed)
        return self._task.told(self._env, observed)

    def _apply(self, chosen: Any) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        observed, reward, terminated, truncated, info = self._env.step(chosen)
        return self._task.told(self._env, observed), float(reward), bool(terminated), bool(truncated), info

    def _key(self) -> str:
        return f"{self._row['id']}|{self._told}"

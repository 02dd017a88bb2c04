"""A Task of given rows, for environments of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from agentr1_jax.envs.base import Env, Expert, Row
from agentr1_jax.envs.passes import FiniteRows


class RowsTask:
    """A Task made of rows and an environment.

    Args:
      name: of the task.
      splits: its rows, plain JSON with at least `id`; `train`, and `eval` or others to evaluate on.
      make_env: a fresh environment for each episode.
      reward_parts: names of the parts of its rewards.
      expert: (row, seed) -> who demonstrates; without one there is no warm start.
      texts: sample texts, for training a tokenizer; by default the questions and answers of `train`.
      seed: of the order of training rows.
      expert_sums_up: whether the expert answers `SUMMARY_REQUEST` with a summary.

    Raises:
      ValueError: there is no split `train`, or an empty one, or a row has no id.
    """

    def __init__(
        self,
        name: str,
        splits: Mapping[str, Sequence[Row]],
        make_env: Callable[[], Env],
        reward_parts: Sequence[str] = (),
        expert: Callable[[Row, int], Expert] | None = None,
        texts: Sequence[str] = (),
        seed: int = 0,
        expert_sums_up: bool = False,
    ) -> None:
        if "train" not in splits:
            raise ValueError(f"{name}: there is no split 'train' among {', '.join(splits) or 'none'}")
        for split, rows in splits.items():
            for number, row in enumerate(rows):
                if not isinstance(row, Mapping) or "id" not in row:
                    raise ValueError(f"{name}: row {number} of {split!r} is no mapping with an 'id': {row!r:.80}")
        self.name, self.reward_parts, self.env = name, tuple(reward_parts), make_env
        self.expert_sums_up, self.has_expert = expert_sums_up, expert is not None
        self._rows, self._expert = FiniteRows(name, splits, seed), expert
        self._texts = texts or [
            text for row in splits["train"] for text in (row.get("question", ""), *row.get("answers", ())) if text
        ]
        self.row, self.size = self._rows.row, self._rows.size

    def expert(self, row: Row, seed: int) -> Expert:
        """An expert for one episode. Raises ValueError where the task has none."""
        if self._expert is None:
            raise ValueError(f"{self.name} has no expert to learn from; set warm_start_updates=0, or give it one")
        return self._expert(row, seed)

    def texts(self, count: int) -> Sequence[str]:
        """The first texts."""
        return list(itertools.islice(self._texts, count))

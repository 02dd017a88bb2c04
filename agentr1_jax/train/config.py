"""Settings of a run's phases: how long each lasts and what it learns from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from agentr1_jax.runtime.monitoring import parse_profile_updates
from agentr1_jax.validation import STRICT, Count, Fraction, NonNegative, Positive, Seed, Whole


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """Keys at the top of the config.

    Attributes:
      seed: keys every random choice of the run.
      run_dir: run folder, on a disk or in a bucket (`gs://BUCKET/FOLDER`).
      updates: batches of reinforcement learning; 0 stops after the warm start.
      critic: where values come from: nowhere, a value head on the policy's trunk, or a decoder of their own.
      profile_updates: `a:b` traces RL batches a to b-1 with `jax.profiler`; empty for none.
      compilation_cache: folder of compiled programs, kept between starts; `{runs}` is the folder of `run_dir`; empty
        for none.
    """

    seed: Seed = 0
    run_dir: str = "runs/base"
    updates: Whole = 100
    critic: Literal["none", "shared_trunk", "separate"] = "none"
    profile_updates: str = ""
    compilation_cache: str = "{runs}/.programs"

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise ValueError("run_dir is empty; name the folder of the run")
        parse_profile_updates(self.profile_updates)


@dataclass(frozen=True, config=STRICT)
class TokenizerConfig:
    """Section `tokenizer`.

    Attributes:
      path: Hugging Face folder or hub id, or SentencePiece `*.model`; empty trains one on the task's texts.
      vocab_size: number of pieces of a trained tokenizer.
      texts: number of sample texts a tokenizer is trained on.
    """

    path: str = ""
    vocab_size: Count = 1024
    texts: Count = 4000


@dataclass(frozen=True, config=STRICT)
class PretrainConfig:
    """Section `pretrain`: language modelling on texts of the task, before the warm start.

    Attributes:
      updates: number of updates; 0 for no pretraining.
      texts: largest number of texts taken from the task.
      tokens: length at which longer texts are split.
      batch: pieces of text per update, over all processes.
      lr: peak learning rate; it rises over 5 % of the updates and falls to a tenth by a cosine.
      rows: packed rows per microbatch, over all processes.
      row_tokens: length of a packed row.
    """

    updates: Whole = 0
    texts: Count = 100_000
    tokens: Count = 256
    batch: Count = 64
    lr: Positive = 3e-3
    rows: Count = 8
    row_tokens: Count = 512

    def __post_init__(self) -> None:
        if not 3 <= self.tokens <= self.row_tokens:
            raise ValueError(
                f"pretrain.tokens is {self.tokens}; a piece of text has at least 3 tokens, and at most "
                f"pretrain.row_tokens ({self.row_tokens})"
            )


@dataclass(frozen=True, config=STRICT)
class WarmStartConfig:
    """Section `warm_start`: imitation of expert trajectories, before reinforcement learning.

    Attributes:
      init_from: folder of a finished run, whose tokenizer and newest decoder RL starts from, in place of a warm start
        of its own; empty for none.
      updates: number of updates; 0 for no warm start.
      control_seconds: if positive, the run is a control: it imitates for that much training time and does no RL.
      lr: peak learning rate; it rises over 5 % of the updates and falls to a tenth by a cosine.
      demonstrations: number of expert trajectories, made once.
      practice: share of the demonstrations that is drawn from the task's practice split.
      batch: trajectories per update, over all processes.
    """

    init_from: str = ""
    updates: Whole = 0
    control_seconds: NonNegative = 0.0
    lr: Positive = 3e-3
    demonstrations: Count = 4096
    practice: Fraction = 0.25
    batch: Count = 64


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Section `eval`.

    Attributes:
      split: split of the task whose rows are evaluated.
      questions: rows of the evaluations before and after RL.
      every: RL batches between the evaluations during RL; 0 for none.
      quick_questions: rows of the evaluations during RL.
    """

    split: str = "eval"
    questions: Count = 256
    every: Whole = 10
    quick_questions: Count = 64


@dataclass(frozen=True, config=STRICT)
class TaskConfig:
    """Section `task`.

    Attributes:
      name: a task, or `mixture`.
      file: Python file of the user's own that registers tasks; empty for none.
      args: keys of a task of `file`.
      data_dir: folder of real data; empty for the default of `data_folder`.
      mixture: tasks and weights of a mixture, e.g. `gsm8k(weight=2)`.
      curriculum: steps that training episodes may take, e.g. `max_steps(3)`, `max_steps(6, update=40)`; empty for
        `budget.max_steps` throughout.
      sections: keys of each task that brings some, by the task's name.
    """

    name: str = ""
    file: str = ""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data_dir: str = ""
    mixture: tuple[str, ...] = ()
    curriculum: tuple[str, ...] = ()
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict)

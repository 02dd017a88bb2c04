"""The parts of a run: `Setup`, which does not change while it runs, and `Phase`, how a part of it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.credit.batch import Credit, TokenBatch
from agentr1_jax.credit.scheme import Scheme
from agentr1_jax.envs.base import Task
from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.learner.update import LearnerState, TokenOutputs
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.runtime.processes import call
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train.settings import Settings

PhaseName = Literal["pretraining", "warm_start", "rl"]


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run that do not change while it runs.

    Attributes:
      settings: checked settings.
      task: rows and environments.
      tokenizer: of the policy.
      agent: the workflow of one trajectory.
      policy: shape of the decoder.
      frozen: parameters that LoRA does not train; empty without LoRA.
      learner_mesh: devices of the learner.
      engine: rollout engine of this process.
      rollout_params: (trained, frozen parameters) -> the decoder's on the engine's mesh, in compute dtype.
      tool_metrics: counts of what the tools do.
      dispatch: calls a compiled program of the learner: (program, *arguments) -> its result. Where the engine samples
        at the same time on the same devices, it does so on the engine's dispatch thread: a program over several devices
        waits for all of them, so that two threads which dispatch in different orders could wait for ever.
    """

    settings: Settings
    task: Task
    tokenizer: Tokenizer
    agent: EnvLoop
    policy: DecoderConfig
    frozen: Params
    learner_mesh: Mesh
    engine: Engine
    rollout_params: Callable[[Params, Params], Params]
    tool_metrics: ToolMetrics
    dispatch: Callable[..., Any] = call


@dataclasses.dataclass(frozen=True)
class Phase:
    """How a phase of a run trains: its compiled programs and the shape of its batches.

    Attributes:
      name: of the phase.
      updates: train steps of the phase.
      packing: layout and size of the rows of a microbatch.
      microbatches: most microbatches that a minibatch can fill.
      update: one optimizer step.
      token_outputs: forward pass for values, recomputed and reference log-probs; None where nothing needs it.
      log_ratio: the pass that the ratio needs before each update; None where the ratio needs none.
      reference: the decoder's trained parameters as RL started, in compute dtype; None without a KL term.
      scheme: credit scheme; None where every advantage is 1.
      assign: the scheme's function, compiled.
      critic: True if values are computed and trained.
      observations: True if observation tokens are loss tokens too, as the mask ablations need.
    """

    name: PhaseName
    updates: int
    packing: PackingConfig
    microbatches: int
    update: Callable[..., tuple[LearnerState, dict[str, jax.Array]]]
    token_outputs: Callable[..., TokenOutputs] | None = None
    log_ratio: Callable[..., jax.Array] | None = None
    reference: Params | None = None
    scheme: Scheme | None = None
    assign: Callable[[TokenBatch], Credit] | None = None
    critic: bool = False
    observations: bool = False

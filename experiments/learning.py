"""The second half of the circle: pack, score, credit, fill, update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from agentr1_jax.credit.batch import FlatTrajectories, concatenate, flatten, to_token_batch
from agentr1_jax.credit.shaping import RunningMeanStd, shape_rewards
from agentr1_jax.learner import kl
from agentr1_jax.learner.batch import Batch, LossTokens, PackedTokens, to_microbatches, with_process_indices
from agentr1_jax.learner.config import Aggregate, CorrectionConfig, PackingConfig
from agentr1_jax.learner.loss_weights import TokenUnits, correction_weights, gap_metrics, loss_weights
from agentr1_jax.learner.packing import Packing, gather, gather_final, pack, packing_fault, scatter_fields
from agentr1_jax.learner.update import LearnerState
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.processes import call as enqueue
from agentr1_jax.trajectory import POLICIES, Trajectory
from agentr1_jax.validation import from_section
from experiments import build, phases
from experiments.circle import Run
from experiments.phases import Learner

NOTHING_SEEN = RunningMeanStd()
LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Pending:
    """Metrics of a batch, of which some are still being computed on the device.

    Attributes:
      known: metrics that the host knows.
      updates: of each update of the batch.
      moments: of the returns of all batches so far.
    """

    known: dict[str, float]
    updates: list[dict[str, jax.Array]]
    moments: RunningMeanStd = NOTHING_SEEN

    def result(self) -> dict[str, float]:
        """Waits for the device: means over the updates, the largest of `max_*`, the last of `skipped*`.

        The gap between sampler and learner is that of the first update, whose parameters sampled the batch.
        """
        out: dict[str, float] = {}
        updates = jax.device_get(self.updates)
        for key in updates[0] if updates else ():
            every = [float(metrics[key]) for metrics in updates]
            if key.endswith("logprob_gap"):
                out[f"learner/{key}"] = every[0]
            elif key.startswith("skipped"):
                out[f"learner/{key}"] = every[-1]
            else:
                out[f"learner/{key}"] = max(every) if key.startswith("max_") else sum(every) / len(every)
        return out | self.known


@dataclasses.dataclass(frozen=True)
class Scored:
    """What the forward pass said of this process's tokens, in stream order; None where it was not asked.

    Attributes:
      logprobs, ref_logprobs: [K], of the learner and of the reference.
      values: [K], of the critic.
      final_values: [N], at the final prompts.
    """

    logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    final_values: np.ndarray | None = None


def learn(
    run: Run,
    learner: Learner,
    state: LearnerState,
    trajectories: Sequence[Trajectory],
    rates: Mapping[str, float],
    kl_coef: float = 0.0,
    moments: RunningMeanStd = NOTHING_SEEN,
) -> tuple[LearnerState, Pending, list[Trajectory]]:
    """All updates on one batch: `learner.epochs` passes over `learner.minibatches` parts.

    Returns as soon as the updates are on their way to the device.

    Args:
      run: the run's parts.
      learner: programs of this phase.
      state: donated.
      trajectories: this process's share.
      rates: learning rate of each part of the parameters.
      kl_coef: of the KL in the reward.
      moments: of the returns of earlier batches.

    Returns:
      the new state, metrics, and all trajectories, the trained ones with their advantages in `info`.
    """
    c = run.config
    usable, dropped, malformed = sift(
        run,
        trajectories,
        critic=learner.critic,
        greedy=learner.greedy,
        observations=learner.observations,
        packing=learner.packing,
    )
    known = {"batch/dropped": float(len(dropped)), "batch/malformed": float(malformed)}
    parts = _minibatches(usable, c.learner.minibatches)
    packs = [
        pack(part, learner.packing, final_values=learner.critic, observations=learner.observations) for part in parts
    ]
    ordered = [t for part in parts for t in part]
    scored = _score(run, learner, state.params, packs)
    own, streams, mine = _streams(run, learner, ordered, scored, kl_coef)
    if not len(streams.logprobs):
        logging.warning("no usable trajectory in this batch; it is skipped")
        return state, Pending(known, [], moments), dropped

    baseline = moments.mean
    if learner.credit is not None:
        streams, moments = shape_rewards(
            streams, learner.shaping, gamma=learner.gamma, statistics=moments, bootstraps=learner.critic
        )
        known |= _reward_metrics(streams)
    if learner.shaping.scale_returns:
        baseline /= moments.std
    advantages, targets, has_target = _credit(run, learner, streams, baseline)
    minibatch = np.repeat(np.arange(len(parts)), [len(p.token_index) for p in packs])
    minibatch = np.concatenate([g["m"] for g in processes.all_gather_arrays({"m": minibatch})])
    trained = streams.trainable[streams.token_step]
    spoken = trained & (streams.is_action | (not c.learner.loss_mask))
    per_token = {
        "advantage": advantages[mine],
        "weight": _weights(run, streams, minibatch, c.loss.aggregate, spoken)[mine],
        **_corrections(run, learner, own, scored),
    }
    if learner.critic:
        value_weights = _weights(run, streams, minibatch, "token", trained & has_target)[mine]
        per_token |= {"old_value": own.values, "value_target": targets[mine], "value_weight": value_weights}
    edges = np.cumsum([0, *(len(p.token_index) for p in packs)])
    batches = [
        _to_device(run, learner, p.packed_tokens, scatter_fields(p, {name: x[a:b] for name, x in per_token.items()}))
        for p, a, b in zip(packs, edges[:-1], edges[1:], strict=True)
    ]
    # A minibatch that trains nothing is no update: an optimizer would move by its momentum.
    batches = [batch for i, batch in enumerate(batches) if (spoken & (minibatch == i)).any()]

    computed = sum(p.tokens_computed for p in packs)
    known |= _score_metrics(scored, own) | {
        "batch/trajectories": float(len(streams.returns)),
        "batch/steps": float(len(streams.rewards)),
        "batch/tokens": float(streams.is_action.sum()),
        "batch/sharing": sum(p.tokens_stored for p in packs) / max(computed, 1),
        "batch/row_occupancy": computed / max(sum(p.packed_tokens.tokens.size for p in packs), 1),
        "batch/advantage_std": float(advantages[spoken].std()) if spoken.any() else 0.0,
        "time/learner_tokens": float(computed * c.learner.epochs),
    }
    state, updates = _update(run, learner, state, batches * c.learner.epochs, rates)
    return state, Pending(known, updates, moments), with_advantages(ordered, advantages[mine][own.is_action]) + dropped


def _streams(
    run: Run, learner: Learner, trajectories: Sequence[Trajectory], scored: Scored, kl_coef: float
) -> tuple[FlatTrajectories, FlatTrajectories, slice]:
    """The streams of this process, those of all, and where in their tokens this process's lie."""
    own = flatten(
        trajectories,
        scored.values,
        scored.final_values,
        process_parts=learner.shaping.process_parts,
        observations=learner.observations,
    )
    if scored.logprobs is not None and scored.ref_logprobs is not None and run.config.kl.where == "reward":
        rewards = kl.kl_rewards(run.config.kl.kind, scored.logprobs, scored.ref_logprobs, kl_coef)
        own = dataclasses.replace(own, token_rewards=np.where(own.is_action, rewards, 0).astype(np.float32))
    gathered = [FlatTrajectories(**g) for g in processes.all_gather_arrays(dataclasses.asdict(own))]
    first = sum(len(g.logprobs) for g in gathered[: processes.process_index()])
    return own, concatenate(gathered), slice(first, first + len(own.logprobs))


def _update(
    run: Run,
    learner: Learner,
    state: LearnerState,
    batches: Sequence[tuple[Batch, np.int32]],
    rates: Mapping[str, float],
) -> tuple[LearnerState, list[dict[str, jax.Array]]]:
    """One update for each minibatch; nothing is waited for."""
    out = []
    for batch, count in batches:
        if learner.log_ratio is not None:
            log_ratio = enqueue(learner.log_ratio, state.params, run.frozen, batch, count)
            loss_tokens = dataclasses.replace(batch.loss_tokens, log_ratio=log_ratio)
            batch = dataclasses.replace(batch, loss_tokens=loss_tokens)
        rates_now = {k: np.float32(v) for k, v in rates.items()}
        state, metrics = enqueue(learner.update, state, run.frozen, batch, count, rates_now)
        out.append(metrics)
    return state, out


def sift(
    run: Run,
    trajectories: Sequence[Trajectory],
    *,
    critic: bool,
    greedy: bool = False,
    observations: bool = False,
    packing: PackingConfig | None = None,
) -> tuple[list[Trajectory], list[Trajectory], int]:
    """What can be trained on, and what cannot.

    A trajectory is dropped where its outcome says so, and where its numbers would spoil a batch: no step or token, a
    reward or log-prob that is not finite, a step longer than a row, no greedy rollout where the scheme needs it. Those
    are said aloud.

    Returns:
      usable and dropped trajectories, and how many of these were malformed.

    Raises:
      ValueError: a trajectory was cut and lacks the final prompt that a critic needs.
    """
    packing = packing or phases.packing(run.config)
    usable, dropped, malformed = [], [], 0
    for t in trajectories:
        policy = POLICIES[t.outcome]
        fault = packing_fault(t, packing, final_values=critic, observations=observations)
        counts = policy.reward == "use" and t.steps
        rewards = [t.total_reward, *(s.reward for s in t.steps if s.reward is not None)] if counts else []
        # Statistics are float32; not a number is not below anything either.
        fault = fault or next((f"its reward is {r}" for r in rewards if not abs(r) <= LARGEST), None)
        if greedy and not fault and not math.isfinite(math.nan if t.greedy_return is None else t.greedy_return):
            fault = "the greedy rollout of its row failed"
        beyond = max((max(s.prompt_ids.max(), s.response_ids.max()) for s in t.steps), default=0) if not fault else 0
        if beyond >= run.policy.vocab_size:
            fault = f"it has id {beyond}, beyond the vocabulary of {run.policy.vocab_size}"
        if policy.training == "drop" or fault:
            dropped.append(t)
            if policy.training != "drop":
                malformed += 1
                logging.warning("trajectory %s is dropped: %s", t.uid, fault)
            continue
        if critic and policy.bootstrap and t.final_prompt_ids is None:
            raise ValueError(
                f"trajectory {t.uid} was cut ({t.outcome}) without final_prompt_ids, where the critic values its "
                "future; the agent must give them to session.finish()"
            )
        usable.append(t)
    return usable, dropped, malformed


def _weights(
    run: Run, streams: FlatTrajectories, minibatch: np.ndarray, aggregate: Aggregate, mask: np.ndarray
) -> np.ndarray:
    """Loss weights of the masked tokens, [K] over all processes; each minibatch is a batch of its own."""
    group = np.unique(streams.group, return_inverse=True)[1]
    units = TokenUnits(streams.token_step, streams.token_trajectory, group[streams.token_trajectory])
    denominator = run.config.loss.fixed_denominator
    return loss_weights(aggregate, units, mask, fixed_denominator=denominator, minibatch=minibatch)


def _corrections(run: Run, learner: Learner, own: FlatTrajectories, scored: Scored) -> dict[str, np.ndarray]:
    """Fields of loss tokens that only some runs have: recomputed old log-probs, and the weights that correct them."""
    c, out = run.config.correction, {}
    if scored.ref_logprobs is not None and run.config.kl.where == "loss":
        out["ref_logprob"] = scored.ref_logprobs
    if learner.credit is None or scored.logprobs is None:
        return out
    recomputed = run.config.learner.old_logprobs == "learner"
    if recomputed or learner.observations:  # Observation tokens have no behaviour log-prob.
        out["old_logprob"] = scored.logprobs if recomputed else np.where(own.is_action, own.logprobs, scored.logprobs)
    if recomputed and c.kind != "none":
        sequence, said = (own.token_step if c.unit == "step" else own.token_trajectory), own.is_action
        weights = np.ones(len(said), np.float32)
        weights[said] = correction_weights(
            from_section(CorrectionConfig, "correction", c.to_dict()),
            scored.logprobs[said],
            own.logprobs[said],
            sequence[said],
        )
        out["correction_weight"] = weights
    return out


def with_advantages(trajectories: Sequence[Trajectory], advantages: np.ndarray) -> list[Trajectory]:
    """Return the trajectories with the advantage of each response token, [K] in their order, in their steps."""
    out, at = [], 0
    for t in trajectories:
        steps = []
        for step in t.steps:
            own = np.asarray(advantages[at : at + len(step.response_ids)], np.float32)
            steps.append(dataclasses.replace(step, advantages=own))
            at += len(step.response_ids)
        out.append(dataclasses.replace(t, steps=tuple(steps)))
    return out


def _minibatches(trajectories: Sequence[Trajectory], count: int) -> list[list[Trajectory]]:
    """Splits by whole groups, in order."""
    groups = np.unique([t.group for t in trajectories])
    parts = [set(part.tolist()) for part in np.array_split(groups, count)]
    return [[t for t in trajectories if t.group in part] for part in parts]


def _to_device(
    run: Run, learner: Learner, packed_tokens: PackedTokens, loss_tokens: LossTokens
) -> tuple[Batch, np.int32]:
    """A batch on the learner's mesh, and how many of its microbatches hold data in any process."""
    rows = learner.packing.rows // processes.process_count()
    loss_tokens = with_process_indices(loss_tokens, processes.process_index(), processes.process_count())
    batch = to_microbatches(packed_tokens, loss_tokens, microbatches=learner.microbatches, rows=rows)
    used = max(processes.all_gather_json(-(-packed_tokens.tokens.shape[0] // rows)))
    return meshes.global_batch(batch, run.learner_mesh), np.int32(used)


def _score(run: Run, learner: Learner, params: Params, packs: Sequence[Packing]) -> Scored:
    if learner.token_outputs is None:
        return Scored()
    parts: dict[str, list[np.ndarray]] = {field.name: [] for field in dataclasses.fields(Scored)}
    for layout in packs:
        batch, count = _to_device(run, learner, layout.packed_tokens, layout.loss_tokens)
        outputs = enqueue(learner.token_outputs, params, run.frozen, learner.reference, batch, count)

        def local(x: jax.Array, layout: Packing = layout) -> np.ndarray:
            rows = meshes.local_rows(x, run.learner_mesh)
            return rows.reshape(-1, rows.shape[-1])[: layout.rows]

        parts["logprobs"].append(gather(layout, local(outputs.logprob)))
        if outputs.ref_logprob is not None:
            parts["ref_logprobs"].append(gather(layout, local(outputs.ref_logprob)))
        if outputs.value is not None:
            value = local(outputs.value)
            parts["values"].append(gather(layout, value))
            parts["final_values"].append(gather_final(layout, value))
    return Scored(**{name: np.concatenate(x) if x else None for name, x in parts.items()})


def _score_metrics(scored: Scored, own: FlatTrajectories) -> dict[str, float]:
    """The gap between sampler and learner of this process's tokens, and the KL to the reference over all processes."""
    if scored.logprobs is None:
        return {}
    said = own.is_action
    gap = gap_metrics(scored.logprobs[said], own.logprobs[said], own.token_trajectory[said])
    out = {f"gap/{name}": x for name, x in gap.items()}
    out |= {"learner/logprob_gap": gap.get("mean", math.nan), "learner/max_logprob_gap": gap.get("max", math.nan)}
    if scored.ref_logprobs is not None:
        estimate = kl.kl_estimate("k3", scored.logprobs[said], scored.ref_logprobs[said])
        parts = processes.all_gather_json([float(estimate.sum()), len(estimate)])
        out["learner/ref_kl"] = sum(total for total, _ in parts) / max(sum(count for _, count in parts), 1)
    return out


def _reward_metrics(streams: FlatTrajectories) -> dict[str, float]:
    """Groups from which schemes that compare samples learn nothing, and steps that none can be compared with."""
    group = np.unique(streams.group, return_inverse=True)[1]
    highest, lowest = np.full(group.max() + 1, -np.inf), np.full(group.max() + 1, np.inf)
    np.maximum.at(highest, group, streams.returns)
    np.minimum.at(lowest, group, streams.returns)
    return {
        "batch/zero_variance_groups": float((highest == lowest).sum()),
        "batch/lone_members": float((np.bincount(group) == 1).sum()),
        "batch/steps_without_key": float((streams.state_key < 0).sum()),
    }


def _credit(
    run: Run, learner: Learner, streams: FlatTrajectories, baseline: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Advantages, value targets and where those exist, [K] over all processes; computed alike in each."""
    k = len(streams.logprobs)
    if learner.credit is None:
        return np.ones(k, np.float32), np.zeros(k, np.float32), np.zeros(k, bool)
    c = run.config
    batch = to_token_batch(
        streams,
        **build.credit_room(c),
        critic=learner.critic,
        baseline=baseline,
        advantage_mask=c.learner.advantage_mask,
    )
    credit: Any = jax.device_get(enqueue(learner.credit, batch))
    advantages = credit.advantages[:k]
    if c.learner.advantage_mask and not c.learner.loss_mask:
        advantages = _over_observations(streams, advantages)
    if credit.value_targets is None:
        return advantages, np.zeros(k, np.float32), np.zeros(k, bool)
    return advantages, credit.value_targets[:k], credit.value_mask[:k]


def _over_observations(streams: FlatTrajectories, advantages: np.ndarray) -> np.ndarray:
    """An answer, where it is trained on, has the advantage of the last token of the response that it answers."""
    last = np.maximum.accumulate(np.where(streams.is_action, np.arange(len(advantages)), 0))
    return advantages[last]

"""One train step: pack the trajectories of a batch, compute their token outputs, assign credit, update the parameters.

    groups of trajectories ──> pack ──> token_outputs ──> assign_credit ──> update ──> parameters, metrics

Every function takes plain data; arrays over tokens are in (trajectory, step, token) order. Statistics and denominators
are global over processes: `assign_credit` concatenates what all processes know, and each takes its own part back.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from absl import logging

from agentr1_jax.credit.batch import FlatTrajectories, account_of_step, concatenate, flatten, to_token_batch
from agentr1_jax.credit.primitives import BATCH_MEAN
from agentr1_jax.credit.shaping import RunningMeanStd, shape_rewards
from agentr1_jax.learner.batch import Batch, LossTokens, to_microbatches, with_process_indices
from agentr1_jax.learner.loss_weights import TokenUnits, correction_weights, gap_metrics, loss_weights
from agentr1_jax.learner.losses import kl_estimate, kl_rewards
from agentr1_jax.learner.packing import Packing, gather, gather_final, packing_fault, scatter_fields
from agentr1_jax.learner.packing import pack as pack_rows
from agentr1_jax.learner.update import LearnerState
from agentr1_jax.policy.decoder import Params
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime import processes
from agentr1_jax.train.build import Setup
from agentr1_jax.train.phases import Phase
from agentr1_jax.train.probes import beliefs
from agentr1_jax.train.progress import Progress
from agentr1_jax.trajectory import POLICIES, Step, Term, Trajectory


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """This process's share of a batch.

    Attributes:
      trajectories: those that are trained or count in statistics, minibatch by minibatch.
      dropped: those that do neither.
      malformed: number of `dropped` trajectories that should have been usable.
      packings: packed rows of each minibatch.
    """

    trajectories: Sequence[Trajectory]
    dropped: Sequence[Trajectory]
    malformed: int
    packings: Sequence[Packing]


@dataclasses.dataclass(frozen=True)
class TokenOutputs:
    """What one forward pass says of this process's tokens; None where nothing of the run needs it.

    Attributes:
      logprobs, ref_logprobs: float32 [K] log-probs under the learner's parameters and under the reference.
      values: float32 [K] of the critic.
      final_values: float32 [N] of the critic at `final_prompt_ids`.
      beliefs: float32 [S] in the gold answer, at the prompt of each step.
    """

    logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    final_values: np.ndarray | None = None
    beliefs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class BatchCredit:
    """Advantages and value targets of a batch of all processes.

    Attributes:
      flat: trajectories of all processes, rewards shaped.
      own: trajectories of this process.
      part: this process's tokens among those of `flat`.
      steps: this process's steps, likewise.
      advantages, value_targets: float32 [K] over all processes.
      value_mask: bool [K], where a value target exists.
      return_statistics: of step returns, this batch included.
      baseline: fallback baseline of a state, known before this batch.
      reward_std: standard deviation of returns that rewards were divided by; 1 without `shaping.scale_returns`.
      terms: terms of the advantages, with quantities [S] over all processes; empty without a credit scheme.
    """

    flat: FlatTrajectories
    own: FlatTrajectories
    part: slice
    steps: slice
    advantages: np.ndarray
    value_targets: np.ndarray
    value_mask: np.ndarray
    return_statistics: RunningMeanStd
    baseline: float = 0.0
    reward_std: float = 1.0
    terms: Mapping[str, Term] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Metrics of a train step, of which some may still be under way on the device.

    Attributes:
      host: metrics that the host knows.
      updates: metrics of each update of the batch, as device arrays.
    """

    host: Mapping[str, float]
    updates: Sequence[Mapping[str, jax.Array]]

    def fetch(self) -> dict[str, float]:
        """Wait for the device: means over the updates, the largest of `max_*`, the last of `skipped*`.

        The gap between sampler and learner is that of the first update, whose parameters sampled the batch.
        """
        metrics: dict[str, float] = {}
        updates = jax.device_get(self.updates)
        for key in updates[0] if updates else ():
            values = [float(update[key]) for update in updates]
            if key.endswith("logprob_gap"):
                metrics[f"learner/{key}"] = values[0]
            elif key.startswith("skipped"):
                metrics[f"learner/{key}"] = values[-1]
            else:
                metrics[f"learner/{key}"] = max(values) if key.startswith("max_") else sum(values) / len(values)
        return metrics | dict(self.host)


def pack(setup: Setup, phase: Phase, trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Lay this process's trajectories out in rows, one packing for each minibatch of whole groups; see `sift`."""
    usable, dropped, malformed = sift(setup, phase, trajectories)
    groups = np.array_split(np.unique([t.group for t in usable]), setup.settings.learner.minibatches)
    minibatches = [[t for t in usable if t.group in set(part.tolist())] for part in groups]
    packings = [
        pack_rows(minibatch, phase.packing, final_values=phase.critic, observations=phase.observations)
        for minibatch in minibatches
    ]
    return PackedBatch([t for minibatch in minibatches for t in minibatch], dropped, malformed, packings)


def sift(
    setup: Setup, phase: Phase, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], list[Trajectory], int]:
    """Return usable trajectories, dropped ones, and the number of dropped ones that should have been usable.

    A trajectory is dropped where its outcome says so, and with a warning where it has a `training_fault`.

    Raises:
      ValueError: a trajectory was truncated and lacks the final prompt that the critic bootstraps from.
    """
    usable, dropped, malformed = [], [], 0
    for t in trajectories:
        policy = POLICIES[t.outcome]
        if policy.training == "drop":
            dropped.append(t)
        elif fault := training_fault(setup, phase, t):
            logging.warning("trajectory %s is dropped: %s", t.uid, fault)
            dropped.append(t)
            malformed += 1
        elif phase.critic and policy.bootstrap and t.final_prompt_ids is None:
            raise ValueError(
                f"trajectory {t.uid} was truncated ({t.outcome}) without final_prompt_ids, where the critic values its "
                "future; the agent must give them to session.finish()"
            )
        else:
            usable.append(t)
    return usable, dropped, malformed


def training_fault(setup: Setup, phase: Phase, t: Trajectory) -> str | None:
    """Return why a trajectory would spoil a batch, or None."""
    fault = packing_fault(t, phase.packing, final_values=phase.critic, observations=phase.observations)
    if fault:
        return fault
    rewards = [s.reward for s in t.steps if s.reward is not None] if POLICIES[t.outcome].reward == "use" else []
    for reward in (t.total_reward, *rewards):
        if not abs(reward) <= float(np.finfo(np.float32).max):  # Statistics are float32; NaN compares as False.
            return f"its reward is {reward}"
    if phase.scheme and phase.scheme.needs_greedy and (t.greedy_return is None or not math.isfinite(t.greedy_return)):
        return "the greedy rollout of its row failed"
    if phase.prober and (fault := phase.prober.fault(t.row)):
        return fault
    largest = max(max(s.prompt_ids.max(), s.response_ids.max()) for s in t.steps)
    if largest >= setup.policy.vocab_size:
        return f"it has id {largest}, beyond the vocabulary of {setup.policy.vocab_size}"
    return None


def token_outputs(setup: Setup, phase: Phase, params: Params, batch: PackedBatch) -> TokenOutputs:
    """Run one forward pass over the batch for what the phase needs: log-probs, reference log-probs, values, beliefs.

    Where gold answers are probed, its rows hold the probes, too, and are others than those of the update.
    """
    if phase.token_outputs is None:
        return TokenOutputs()
    packings, probes = batch.packings, list[Trajectory]()
    if phase.prober and phase.outputs_packing:
        probes = phase.prober.probes(batch.trajectories)
        together = [*batch.trajectories, *probes]
        packings = [
            pack_rows(together, phase.outputs_packing, final_values=phase.critic, observations=phase.observations)
        ]
    parts: dict[str, list[np.ndarray]] = {field.name: [] for field in dataclasses.fields(TokenOutputs)}
    for packing in packings:
        for name, by_row in _forward(setup, phase, params, packing).items():
            parts[name].append(gather(packing, by_row))
            if name == "values":
                parts["final_values"].append(gather_final(packing, by_row))
    outputs = TokenOutputs(**{name: np.concatenate(x) if x else None for name, x in parts.items()})
    return _split_probes(setup, phase, outputs, batch, probes) if phase.prober else outputs


def _forward(setup: Setup, phase: Phase, params: Params, packing: Packing) -> dict[str, np.ndarray]:
    """Run the forward pass over packed rows, in as many calls as they take; return its outputs, [B, M]. Collective."""
    assert phase.token_outputs is not None
    capacity = phase.microbatches * (phase.packing.rows // processes.process_count())
    parts: dict[str, list[np.ndarray]] = {"logprobs": [], "ref_logprobs": [], "values": []}
    parameters: tuple[Params, Params | None] = (params, phase.reference)
    if not phase.reads_policy:
        assert phase.reference is not None
        parameters = ({"decoder": phase.reference}, None)
    trained, reference = parameters
    for call in range(max(max(processes.all_gather_json(-(-packing.rows // capacity))), 1)):
        rows = packing.rows_between(call * capacity, (call + 1) * capacity)
        device_batch, used = _to_device(setup, phase, rows, rows.loss_tokens)
        outputs = setup.dispatch(phase.token_outputs, trained, setup.frozen, reference, device_batch, used)
        for name, array in (
            ("logprobs", outputs.logprob),
            ("ref_logprobs", outputs.ref_logprob),
            ("values", outputs.value),
        ):
            if array is not None:
                own = meshes.local_rows(array, setup.learner_mesh)
                parts[name].append(own.reshape(-1, own.shape[-1])[: rows.rows])
    return {name: np.concatenate(x) for name, x in parts.items() if x}


def _split_probes(
    setup: Setup, phase: Phase, outputs: TokenOutputs, batch: PackedBatch, probes: Sequence[Trajectory]
) -> TokenOutputs:
    """Take the probes, which stand behind the batch, out of the outputs, and make beliefs of their log-probs."""
    assert phase.prober is not None
    tokens = sum(len(p.token_index) for p in batch.packings)
    by_reference = phase.prober.scorer == "reference" and phase.reads_policy
    scores = outputs.ref_logprobs if by_reference else outputs.logprobs
    assert scores is not None

    def own(x: np.ndarray | None, count: int, needed: bool = True) -> np.ndarray | None:
        return x[:count] if x is not None and needed else None

    return TokenOutputs(
        logprobs=own(outputs.logprobs, tokens, phase.reads_policy),
        ref_logprobs=own(outputs.ref_logprobs, tokens, setup.settings.kl.kind != "none"),
        values=own(outputs.values, tokens),
        final_values=own(outputs.final_values, len(batch.trajectories)),
        beliefs=beliefs(probes, scores[tokens:]),
    )


def assign_credit(
    setup: Setup, phase: Phase, batch: PackedBatch, outputs: TokenOutputs, progress: Progress
) -> BatchCredit:
    """Turn rewards into advantages and value targets, over the trajectories of all processes. Collective.

    Without a credit scheme every advantage is 1. `progress` has the coefficient of an adaptive KL, and the statistics
    of the step returns of earlier batches.
    """
    settings, return_statistics = setup.settings, RunningMeanStd(*progress.return_statistics)
    own = flatten(
        batch.trajectories,
        outputs.values,
        outputs.final_values,
        outputs.beliefs,
        process_parts=settings.shaping.process_parts if phase.scheme else (),
        observations=phase.observations,
    )
    estimate = settings.objective.kl_in_reward
    if estimate != "none" and outputs.logprobs is not None and outputs.ref_logprobs is not None:
        coef = progress.kl_coef_or(settings.kl.coef)
        rewards = kl_rewards(estimate, outputs.logprobs, outputs.ref_logprobs, coef)
        own = dataclasses.replace(own, token_rewards=np.where(own.is_action, rewards, 0).astype(np.float32))
    gathered = [FlatTrajectories(**g) for g in processes.all_gather_arrays(dataclasses.asdict(own))]
    earlier = gathered[: processes.process_index()]
    token, step = (sum(len(getattr(g, name)) for g in earlier) for name in ("logprobs", "rewards"))
    part, steps = slice(token, token + len(own.logprobs)), slice(step, step + len(own.rewards))
    flat = concatenate(gathered)
    tokens = len(flat.logprobs)
    zeros, nowhere = np.zeros(tokens, np.float32), np.zeros(tokens, bool)
    if phase.scheme is None or not tokens:
        return BatchCredit(flat, own, part, steps, np.ones(tokens, np.float32), zeros, nowhere, return_statistics)

    mean = return_statistics.mean
    flat, return_statistics = shape_rewards(
        flat, settings.shaping, gamma=phase.scheme.gamma, statistics=return_statistics, bootstraps=phase.critic
    )
    reward_std = return_statistics.std if settings.shaping.scale_returns else 1.0
    baseline = mean / reward_std
    token_batch = to_token_batch(
        flat,
        **settings.batch_capacity,
        critic=phase.critic,
        baseline=baseline,
        advantage_mask=settings.learner.advantage_mask,
    )
    credit = jax.device_get(setup.dispatch(phase.assign, token_batch))
    advantages = credit.advantages[:tokens]
    if settings.learner.advantage_mask and not settings.learner.loss_mask:
        # An observation that is trained has the advantage of the response that it answers.
        last_action = np.maximum.accumulate(np.where(flat.is_action, np.arange(tokens), 0))
        advantages = advantages[last_action]
    targets = zeros if credit.value_targets is None else credit.value_targets[:tokens]
    has_target = nowhere if credit.value_mask is None else credit.value_mask[:tokens]
    terms = jax.tree.map(lambda x: np.broadcast_to(x, token_batch.steps)[: len(flat.rewards)], credit.terms)
    return BatchCredit(
        flat, own, part, steps, advantages, targets, has_target, return_statistics, baseline, reward_std, terms
    )


def update(
    setup: Setup,
    phase: Phase,
    state: LearnerState,
    batch: PackedBatch,
    outputs: TokenOutputs,
    credit: BatchCredit,
    learning_rates: Mapping[str, float],
) -> tuple[LearnerState, StepMetrics]:
    """Take all updates on a batch: `learner.epochs` passes over `learner.minibatches`. The state is donated.

    Returns the new state and metrics as soon as the updates are enqueued on the device.
    """
    metrics = {"batch/dropped": float(len(batch.dropped)), "batch/malformed": float(batch.malformed)}
    if not len(credit.advantages):
        logging.warning("no usable trajectory in this batch; it is skipped")
        return state, StepMetrics(metrics, [])
    minibatches, trained = _minibatches(setup, phase, batch, outputs, credit)
    rates = {part: np.float32(rate) for part, rate in learning_rates.items()}
    updates = []
    for rows, used in minibatches * setup.settings.learner.epochs:
        if phase.log_ratio is not None:
            log_ratio = setup.dispatch(phase.log_ratio, state.params, setup.frozen, rows, used)
            rows = dataclasses.replace(rows, loss_tokens=dataclasses.replace(rows.loss_tokens, log_ratio=log_ratio))
        state, update_metrics = setup.dispatch(phase.update, state, setup.frozen, rows, used, rates)
        updates.append(update_metrics)
    metrics |= _batch_metrics(setup, phase, batch, credit, trained) | whitening_metrics(credit)
    metrics |= _gap_metrics(outputs, credit.own)
    return state, StepMetrics(metrics, updates)


def with_credit(batch: PackedBatch, outputs: TokenOutputs, credit: BatchCredit) -> list[Trajectory]:
    """Return all trajectories of a batch; the steps of those that were packed record the credit that they got.

    The record has the advantages of the response, their account, the critic's values and targets, and the reward as the
    credit scheme saw it; that of a truncated trajectory has the value of its future, too.
    """
    flat, own, mask = credit.flat, credit.own, credit.value_mask[credit.part]
    ends = np.cumsum([len(step.response_ids) for t in batch.trajectories for step in t.steps])
    rewards = flat.rewards + np.bincount(flat.token_step, flat.token_rewards, len(flat.rewards))
    targets = np.where(mask, credit.value_targets[credit.part], np.nan) if mask.any() else None

    def by_step(per_token: np.ndarray | None) -> Iterator[np.ndarray | None]:
        if per_token is None:
            return itertools.repeat(None)
        return iter(np.split(per_token[own.is_action], ends[:-1]))

    advantages = by_step(credit.advantages[credit.part].astype(np.float32))
    values, targets_of = by_step(to_half(outputs.values)), by_step(to_half(targets))
    numbers = itertools.count(credit.steps.start)

    def record(step: Step) -> Step:
        number = next(numbers)
        reward = float(rewards[number])
        unchanged = step.reward is not None and np.float32(step.reward) == np.float32(reward)
        return dataclasses.replace(
            step,
            advantages=next(advantages),
            account=account_of_step(credit.terms, number),
            shaped_reward=None if unchanged else reward,
            values=next(values),
            value_targets=next(targets_of),
            belief=step.belief if outputs.beliefs is None else float(flat.belief[number]),
        )

    first = int(flat.step_trajectory[credit.steps.start]) if batch.trajectories else 0

    def final_value(place: int) -> float | None:
        if outputs.final_values is None or not own.truncated[place]:
            return None
        return float(outputs.final_values[place]) if flat.truncated[first + place] else 0.0

    recorded = [
        dataclasses.replace(t, steps=tuple(map(record, t.steps)), final_value=final_value(place))
        for place, t in enumerate(batch.trajectories)
    ]
    return [*recorded, *batch.dropped]


def to_half(x: np.ndarray | None) -> np.ndarray | None:
    """Return numbers as float16, or as float32 where one is too large; keep None."""
    if x is None:
        return None
    fits = np.abs(np.nan_to_num(x)).max(initial=0) <= np.finfo(np.float16).max
    return x.astype(np.float16 if fits else np.float32)


def _minibatches(
    setup: Setup, phase: Phase, batch: PackedBatch, outputs: TokenOutputs, credit: BatchCredit
) -> tuple[list[tuple[Batch, np.int32]], np.ndarray]:
    """Make the device batch of each minibatch that trains something; also return the mask of trained tokens, [K]."""
    learner, loss = setup.settings.learner, setup.settings.loss
    flat, part = credit.flat, credit.part
    counts = [len(p.token_index) for p in batch.packings]
    number = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([g["minibatch"] for g in processes.all_gather_arrays({"minibatch": number})])
    units = TokenUnits(
        flat.token_step, flat.token_trajectory, np.unique(flat.group, return_inverse=True)[1][flat.token_trajectory]
    )
    weights = functools.partial(loss_weights, fixed_denominator=loss.fixed_denominator, minibatch=number)
    trainable = flat.trainable[flat.token_step]
    trained = trainable & (flat.is_action | (not learner.loss_mask))
    per_token = {
        "advantage": credit.advantages[part],
        "weight": weights(loss.aggregate, units, trained)[part],
        **_corrections(setup, phase, outputs, credit.own),
    }
    if phase.critic:
        per_token |= {
            "old_value": credit.own.values,
            "value_target": credit.value_targets[part],
            "value_weight": weights("token", units, trainable & credit.value_mask)[part],
        }
    batches, end = [], 0
    for i, packing in enumerate(batch.packings):
        start, end = end, end + len(packing.token_index)
        # A minibatch that trains nothing is no update: an optimizer would move by its momentum.
        if (trained & (number == i)).any():
            fields = scatter_fields(packing, {name: x[start:end] for name, x in per_token.items()})
            batches.append(_to_device(setup, phase, packing, fields))
    return batches, trained


def _corrections(setup: Setup, phase: Phase, outputs: TokenOutputs, own: FlatTrajectories) -> dict[str, np.ndarray]:
    """Fields of loss tokens that only some runs have: reference and recomputed log-probs, correction weights."""
    settings, fields = setup.settings, {}
    if outputs.ref_logprobs is not None and settings.kl.where == "loss":
        fields["ref_logprob"] = outputs.ref_logprobs
    if phase.scheme is None or outputs.logprobs is None:
        return fields
    action = own.is_action
    if settings.learner.old_logprobs == "learner":
        fields["old_logprob"] = outputs.logprobs
        if settings.correction.kind != "none":
            sequence = own.token_step if settings.correction.unit == "step" else own.token_trajectory
            fields["correction_weight"] = np.ones(len(action), np.float32)
            fields["correction_weight"][action] = correction_weights(
                settings.correction, outputs.logprobs[action], own.logprobs[action], sequence[action]
            )
    elif phase.observations:  # Observation tokens have no behaviour log-prob.
        fields["old_logprob"] = np.where(action, own.logprobs, outputs.logprobs)
    return fields


def _to_device(setup: Setup, phase: Phase, packing: Packing, loss_tokens: LossTokens) -> tuple[Batch, np.int32]:
    """Put rows on the learner's mesh; also return how many microbatches hold data in any process."""
    rows = phase.packing.rows // processes.process_count()
    loss_tokens = with_process_indices(loss_tokens, processes.process_index(), processes.process_count())
    batch = to_microbatches(packing.packed_tokens, loss_tokens, microbatches=phase.microbatches, rows=rows)
    used = max(processes.all_gather_json(-(-packing.rows // rows)))
    return meshes.global_batch(batch, setup.learner_mesh), np.int32(used)


def _batch_metrics(
    setup: Setup, phase: Phase, batch: PackedBatch, credit: BatchCredit, trained: np.ndarray
) -> dict[str, float]:
    """Sizes of the batch; in RL also the groups from which schemes that compare samples learn nothing."""
    flat = credit.flat
    computed = sum(p.tokens_computed for p in batch.packings)
    metrics = {
        "batch/trajectories": float(len(flat.returns)),
        "batch/steps": float(len(flat.rewards)),
        "batch/tokens": float(flat.is_action.sum()),
        "batch/sharing": sum(p.tokens_stored for p in batch.packings) / max(computed, 1),
        "batch/row_occupancy": computed / max(sum(p.packed_tokens.tokens.size for p in batch.packings), 1),
        "batch/advantage_std": float(credit.advantages[trained].std()) if trained.any() else 0.0,
        "time/learner_tokens": float(computed * setup.settings.learner.epochs),
    }
    if phase.scheme:
        returns = [flat.returns[flat.group == group] for group in np.unique(flat.group)]
        metrics |= {
            "batch/zero_variance_groups": float(sum(x.min() == x.max() for x in returns)),
            "batch/lone_members": float(sum(len(x) == 1 for x in returns)),
            "batch/steps_without_key": float((flat.state_key < 0).sum()),
            "credit/baseline": credit.baseline,
            "credit/reward_std": credit.reward_std,
        }
    if phase.prober:
        ends = np.cumsum(flat.trajectory_steps)
        first, last = ends - flat.trajectory_steps, ends - 1
        metrics["credit/belief_first"] = float(np.exp(flat.belief[first]).mean())
        metrics["credit/belief_last"] = float(np.exp(flat.belief[last]).mean())
    return metrics


def whitening_metrics(credit: BatchCredit) -> dict[str, float]:
    """Return the mean and the standard deviation by which the advantages were whitened; nothing where they were not."""
    for term in credit.terms.values():  # They are the same in every term.
        if BATCH_MEAN in term.minus:
            mean, std = float(term.minus[BATCH_MEAN][0]), float(term.std[0])
            return {"credit/whitening_mean": mean, "credit/whitening_std": std}
    return {}


def _gap_metrics(outputs: TokenOutputs, own: FlatTrajectories) -> dict[str, float]:
    """Gap between sampler and learner of this process's tokens, and the KL to the reference over all processes."""
    if outputs.logprobs is None:
        return {}
    action = own.is_action
    gap = gap_metrics(outputs.logprobs[action], own.logprobs[action], own.token_trajectory[action])
    metrics = {f"gap/{name}": x for name, x in gap.items()}
    metrics |= {"learner/logprob_gap": gap.get("mean", math.nan), "learner/max_logprob_gap": gap.get("max", math.nan)}
    if outputs.ref_logprobs is not None:
        estimate = kl_estimate("k3", outputs.logprobs[action], outputs.ref_logprobs[action])
        parts = processes.all_gather_json([float(estimate.sum()), len(estimate)])
        metrics["learner/ref_kl"] = sum(total for total, _ in parts) / max(sum(count for _, count in parts), 1)
    return metrics

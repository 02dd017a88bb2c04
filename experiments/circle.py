"""One turn of the circle: roll out, score, credit, fill, update. The functions that `train.py` reads like a story."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import ml_collections
import numpy as np
from absl import logging
from jax.sharding import Mesh

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import ScriptedSession
from agentr1_jax.credit import Credit, CreditBatch
from agentr1_jax.credit import streams as flat
from agentr1_jax.envs.base import Task
from agentr1_jax.learner import fill, packing
from agentr1_jax.learner.batch import Batch, Nodes, Reads, to_microbatches
from agentr1_jax.learner.update import LearnerState, Scores
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.counters import Counters
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.runner import Group, run_groups, signal
from agentr1_jax.rollout.sampling import Sampling
from agentr1_jax.runtime import mesh as meshes
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.seeds import generator
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.tools.meter import Meter
from agentr1_jax.trajectory import POLICIES, Trajectory
from experiments import build

PRACTICE = "practice"


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run that do not change while it runs.

    Attributes:
      frozen: parameters that LoRA does not train; empty without it.
      view: (trained, frozen parameters) -> the policy's on the rollout mesh.
      tools: counts what tools do.
    """

    config: ml_collections.ConfigDict
    task: Task
    tokenizer: Tokenizer
    agent: EnvLoop
    policy: DecoderConfig
    frozen: Params
    engine: Engine
    learner_mesh: Mesh
    view: Callable[[Params, Params], Params]
    tools: Meter


@dataclasses.dataclass(frozen=True)
class Learner:
    """The compiled programs of one phase.

    Attributes:
      update: one optimizer step.
      score: forward pass for the critic's values; None where nothing needs it.
      microbatches: most of them that a batch can fill.
      credit: the scheme; None for demonstrations, whose advantage is 1.
    """

    update: Callable[..., tuple[LearnerState, dict[str, jax.Array]]]
    score: Callable[..., Scores] | None
    microbatches: int
    credit: Callable[[CreditBatch], Credit] | None


def demonstrations(run: Run) -> list[Trajectory]:
    """This process's share of expert trajectories, some of them on the task's practice split where it has one."""
    c = run.config.warm_start
    rng = generator(run.config.seed, "practice")
    practice = rng.random(c.demonstrations) < c.practice
    indices = build.dealt(c.demonstrations)
    names = build.identities(run.task, run.config.seed, "demonstration", indices, indices, 1)

    async def play() -> list[Trajectory]:
        out = []
        for index, (identity,) in zip(indices, names, strict=True):
            row = run.task.row(PRACTICE if practice[index] else "train", index)
            session = ScriptedSession(identity, run.task.expert(row, identity.seed), run.tokenizer, run.agent.tags)
            await run.agent.run(session, row)
            out.append(session.trajectory())
        return out

    return asyncio.run(play())


def roll_out(
    run: Run,
    params: Params,
    phase: str,
    split: str,
    visits: Sequence[int],
    *,
    samples: int,
    sampling: Sampling,
    version: int,
    refills: Sequence[int] = (),
) -> tuple[list[Trajectory], list[Trajectory]]:
    """This process's share of the groups with the given running indices, sampled by its engine.

    Args:
      run: the run's parts.
      params: of the learner.
      phase: part of the names of the trajectories, and of their seeds.
      split: whose rows.
      visits: running indices of the groups.
      samples: of each group.
      sampling: the distribution of responses.
      version: of the policy.
      refills: running indices of groups to sample in place of those without signal; this process takes its share of
        them, in order, as far as it needs.

    Returns:
      trajectories sorted by (group, sample), and those of groups without signal where there are refills.
    """
    places = build.dealt(len(visits))
    spare = [len(visits) + i for i in build.dealt(len(refills))]
    everywhere = [*visits, *refills]

    def groups() -> Iterator[Group]:
        for place in (*places, *spare):
            visit = everywhere[place]
            (names,) = build.identities(run.task, run.config.seed, phase, [place], [visit], samples)
            yield Group(run.task.row(split, visit), names)

    complete = run_groups(
        run.engine,
        run.view(params, run.frozen),
        run.agent,
        groups(),
        sampling=sampling,
        policy_version=version,
        wanted=len(places),
        keep=signal if refills else lambda group: True,
        limits=build.limits(run.config),
    )
    kept: list[Trajectory] = []
    dull: list[Trajectory] = []
    for group in sorted(complete, key=lambda group: group[0].group):
        (kept if not refills or signal(group) else dull).extend(group)
    return kept, dull


def evaluate(
    run: Run, params: Params, questions: int, *, temperature: float, phase: str, version: int
) -> tuple[dict[str, float], list[Trajectory]]:
    """EM, F1 and more over the first `questions` of `eval.split`.

    Returns:
      means over all processes, and the trajectories of this one.
    """
    sampling, split = Sampling(temperature), run.config.eval.split
    trajectories, _ = roll_out(
        run, params, phase, split, range(questions), samples=1, sampling=sampling, version=version
    )
    return means(trajectories), trajectories


def means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the trajectories of all processes: metrics, reward, steps, tokens, outcomes, and `em` by kind."""
    sums: dict[str, list[float]] = {}

    def add(key: str, value: float) -> None:
        total = sums.setdefault(key, [0.0, 0])
        total[0], total[1] = total[0] + value, total[1] + 1

    for t in trajectories:
        for key, value in t.metrics.items():
            add(key, value)
        if "em" in t.metrics and "kind" in t.info:
            add(f"em_{t.info['kind']}", t.metrics["em"])
        if POLICIES[t.outcome].reward == "use":
            add("reward", t.total_reward)
        add("steps", len(t.steps))
        add("response_tokens", sum(len(s.response_ids) for s in t.steps))
        for outcome in {u.outcome for u in trajectories}:
            add(f"outcome/{outcome}", float(t.outcome is outcome))
    joined: dict[str, list[float]] = {}
    for part in processes.all_gather_json(sums):
        for key, (total, count) in part.items():
            have = joined.setdefault(key, [0.0, 0])
            have[0], have[1] = have[0] + total, have[1] + count
    everything = joined.get("steps", [0.0, 0])[1]
    # A process that saw no such outcome adds nothing to its count.
    return {
        key: total / max(everything if key.startswith("outcome/") else count, 1)
        for key, (total, count) in sorted(joined.items())
    }


def learn(
    run: Run, learner: Learner, state: LearnerState, trajectories: Sequence[Trajectory], rates: Mapping[str, float]
) -> tuple[LearnerState, dict[str, float], list[Trajectory]]:
    """All updates on one batch: `learner.epochs` passes over `learner.minibatches` parts.

    Args:
      run: the run's parts.
      learner: programs of this phase.
      state: donated.
      trajectories: this process's share.
      rates: learning rate of each part of the parameters.

    Returns:
      the new state, metrics of the last update and of the batch, and all trajectories, the trained ones with their
      advantages in `info`.
    """
    config = run.config
    started = time.perf_counter()
    usable = flat.usable(trajectories)
    kept = set(map(id, usable))
    dropped = [t for t in trajectories if id(t) not in kept]
    if learner.score is not None:
        _check_final_prompts(usable)
    parts = _minibatches(usable, config.learner.minibatches)
    packs = [
        packing.pack(
            part,
            mode=config.learner.packing,
            row_tokens=config.learner.row_tokens,
            row_reads=config.learner.row_reads,
            final_reads=learner.score is not None,
        )
        for part in parts
    ]
    ordered = [t for part in parts for t in part]
    values, final_values = _critic(run, learner, state.params, packs)
    own = flat.flatten(ordered, values, final_values)
    gathered = [flat.Streams(**g) for g in processes.all_gather_arrays(dataclasses.asdict(own))]
    streams = flat.join(gathered)
    first = sum(len(g.logprobs) for g in gathered[: processes.process_index()])
    mine = slice(first, first + len(own.logprobs))
    if not len(streams.logprobs):
        logging.warning("no usable trajectory in this batch; it is skipped")
        return state, {"batch/dropped": float(len(dropped))}, dropped

    advantages, targets, has_target = _credit(run, learner, streams)
    minibatch = np.concatenate([_minibatch_of_token(part, i) for i, part in enumerate(parts)])
    minibatch = np.concatenate([g["m"] for g in processes.all_gather_arrays({"m": minibatch})])
    trained = streams.trained[streams.token_trajectory]
    policy_weights = _weights(run, streams, minibatch, config.loss.aggregate, trained)[mine]
    value_weights = _weights(run, streams, minibatch, "token", trained & has_target)[mine]
    batches = []
    edges = np.cumsum([0, *(len(p.token_read) for p in packs)])
    for pack, a, b in zip(packs, edges[:-1], edges[1:], strict=True):
        tokens = slice(first + a, first + b)
        reads = fill.fill_policy(pack, advantages=advantages[tokens], weights=policy_weights[a:b])
        if learner.score is not None:
            reads = fill.fill_critic(
                reads, pack, values=own.values[a:b], targets=targets[tokens], weights=value_weights[a:b]
            )
        batches.append(_to_device(run, learner, pack.nodes, reads))

    metrics: dict[str, jax.Array] = {}
    for _ in range(config.learner.epochs):
        for batch, count in batches:
            state, metrics = learner.update(
                state, run.frozen, batch, count, {k: np.float32(v) for k, v in rates.items()}
            )
    out = {f"learner/{key}": float(value) for key, value in jax.device_get(metrics).items()}
    seconds = time.perf_counter() - started
    computed = sum(p.tokens_computed for p in packs)
    out |= {
        "batch/trajectories": float(len(streams.outcome)),
        "batch/steps": float(len(streams.rewards)),
        "batch/tokens": float(len(streams.logprobs)),
        "batch/dropped": float(len(dropped)),
        "batch/sharing": sum(p.tokens_stored for p in packs) / max(computed, 1),
        "batch/fill": computed / max(sum(p.nodes.tokens.size for p in packs), 1),
        "batch/advantage_std": float(advantages[trained].std()),
        "time/learn": seconds,
        "time/learner_tokens": float(computed * config.learner.epochs),
    }
    return state, out, with_advantages(ordered, advantages[mine]) + dropped


def _weights(run: Run, streams: flat.Streams, minibatch: np.ndarray, aggregate: str, mask: np.ndarray) -> np.ndarray:
    """Loss weights of the masked tokens, [K] over all processes; each minibatch is a batch of its own."""
    group = np.unique(streams.group, return_inverse=True)[1]
    units = (streams.token_step, streams.token_trajectory, group[streams.token_trajectory])
    weights = np.zeros(len(mask), np.float32)
    for i in range(run.config.learner.minibatches):
        weights += fill.aggregate_weights(
            aggregate, *units, mask & (minibatch == i), fixed_denominator=run.config.loss.fixed_denominator
        )
    return weights


def _check_final_prompts(trajectories: Sequence[Trajectory]) -> None:
    for t in trajectories:
        if POLICIES[t.outcome].bootstrap and t.final_prompt_ids is None:
            raise ValueError(
                f"trajectory {t.uid} was cut ({t.outcome}) without final_prompt_ids, where the critic values its "
                "future; the agent must give them to session.finish()"
            )


def with_advantages(trajectories: Sequence[Trajectory], advantages: np.ndarray) -> list[Trajectory]:
    """The trajectories with the advantage of each response token in `info["advantages"]`, one list a step."""
    out, at = [], 0
    for t in trajectories:
        lists = []
        for step in t.steps:
            lists.append([round(float(a), 4) for a in advantages[at : at + len(step.response_ids)]])
            at += len(step.response_ids)
        out.append(dataclasses.replace(t, info={**t.info, "advantages": lists}))
    return out


def _minibatches(trajectories: Sequence[Trajectory], count: int) -> list[list[Trajectory]]:
    """Splits by whole groups, in order."""
    groups = np.unique([t.group for t in trajectories])
    parts = [set(part.tolist()) for part in np.array_split(groups, count)]
    return [[t for t in trajectories if t.group in part] for part in parts]


def _minibatch_of_token(part: Sequence[Trajectory], index: int) -> np.ndarray:
    return np.full(sum(len(s.response_ids) for t in part for s in t.steps), index, np.int32)


def _to_device(
    run: Run, learner: Learner, nodes: Nodes, reads: Reads
) -> tuple[Batch, np.int32]:
    """A batch on the learner's mesh, and how many of its microbatches hold data in any process."""
    c = run.config.learner
    rows = c.rows // processes.process_count()
    batch = to_microbatches(nodes, reads, microbatches=learner.microbatches, rows=rows)
    used = max(processes.all_gather_json(-(-nodes.tokens.shape[0] // rows)))
    return meshes.global_batch(batch, run.learner_mesh), np.int32(used)


def _critic(
    run: Run, learner: Learner, params: Params, packs: Sequence[packing.Packing]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Values of the sampled tokens and at the final prompts, in stream order."""
    if learner.score is None:
        return None, None
    values, final_values = [], []
    for pack in packs:
        batch, count = _to_device(run, learner, pack.nodes, pack.reads)
        value = learner.score(params, run.frozen, batch, count).value
        assert value is not None, "a program that scores for a critic has one"
        rows = meshes.local_rows(value, run.learner_mesh)
        per_read = rows.reshape(-1, rows.shape[-1])[: pack.rows]
        values.append(fill.gather_tokens(pack, per_read))
        final_values.append(fill.gather_final(pack, per_read))
    return np.concatenate(values), np.concatenate(final_values)


def _credit(run: Run, learner: Learner, streams: flat.Streams) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Advantages, value targets and where those exist, [K] over all processes; computed alike in each."""
    k = len(streams.logprobs)
    if learner.credit is None:
        return np.ones(k, np.float32), np.zeros(k, np.float32), np.zeros(k, bool)
    c = run.config
    trajectories = c.rollout.groups * c.rollout.samples
    steps = trajectories * (c.budget.max_steps + c.budget.final_answer_step)
    batch = flat.to_batch(
        streams,
        trajectories=trajectories,
        steps=steps,
        tokens=steps * c.budget.response_tokens,
        critic=learner.score is not None,
    )
    credit = jax.device_get(learner.credit(batch))
    return credit.advantages[:k], credit.value_targets[:k], credit.value_mask[:k]


def rollout_metrics(counters: Counters, tools: Meter) -> dict[str, float]:
    """What engine and tools did, as metrics of this process."""
    return {
        **tools.metrics(),
        "rollout/occupancy": counters.occupancy,
        "rollout/occupancy_while_waiting": counters.occupancy_while_waiting,
        "rollout/host_share": counters.host_share,
        "rollout/prefill_tokens": float(counters.prefill_tokens),
        "rollout/prefill_saved": float(counters.prefill_tokens_saved),
        "rollout/prefill_padded": float(counters.prefill_tokens_padded),
        "rollout/moved_tokens": float(counters.moved_tokens),
        "time/decode_tokens": float(counters.decode_tokens),
        "time/rollout": counters.seconds,
        "time/decode": counters.decode_seconds,
    }

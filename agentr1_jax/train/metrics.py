"""Metrics of a batch or an evaluation, over the trajectories of all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentr1_jax.envs.rewards import totals
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.runtime import processes
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.trajectory import POLICIES, Trajectory


def trajectory_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over trajectories: metrics, reward and its parts, steps, tokens, outcomes. Collective.

    `em` is also given for each kind of question and each task of a mixture. A metric is averaged over the trajectories
    that have it, an outcome over all.
    """
    sums: dict[str, list[float]] = {}

    def add(key: str, value: float) -> None:
        total = sums.setdefault(key, [0.0, 0])
        total[0], total[1] = total[0] + value, total[1] + 1

    for t in trajectories:
        for key, value in t.metrics.items():
            add(key, value)
        if "em" in t.metrics:
            for kind in (t.row.get("kind"), t.row.get("task")):
                if kind is not None:
                    add(f"em_{kind}", t.metrics["em"])
        if POLICIES[t.outcome].reward == "use":
            add("reward", t.total_reward)
            for part, value in totals(step.raw_reward_parts for step in t.steps).items():
                add(f"reward/{part}", value)
        add("steps", len(t.steps))
        add("response_tokens", sum(len(s.response_ids) for s in t.steps))
        for outcome in {u.outcome for u in trajectories}:
            add(f"outcome/{outcome}", float(t.outcome is outcome))
    pooled: dict[str, list[float]] = {}
    for part in processes.all_gather_json(sums):
        for key, (total, count) in part.items():
            pool = pooled.setdefault(key, [0.0, 0])
            pool[0], pool[1] = pool[0] + total, pool[1] + count
    everything = pooled.get("steps", [0.0, 0])[1]
    # A process that saw no such outcome adds nothing to its count.
    return {
        key: total / max(everything if key.startswith("outcome/") else count, 1)
        for key, (total, count) in sorted(pooled.items())
    }


def policy_ages(trajectories: Sequence[Trajectory], update: int, staleness: int) -> dict[str, float]:
    """Return the share of sampled tokens by age: updates since the policy that sampled them. Collective.

    Empty without staleness, where all ages are 0.
    """
    if not staleness:
        return {}
    counts = [0] * (staleness + 1)
    for t in trajectories:
        for step in t.steps:
            counts[update - step.policy_version] += len(step.response_ids)
    total = [sum(of_age) for of_age in zip(*processes.all_gather_json(counts), strict=True)]
    return {f"rollout/age_{age}": count / max(sum(total), 1) for age, count in enumerate(total)}


def rollout_metrics(engine: Engine, tools: ToolMetrics) -> dict[str, float]:
    """Return what engine and tools of this process did since their counters were reset."""
    return {**tools.metrics(), **engine.counters.metrics()}


def tokens_per_second(metrics: Mapping[str, float]) -> str:
    """Return the rates of an update, for the progress line."""
    rates = []
    for what, tokens, seconds in (("learned", "learner_tokens", "learn"), ("decoded", "decode_tokens", "rollout")):
        if metrics.get(f"time/{seconds}") and f"time/{tokens}" in metrics:
            rates.append(f"{metrics[f'time/{tokens}'] / metrics[f'time/{seconds}']:,.0f} {what}")
    return f"tokens/s: {', '.join(rates)}"

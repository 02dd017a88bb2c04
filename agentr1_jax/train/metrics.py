"""Every metric that a run may write to `metrics.jsonl`: its name, its unit, its meaning. docs/metrics.md is made of it.

A name is what the record has, with `*` for what a run names itself. A test holds the table against real runs: a metric
that is not listed fails it, and so does one that is listed without a condition and not written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of a run.

    Attributes:
      name: key of the record; `*` stands for any text.
      unit: e.g. `s`, `tokens`, `nats`; empty for a bare number.
      meaning: a sentence.
      condition: in which runs it is written; empty for all that have the phase.
    """

    name: str
    unit: str
    meaning: str
    condition: str = ""


RECORD = (
    Metric("index", "", "Number of the record, without gaps."),
    Metric(
        "phase", "", "`pretraining`, `warm_start`, `rl`; `eval` of a greedy, `eval_sampled` of a sampled evaluation."
    ),
    Metric("update", "", "Updates of the phase so far."),
)
TRAJECTORIES = (
    Metric("em", "share", "Right answers: exact match, or what the task counts as success."),
    Metric(
        "em_*", "share", "The same for one kind of question, or one task of a mixture.", "rows with a kind or a task"
    ),
    Metric("f1", "", "F1 of the words of the answer.", "tasks with texts as answers"),
    Metric("gold_recall", "share", "Gold passages that were found.", "multihop, hopworld"),
    Metric("tool_calls", "", "Tool calls of a trajectory.", "tasks with tools"),
    Metric("repaired_calls", "", "Tool calls whose JSON was repaired, of a trajectory.", "tools.lenient"),
    Metric("seen", "share", "Trajectories in which a call came to the target.", "countdown"),
    Metric("success", "share", "Episodes that reached the goal.", "tabular environments"),
    Metric("return", "", "Undiscounted return of the environment.", "tabular environments"),
    Metric("expected_return", "", "Return with each reward in its mean, given state and action.", "games"),
    Metric("turns_reached", "share", "User turns that ended in the right state.", "bfcl"),
    Metric("summary_score", "", "Score of the summaries.", "whereabouts with summaries"),
    Metric("reward", "", "Return of a trajectory before shaping, where its rewards count; 0 of `failure_as_zero`."),
    Metric("reward/*", "", "Part of the return by its name."),
    Metric("steps", "", "Steps of a trajectory."),
    Metric("response_tokens", "tokens", "Sampled tokens of a trajectory."),
    Metric(
        "outcome/*", "share", "Trajectories that ended so; `Outcome` in `agentr1_jax/trajectory.py` lists the ways."
    ),
)
"""Means over trajectories: `rollout/NAME` of an RL batch, `eval/NAME` of an evaluation."""
ENGINE = (
    Metric("rollout/occupancy", "share", "Slot iterations of decoding that sampled a token."),
    Metric("rollout/occupancy_while_waiting", "share", "The same while a trajectory waited for a slot; 1 if none did."),
    Metric("rollout/prefill_tokens", "tokens", "Prompt tokens that were computed."),
    Metric("rollout/prefill_saved", "tokens", "Prompt tokens that the KV cache had."),
    Metric("rollout/prefill_padded", "tokens", "Padding of prefill calls."),
    Metric("rollout/copied_tokens", "tokens", "Cache entries copied between slots: shared prefixes and swaps."),
    Metric("rollout/age_*", "share", "Sampled tokens by age: updates since their policy.", "rollout.staleness"),
    Metric("time/rollout", "s", "Time of the rollouts of a batch."),
    Metric("time/decode", "s", "Part of it in decode calls."),
    Metric("time/decode_tokens", "tokens", "Tokens sampled in a batch."),
    Metric("time/host_share", "share", "Part of the rollout time in which no device program ran."),
)
TOOLS = (
    Metric("tools/calls", "", "Tool calls of a batch."),
    Metric("tools/failures", "", "Calls that came back with an error."),
    Metric("tools/retries", "", "Failed attempts that were repeated."),
    Metric("tools/cancelled", "", "Calls whose trajectory ended first."),
    Metric("tools/abandoned_threads", "", "Threads of calls that hang, at this moment."),
    Metric("tools/error/*", "", "Failed attempts by kind of error.", "calls that failed"),
    Metric("time/tool_mean", "s", "Mean time that a trajectory waited for a call.", "batches with calls"),
    Metric("time/tool_p50", "s", "Median of it.", "batches with calls"),
    Metric("time/tool_p95", "s", "95th percentile of it.", "batches with calls"),
    Metric("time/tool_max", "s", "Largest of it.", "batches with calls"),
)
BATCH = (
    Metric("batch/trajectories", "", "Trajectories that are trained or count in statistics, of this process."),
    Metric("batch/steps", "", "Their steps."),
    Metric("batch/tokens", "tokens", "Their sampled tokens."),
    Metric("batch/dropped", "", "Trajectories that their outcome keeps out of the batch."),
    Metric("batch/malformed", "", "Trajectories that no row can hold, and that are left out."),
    Metric("batch/sharing", "", "Tokens of all steps, each with its whole prompt, per token computed."),
    Metric("batch/row_occupancy", "share", "Cells of the packed rows that are not padding."),
    Metric("batch/advantage_std", "", "Standard deviation of the advantages of trained tokens."),
    Metric("batch/zero_variance_groups", "", "Groups whose returns are all equal."),
    Metric("batch/lone_members", "", "Groups of one trajectory."),
    Metric("batch/steps_without_key", "", "Steps without a state key."),
    Metric("batch/dynamic_sampling_groups", "", "Further groups that were sampled in place of zero-variance groups."),
    Metric("time/learn", "s", "Time of a train step, without sampling."),
    Metric("time/learner_tokens", "tokens", "Tokens that a train step computes."),
)
CREDIT = (
    Metric("credit/baseline", "", "Mean return to go of earlier batches, the fallback of `state_baseline`."),
    Metric("credit/reward_std", "", "Standard deviation of returns that rewards are divided by; 1 for none."),
    Metric(
        "credit/belief_first",
        "",
        "Mean probability of a token of the gold answer at the first prompts.",
        "credit.probe",
    ),
    Metric("credit/belief_last", "", "The same at the prompts of the last steps.", "credit.probe"),
    Metric("credit/whitening_mean", "", "Mean that whitening took from the advantages.", "schemes that whiten"),
    Metric("credit/whitening_std", "", "Standard deviation that it divided them by.", "schemes that whiten"),
)
LEARNER = (
    Metric("learner/lr", "", "Learning rate of the policy."),
    Metric("learner/loss", "", "Loss that is minimised: policy, value, KL and entropy terms."),
    Metric("learner/policy_loss", "", "Its policy term; in imitation the negative log-likelihood of a token."),
    Metric("learner/value_loss", "", "Its value term, before `loss.value_coef`.", "with a critic"),
    Metric("learner/kl_loss", "nats", "Its KL term, before `kl.coef`.", "kl.where=loss"),
    Metric(
        "learner/entropy_loss", "nats", "Its entropy term, before `loss.entropy_coef`: aggregated as the policy term."
    ),
    Metric("learner/tokens", "tokens", "Trained tokens of an update."),
    Metric("learner/logprob", "nats", "Mean log-prob of a trained token."),
    Metric("learner/entropy", "nats", "Mean entropy at a trained token."),
    Metric("learner/ratio", "", "Mean ratio of new to old probability, of the unit `loss.ratio`."),
    Metric("learner/max_ratio", "", "Largest ratio."),
    Metric("learner/clip_fraction", "share", "Tokens whose ratio is clipped."),
    Metric(
        "learner/clip_bias_norm", "", "Norm of the gradient that the clip took from the decoder.", "loss.clip_bias_norm"
    ),
    Metric("learner/approx_kl", "nats", "k3 estimate of the KL from the old policy to the new one."),
    Metric("learner/logprob_gap", "nats", "Mean difference between sampler's and learner's log-prob of a token."),
    Metric("learner/max_logprob_gap", "nats", "Largest such difference."),
    Metric("learner/ref_kl", "nats", "k3 estimate of the KL to the policy that RL started from.", "kl.kind"),
    Metric("learner/kl_coef", "", "Present coefficient of an adaptive KL.", "kl.target"),
    Metric("learner/grad_norm", "", "Global norm of the gradient before clipping."),
    Metric("learner/skipped", "", "Updates so far that were skipped because something was not finite."),
    Metric("learner/skipped_in_a_row", "", "The last of them without a good one between; 3 end the run."),
)
_GAP = "where the learner's own log-probs are computed: critic, KL, recomputed log-probs, mask ablations or probes"
GAP = (
    Metric("gap/mean", "nats", "Mean of |d|, d = learner's less sampler's log-prob of a token.", _GAP),
    Metric("gap/max", "nats", "Largest |d|.", _GAP),
    Metric("gap/k1", "nats", "Estimate k1 of the KL from sampler to learner: mean of -d.", _GAP),
    Metric("gap/k3", "nats", "Estimate k3 of the same: mean of exp(d) - d - 1.", _GAP),
    Metric("gap/chi2_token", "", "Estimate of the chi-squared divergence: mean of exp(2d) - 1 over tokens.", _GAP),
    Metric("gap/chi2_sequence", "", "The same over trajectories, d summed.", _GAP),
    Metric("gap/learner_log_perplexity", "nats", "Mean over trajectories of the learner's log-perplexity.", _GAP),
    Metric("gap/sampler_log_perplexity", "nats", "Mean over trajectories of the sampler's log-perplexity.", _GAP),
    Metric("gap/learner_perplexity", "", "Mean over trajectories of the learner's perplexity.", _GAP),
    Metric("gap/sampler_perplexity", "", "Mean over trajectories of the sampler's perplexity.", _GAP),
    Metric("gap/perplexity_ratio", "", "Mean of learner's over sampler's perplexity.", _GAP),
    Metric("gap/log_perplexity_difference", "nats", "Mean of learner's less sampler's log-perplexity.", _GAP),
    Metric("gap/log_perplexity_difference_abs", "nats", "Mean of its absolute value.", _GAP),
    Metric("gap/log_perplexity_difference_max", "nats", "Its largest value.", _GAP),
    Metric("gap/log_perplexity_difference_min", "nats", "Its least value.", _GAP),
    Metric("gap/nonfinite", "tokens", "Tokens with a log-prob that is not finite; the others leave them out.", _GAP),
)


def sections() -> Iterator[tuple[str, tuple[Metric, ...]]]:
    """Yield (heading, metrics) of every section of the page."""
    yield "Every record", RECORD
    for prefix, what in (("rollout", "an RL batch"), ("eval", "an evaluation")):
        yield f"Trajectories of {what}", tuple(dataclasses.replace(m, name=f"{prefix}/{m.name}") for m in TRAJECTORIES)
    yield "Rollout engine", ENGINE
    yield "Tools", TOOLS
    yield "Batch and train step", BATCH
    yield "Credit", CREDIT
    yield "Learner", LEARNER
    yield "Gap between sampler and learner", GAP


METRICS = {metric.name: metric for _, metrics in sections() for metric in metrics}
"""Name -> metric."""

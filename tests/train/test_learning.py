"""The train step: what it drops, what its updates hold, and what must not change them."""

from __future__ import annotations

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from builders import LONGEST, with_logprobs
from examples import POLICY, check_close, outputs_of, parameters
from learners import (
    CENTRED,
    EVERYTHING,
    TWICE,
    bad,
    batch,
    check_equal,
    exact,
    make,
    of_size,
    recording,
    sampled,
    slow_logprobs,
)
from pair import run as run_processes
from small_runs import UNOPTIMISED

from agentr1_jax.learner.config import PACKING_MODES
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.train import phases
from agentr1_jax.train.train_step import StepMetrics
from agentr1_jax.trajectory import POLICIES, Outcome, OutcomePolicy, Step, Trajectory
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl

MALFORMED = {
    "no step": (dataclasses.replace(bad(), steps=()), "no step"),
    "no response": (bad(**of_size(4, 0)), "a step without prompt or response tokens"),
    "NaN reward": (bad(reward=float("nan")), "its reward is nan"),
    "huge reward": (bad(reward=1e39), "its reward is 1e+39"),  # Beyond single precision.
    "-inf log-prob": (bad(logprobs=np.float32([-1, -np.inf])), "step 1 has a log-prob that is not finite"),
    "unknown id": (bad(response_ids=np.int32([1, POLICY.vocab_size])), "beyond the vocabulary"),
    "long response": (bad(**of_size(4, 21)), "which do not fit a row"),
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_a_malformed_trajectory_is_dropped_and_the_others_are_trained_as_if_it_had_never_been(name, caplog, tmp_path):
    made, good = make(CENTRED, wide=True), exact()
    t, fault = MALFORMED[name]
    t = dataclasses.replace(t, uid="the/bad/one", group=0)
    usable, dropped, malformed = made.sift([*good[:3], t, *good[3:]], critic=False)
    assert usable == good and dropped == [t] and malformed == 1
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.startswith("trajectory the/bad/one is dropped: ")
    assert fault in warning
    expected, metrics, _ = made.learn(good)
    got, with_bad, out = made.learn([*good[:3], t, *good[3:]])
    check_equal(got, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(got.params)))
    assert with_bad == metrics | {"batch/dropped": 1, "batch/malformed": 1}
    assert out[-1] is t and [o.uid for o in out[:-1]] == [g.uid for g in good]
    assert all(len(s.advantages) == len(s.response_ids) for o in out[:-1] for s in o.steps)
    write_jsonl(tmp_path / "t.jsonl.gz", out)  # As the run does.
    assert len(list(read_jsonl(tmp_path / "t.jsonl.gz"))) == len(out)


def test_what_an_outcome_drops_is_no_malformed_trajectory(caplog):
    made, good = make(CENTRED, wide=True), exact()
    failed = dataclasses.replace(bad(reward=None, logprobs=np.float32([np.nan, np.nan])), outcome=Outcome.TOOL_FAILURE)
    unborn = dataclasses.replace(failed, steps=())
    assert made.sift([failed, *good, unborn], critic=True) == (good, [failed, unborn], 0)
    assert not caplog.records


def test_what_only_a_programmer_can_mend_is_an_error():
    made = make(CENTRED, wide=True)
    cut = dataclasses.replace(bad(), uid="the/cut/one", outcome=Outcome.MAX_STEPS)
    assert made.sift([cut], critic=False) == ([cut], [], 0)
    with pytest.raises(ValueError, match=r"the/cut/one was truncated .* without final_prompt_ids.*finish\(\)"):
        made.sift([cut], critic=True)
    long = dataclasses.replace(cut, final_prompt_ids=np.zeros(LONGEST + 1, np.int32))
    assert made.sift([long], critic=False) == ([long], [], 0)
    assert made.sift([long], critic=True) == ([], [long], 1)
    with pytest.raises(ValueError, match=r"\(answered\): steps \[1\] have no reward"):
        made.sift([bad(reward=None)], critic=False)


@pytest.mark.parametrize("trajectories", [[], [t for t, _ in MALFORMED.values()]], ids=["empty", "all malformed"])
@pytest.mark.parametrize("changes", [CENTRED, EVERYTHING], ids=["centred", "everything"])
def test_a_batch_of_nothing_changes_nothing(trajectories, changes):
    made = make(changes, wide=True)
    state, _, _ = made.learn(exact())
    before = jax.device_get(state)
    for run in (made, made.under(TWICE)):
        state, metrics, out = run.learn(trajectories, state)
        check_equal(state, before)
        count = len(trajectories)
        assert metrics == {"batch/dropped": count, "batch/malformed": count} and out == trajectories


def test_a_minibatch_of_nothing_is_no_update():
    """Neither Adam's momentum nor the count of updates may move for it."""
    made, (one, *rest) = make(CENTRED, wide=True), exact()
    states = [made.learn([one, *rest])[0] for _ in range(2)]
    expected, _, _ = made.under({"learner.epochs": 2}).learn([one], states[0])
    got, metrics, _ = made.under(TWICE).learn([one, bad(reward=float("nan"))], states[1])
    check_equal(got, expected)
    assert int(got.updates) == 3 and metrics["batch/trajectories"] == 1


def test_a_minibatch_that_is_masked_is_no_update(monkeypatch):
    table = {**POLICIES, Outcome.TIME_LIMIT: OutcomePolicy("use", False, "mask")}
    for module in ("agentr1_jax.trajectory", "agentr1_jax.credit.batch", "agentr1_jax.train.train_step"):
        monkeypatch.setattr(f"{module}.POLICIES", table)
    made = make(CENTRED, wide=True)
    state, _, _ = made.learn(exact())
    before = jax.device_get(state)
    got, _, _ = made.learn([dataclasses.replace(t, outcome=Outcome.TIME_LIMIT) for t in exact()], state)
    check_equal(got, before)


def test_metrics_of_several_updates_are_joined():
    names = ("loss", "logprob_gap", "max_logprob_gap", "max_ratio", "skipped", "skipped_in_a_row")
    numbers = ((1.0, 0.5, 3.0, 1.0, 0, 1), (4.0, 1.5, 9.0, 5.0, 2, 0), (4.0, 2.5, 1.0, 2.0, 3, 0))
    updates = [dict(zip(names, x, strict=True)) for x in numbers]
    assert StepMetrics({"batch/steps": 7.0, "learner/ref_kl": 0.25}, updates).fetch() == {
        "learner/loss": 3.0,
        "learner/logprob_gap": 0.5,
        "learner/max_logprob_gap": 3.0,
        "learner/max_ratio": 5.0,
        "learner/skipped": 3.0,
        "learner/skipped_in_a_row": 0.0,
        "batch/steps": 7.0,
        "learner/ref_kl": 0.25,
    }
    assert StepMetrics({"batch/dropped": 2.0}, []).fetch() == {"batch/dropped": 2.0}


def test_the_gap_is_that_of_the_first_update():
    made, trajectories = make(CENTRED, wide=True).under(TWICE), batch()
    _, metrics, _ = made.learn(trajectories)
    gap = np.abs(outputs_of(trajectories)[0] - sampled(trajectories)[0])[sampled(trajectories)[2] < 4]
    np.testing.assert_allclose(metrics["learner/logprob_gap"], gap.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["learner/max_logprob_gap"], gap.max(), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "score", "log_ratio", "critic"),
    [
        ({}, False, False, False),
        ({"learner.old_logprobs": "learner"}, True, False, False),
        ({"credit.name": "token_gae", "critic": "shared_trunk"}, True, False, True),
        ({"critic": "shared_trunk"}, False, False, False),
        ({"kl.kind": "k2"}, True, False, False),
        ({"kl.kind": "k1", "kl.where": "reward"}, True, False, False),
        ({"loss.ratio": "trajectory"}, False, True, False),
        ({"loss.ratio": "centred_step", "loss.clip": "none"}, False, False, False),
        ({"loss.ratio": "step"}, False, False, False),
    ],
)
def test_a_learner_has_the_programs_that_its_config_needs(changes, score, log_ratio, critic):
    phase = make(changes).phase
    assert (phase.token_outputs is not None, phase.log_ratio is not None, phase.critic) == (
        score,
        log_ratio,
        critic,
    )
    assert (phase.reference is not None) == ("kl.kind" in changes) and phase.assign is not None


def test_demonstrations_are_learned_by_cross_entropy_whatever_rl_will_do():
    made = make(EVERYTHING, make_phase=phases.warm_start)
    assert made.phase.token_outputs is made.phase.log_ratio is made.phase.assign is None
    shown = batch()
    shown = with_logprobs(shown, np.zeros_like(outputs_of(shown)[0]))
    state, metrics, out = made.learn(shown)
    logprob = outputs_of(shown)[0]
    np.testing.assert_allclose(metrics["learner/loss"], -logprob.mean(), rtol=1e-5)
    assert metrics["learner/tokens"] == len(logprob) and not {"learner/kl_loss", "gap/mean"} & set(metrics)
    check_equal(state.params["value"], parameters()["value"])
    assert {a for t in out for step in t.steps for a in step.advantages} == {1.0}
    assert made.learn(shown, state)[1]["learner/loss"] < metrics["learner/loss"]


def test_pretraining_trains_every_token_of_rows_of_its_own_shape():
    texts = [[5, 9, 11] * 3, [7, 3], [17, 18, 19, 20], [5] * 30]
    steps = [Step(np.int32([1]), np.int32([*ids, 1]), np.zeros(len(ids) + 1, np.float32), 0.0) for ids in texts]
    pieces = [Trajectory(str(i), i, 0, "t", 0, (step,), Outcome.ENV_DONE) for i, step in enumerate(steps)]
    settings = {"pretrain.rows": 2, "pretrain.row_tokens": 12, "pretrain.batch": 4, "pretrain.tokens": 12}
    run, seen = make(settings, make_phase=phases.pretraining), []
    _, record, _ = run.learn(pieces, update=recording(run.phase.update, seen))
    ((_, rows),) = seen
    assert rows.packed_tokens.tokens.shape[1:] == (2, 12)
    *trained, too_long = pieces
    assert record["batch/malformed"] == 1 and too_long.steps[0].response_ids.size > 12
    targets = rows.loss_tokens.target[rows.loss_tokens.weight > 0]
    assert sorted(targets.tolist()) == sorted(i for t in trained for i in t.steps[0].response_ids.tolist())
    logprobs = slow_logprobs(jax.device_get(run.fresh().params), trained)
    # The temperature divides logits of demonstrations as it does in sampling.
    assert record["learner/loss"] == pytest.approx(-np.mean(logprobs), rel=1e-4)


def test_kl_in_the_loss_is_0_at_the_reference_and_positive_elsewhere():
    made = make(EVERYTHING, wide=True)
    state, metrics, _ = made.learn(batch())
    assert abs(metrics["learner/kl_loss"]) < 1e-12 and abs(metrics["learner/ref_kl"]) < 1e-12
    params = jax.device_get(state.params)
    _, metrics, _ = made.learn(batch(), state)
    logprob, start = slow_logprobs(params, batch()), slow_logprobs(parameters(), batch())
    k3 = np.mean(np.exp(start - logprob) - 1 + logprob - start)
    assert k3 > 1e-6
    np.testing.assert_allclose(metrics["learner/ref_kl"], k3, rtol=1e-5)
    np.testing.assert_allclose(metrics["learner/kl_loss"], k3, rtol=1e-5)


def test_kl_in_the_reward_is_a_reward_of_tokens():
    rl = EVERYTHING | {"credit.name": "token_gae", "kl.kind": "k1", "kl.where": "reward", "loss.ratio": "token"}
    made, seen, trajectories = make(rl, wide=True), [], batch()

    def credit(streams):
        seen.append(streams)
        return made.phase.assign(streams)

    def no_update(state, frozen, batch, count, rates):
        assert batch.loss_tokens.ref_logprob is None, "it would be in the loss, too"
        return state, {"loss": jnp.zeros(())}

    other = {"decoder": tiny.decoder_params(POLICY, seed=5)}
    with jax.enable_x64(True):
        reference = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), other["decoder"])
    _, metrics, _ = made.learn(trajectories, kl_coef=0.3, assign=credit, update=no_update, reference=reference)
    x = slow_logprobs(parameters(), trajectories) - slow_logprobs(other, trajectories)
    assert np.abs(x).max() > 1
    np.testing.assert_allclose(seen[0].token_rewards[: len(x)], -0.3 * x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["learner/ref_kl"], np.mean(np.exp(-x) - 1 + x), rtol=1e-5)
    owed = [t.total_reward for t in trajectories] - 0.3 * np.bincount(sampled(trajectories)[2], x)
    np.testing.assert_allclose(seen[0].returns[: len(owed)], owed, rtol=1e-5, atol=1e-5)


def test_recomputed_log_probs_are_the_centre_of_the_ratio_whatever_the_sampler_said():
    made, trajectories = make(EVERYTHING, wide=True), batch()
    _, metrics, _ = made.learn(trajectories)
    for name, value in {"ratio": 1, "max_ratio": 1, "clip_fraction": 0, "approx_kl": 0}.items():
        assert abs(metrics[f"learner/{name}"] - value) < 1e-9, name
    d = slow_logprobs(parameters(), trajectories) - sampled(trajectories)[0]
    for name in ("gap/mean", "learner/logprob_gap"):
        np.testing.assert_allclose(metrics[name], np.abs(d).mean(), rtol=1e-5)
    for name in ("gap/max", "learner/max_logprob_gap"):
        np.testing.assert_allclose(metrics[name], np.abs(d).max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["gap/k1"], -d.mean(), rtol=1e-5)
    assert metrics["gap/nonfinite"] == 0


@pytest.mark.parametrize(("kind", "unit"), [("tis_token", "trajectory"), ("mask_sequence", "step")])
def test_the_correction_is_a_weight_of_each_tokens_policy_loss(kind, unit):
    """The step with wrong sampler's log-probs is the one with right ones and advantages that are so weighted."""
    made = make(EVERYTHING, wide=True).under({"correction.kind": kind, "correction.unit": unit, "correction.cap": 1.5})
    right, rng = exact(), np.random.default_rng(0)
    logprob, step, _ = sampled(right)
    d = rng.uniform(-1.5, 1.5, len(logprob))
    mean = (np.bincount(step, d) / np.bincount(step))[step]
    factor = np.minimum(np.exp(d), 1.5) if kind == "tis_token" else 1.0 * (np.abs(mean) <= np.log(2))
    assert len(np.unique(factor)) > 1

    def weighted(streams):
        credit = made.phase.assign(streams)
        factors = np.pad(factor, (0, len(credit.advantages) - len(factor))).astype(np.float32)
        return dataclasses.replace(credit, advantages=credit.advantages * factors)

    got, _, _ = made.learn(with_logprobs(right, logprob - d))
    expected, _, _ = made.learn(right, assign=weighted)
    unweighted, _, _ = made.learn(right)
    moved, wanted, other = (
        jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), state.params, parameters())
        for state in (got, expected, unweighted)
    )
    check_close(moved, wanted, 1e-5)
    with pytest.raises(AssertionError):
        check_close(moved["decoder"], other["decoder"], 1e-2)


@pytest.mark.parametrize("changes", [EVERYTHING, CENTRED], ids=["trajectory", "centred"])
def test_ratios_of_a_minibatch_in_every_update_of_two_passes(changes):
    """Each update's loss, by loops over the log-probs that a slow forward pass finds for its parameters."""
    made, trajectories, seen, advantages, losses = make(changes, wide=True), exact(), [], [], []

    def credit(streams):
        advantages.append(np.asarray((found := made.phase.assign(streams)).advantages))
        return found

    def update(*args):
        state, metrics = recording(made.phase.update, seen)(*args)
        losses.append(metrics)
        return state, metrics

    made.under(TWICE).learn(trajectories, assign=credit, update=update)
    assert len(losses) == 4
    old, _, owner = sampled(trajectories)
    changed = 0
    for i, ((params, _), metrics) in enumerate(zip(seen, losses, strict=True)):
        part = trajectories[:4] if i % 2 == 0 else trajectories[4:]
        mine = (owner < 4) == (i % 2 == 0)
        new = slow_logprobs(params, part)
        units = sampled(part)[1:]
        expected, _ = reference.policy_loss(
            *(changes["loss.ratio"], "ppo", new, old[mine], advantages[0][: len(owner)][mine], *units),
            **{"low": 0.2, "high": 0.2, "c": 3.0, "tau": (1.0, 1.0)},
        )
        np.testing.assert_allclose(metrics["policy_loss"], np.mean(expected), atol=1e-5)
        changed += not np.isclose(np.mean(expected), -np.mean(advantages[0][: len(owner)][mine]), atol=1e-3)
    assert changed >= 2, "no ratio moved"


def updates_on(made, trajectories):
    """What all updates on a batch changed, and its metrics."""
    state, metrics, _ = made.under(TWICE).learn(trajectories)
    assert int(state.updates) == 4
    with jax.enable_x64(True):
        start = jax.device_get(made.fresh().params)
    return jax.tree.map(lambda new, old: new - old, jax.device_get(state.params), start), metrics


@pytest.mark.parametrize("changes", [EVERYTHING, CENTRED], ids=["everything", "centred"])
@pytest.mark.parametrize("context", ["append", "mixed"])
def test_layout_changes_nothing(changes, context):
    """Packing mode, microbatches, padding and order, over two passes of two minibatches; in double precision."""
    made, trajectories = make(changes, wide=True), batch(1, context)
    expected, metrics = updates_on(made, trajectories)
    others = [made.under({"learner.packing": mode}) for mode in PACKING_MODES]
    others.append(make(changes | {"learner.rows": 2, "learner.row_tokens": LONGEST + 11}, wide=True))
    for other in others:
        got, other_metrics = updates_on(other, trajectories)
        check_close(got, expected, 1e-9)
        for name, x in metrics.items():
            if name.startswith(("learner", "gap")):
                np.testing.assert_allclose(other_metrics[name], x, rtol=1e-9, atol=1e-12, err_msg=name)
    shuffled = [trajectories[i] for i in np.random.default_rng(0).permutation(len(trajectories))]
    # Credit is computed in single precision; sums of eighths, which are all that GRPO needs, are exact in it.
    check_close(updates_on(made, shuffled)[0], expected, 1e-9 if changes is CENTRED else 1e-5)


CHILD = """
import pickle, sys
from agentr1_jax.runtime import processes

processes.initialize()
import test_learning as t

index, count = processes.process_index(), int(sys.argv[2])
mine = [x for x in t.batch(1) if x.group % count == index]
out = [t.updates_on(t.make(changes, wide=True, shards=int(sys.argv[3])), mine) for changes in (t.EVERYTHING, t.CENTRED)]
if index == 0:
    with open(sys.argv[1], "wb") as written:
        pickle.dump(out, written)
"""


@pytest.mark.slow
def test_processes_change_nothing(tmp_path, monkeypatch):
    """Two processes with two devices each, between which the groups are dealt as in a run."""
    monkeypatch.setenv("XLA_FLAGS", UNOPTIMISED["XLA_FLAGS"])
    found = []
    for processes, devices in ((1, 1), (2, 2)):
        run_processes(processes, devices, CHILD, str(tmp_path / "moved"), str(processes), str(processes * devices))
        with open(tmp_path / "moved", "rb") as written:
            found.append(pickle.load(written))
    for tolerance, (expected, metrics), (got, got_metrics) in zip((1e-5, 1e-9), *found, strict=True):
        check_close(got, expected, tolerance)
        for name, x in metrics.items():
            if name.startswith("learner") and "gap" not in name:
                np.testing.assert_allclose(got_metrics[name], x, rtol=tolerance, atol=1e-7, err_msg=name)


def test_no_update_is_waited_for():
    """Its metrics are not looked at before somebody asks for them."""
    made = make(CENTRED, wide=True)

    class Unread:
        def __float__(self):
            raise TimeoutError("waited")

    with jax.enable_x64(True):
        update = lambda state, *_: (state, {"loss": Unread()})  # noqa: E731
        _, metrics, _, _ = made.under(TWICE).step(exact(), update=update)
        with pytest.raises(TimeoutError, match="waited"):
            metrics.fetch()


def test_batches_of_any_kind_and_size_run_the_same_programs():
    made, counter = make(EVERYTHING, wide=True), CompileCounter()
    state, rng, contexts = None, np.random.default_rng(0), ("append", "window", "rewrite", "branch", "mixed")
    for update in range(30):
        trajectories = batch(update, contexts[update % 5])[: rng.integers(0, 9) if update > 1 else 8]
        if update % 7 == 3:
            trajectories = [bad(reward=float("inf")), *trajectories]
        state, metrics, _ = made.learn(trajectories, state)
        if update == 1:
            compiled = counter.count
    assert counter.count == compiled
    programs = (made.phase.update, made.phase.token_outputs, made.phase.log_ratio, made.phase.assign)
    assert [program._cache_size() for program in programs] == [1] * 4
    assert int(state.skipped) == 0 and all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params)))

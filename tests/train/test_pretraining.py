"""Pretraining: texts become trajectories of one step, and a phase before the warm start trains on every token."""

from __future__ import annotations

import itertools
import signal
import types

import jax
import learners
import numpy as np
import pytest
from learners import check_equal, make
from programs import program
from small_runs import small_config

from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.runtime.metrics import read_metrics
from agentr1_jax.trajectory import Outcome
from configs import base, quickstart
from experiments import build, checks, circle, inherited, learning, phases, sources

train = program("train")

STOP = 1


def documents(texts, tokens):
    """Pieces of texts, of a tokenizer that has one id for each letter."""
    config = base.get_config()
    config.pretrain.tokens = tokens
    tokenizer = types.SimpleNamespace(stop_id=STOP, encode_data=lambda text: [ord(letter) for letter in text])
    task = types.SimpleNamespace(name="t", texts=lambda count: texts[:count])
    return circle.documents(types.SimpleNamespace(config=config, tokenizer=tokenizer, task=task))


def test_pieces_hold_every_token_once_and_none_is_too_long() -> None:
    texts = ["abcdefghij", "", "xyz", "12345678"]
    made = documents(texts, tokens=6)
    said = [(t.steps[0].prompt_ids.tolist(), t.steps[0].response_ids.tolist()) for t in made]
    assert all(prompt == [STOP] and response[-1] == STOP and 1 + len(response) <= 6 for prompt, response in said)
    assert bytes(itertools.chain(*(response[:-1] for _, response in said))).decode() == "".join(texts)
    assert len(made) == 3 + 0 + 1 + 2 and len({t.uid for t in made}) == len({t.group for t in made}) == 6
    assert all(t.outcome is Outcome.ENV_DONE and t.total_reward == 0 for t in made)


def test_pretraining_trains_every_token_of_rows_of_its_own_shape() -> None:
    pieces = documents(["\x05\x09\x0b" * 5, "\x07\x03", "\x11\x12\x13\x14"], tokens=12)
    settings = {"pretrain.rows": 2, "pretrain.row_tokens": 12, "pretrain.batch": 4}
    made = make(settings, make_learner=phases.pretraining)
    assert made.learner.packing == PackingConfig("trajectory", 12, 12, 2)
    seen = []
    update = learners.recording(made.learner.update, seen)
    _, record, _ = made.learn(pieces, update=update)
    (_, batch) = seen[0]
    assert batch.packed_tokens.tokens.shape[1:] == (2, 12)
    trained = batch.loss_tokens.target[batch.loss_tokens.weight > 0]
    assert sorted(trained.tolist()) == sorted(i for t in pieces for i in t.steps[0].response_ids.tolist())
    logprobs = learners.slow_logprobs(jax.device_get(made.fresh().params), pieces)
    # The temperature divides logits of demonstrations as it does in sampling.
    assert record["learner/loss"] == pytest.approx(-np.mean(logprobs), rel=1e-4)


def test_both_supervised_phases_take_the_same_step_where_their_rows_hold_the_same() -> None:
    pieces = documents(["\x05\x09\x0b\x04", "\x07\x03", "\x11\x12\x13\x14"], tokens=8)
    settings = {"pretrain.rows": 4, "pretrain.row_tokens": 16, "learner.row_tokens": 16, "learner.row_loss_tokens": 16}
    one, other = (make(settings, make_learner=each) for each in (phases.pretraining, phases.supervised))
    check_equal(one.learn(pieces)[0].params, other.learn(pieces)[0].params)


class Broken(Exception):
    """Ends a run without a word, as kill -9 does."""


def supervised(monkeypatch, config, stop_after=None, break_at=None):
    """The records of a run without RL that nothing is sampled in, and what its checkpoint holds of parameters.

    Args:
      stop_after: number of updates, over both phases and from where it starts, after which it is asked to stop.
      break_at: phase at whose beginning it ends without a word.
    """
    learn, count = learning.learn, itertools.count(1)

    def counted(*arguments):
        if next(count) == stop_after:
            signal.raise_signal(signal.SIGTERM)
        return learn(*arguments)

    def broken(*_):
        raise Broken

    with monkeypatch.context() as patch:
        engine = types.SimpleNamespace(compile=lambda params: None, dispatch=None)
        patch.setattr(build, "engine", lambda *_: engine)
        patch.setattr(train, "evaluate", lambda *_, **__: {})
        patch.setattr("experiments.closing.finish", lambda *_: None)
        patch.setattr(learning, "learn", counted)
        if break_at:
            patch.setattr(train, break_at, broken)
        for flag, value in (("CONFIG", config), ("DRY_RUN", False), ("TOPOLOGY", "")):
            patch.setattr(train, flag, types.SimpleNamespace(value=value))
        if break_at:
            with pytest.raises(Broken):
                train.main(["train"])
        else:
            train.main(["train"])
    records = [(r["phase"], r["update"], r["learner/loss"]) for r in read_metrics(f"{config.run_dir}/metrics.jsonl")]
    policy = build.policy(config, sources.run_tokenizer(config))
    _, _, (_, like, _) = build.learner_state(config, policy, build.learner_mesh(config))
    params, record = inherited.restored(config.run_dir, like.params)
    return records, params, record["phase"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends",
    [
        [("within", "pretraining", {"stop_after": 2}), ("between", "warm_start", {"break_at": "warm_start"})],
        [("last", "pretraining", {"stop_after": 3}), ("after", "warm_start", {"stop_after": 4})],
    ],
)
def test_a_run_goes_on_within_pretraining_and_at_its_end(tmp_path, monkeypatch, ends) -> None:
    """Stopped, or broken off where the warm start begins, it comes to the same parameters bit for bit."""

    def config(name):
        parts = {"pretrain__updates": 3, "pretrain__texts": 40, "pretrain__batch": 8, "warm_start.updates": 2}
        return small_config(tmp_path / name, updates=0, **parts)

    records, straight, phase = supervised(monkeypatch, config("straight"))
    assert phase == "done" and [r[:2] for r in records] == [("pretraining", 3), ("warm_start", 2)]
    for name, phase, how in ends:
        assert supervised(monkeypatch, config(name), **how)[2] == phase, name
        again, params, phase = supervised(monkeypatch, config(name))
        assert (phase, again) == ("done", records), name
        check_equal(params, straight)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", 600, r"pretrain\.tokens is 600; .* at most pretrain\.row_tokens \(512\)"),
        ("tokens", 2, r"pretrain\.tokens is 2; a piece of text has at least 3"),
        ("batch", 0, r"pretrain\.batch is 0; it must be at least 1"),
        ("updates", -1, r"pretrain\.updates is -1; it must be at least 1"),
    ],
)
def test_what_cannot_be_pretrained_is_refused(key: str, value: int, message: str) -> None:
    config = quickstart.get_config()
    config.pretrain.updates = 4
    config.pretrain[key] = value
    with pytest.raises(UserError, match=message):
        checks.check(config)


@pytest.mark.parametrize(("section", "batch"), [("pretrain", 1), ("pretrain", 3), ("warm_start", 0), ("warm_start", 3)])
def test_a_batch_that_cannot_be_dealt_to_all_processes_is_refused(section: str, batch: int) -> None:
    config = quickstart.get_config()
    config.pretrain.updates = 4
    devices = [types.SimpleNamespace(process_index=i) for i in range(2)]
    checks.check(config, devices)
    config[section].batch = batch
    with pytest.raises(
        UserError, match=rf"{section}\.batch \({batch}\) must be a positive multiple of the 2 processes"
    ):
        checks.check(config, devices)


def test_longer_pieces_than_rows_are_dropped_and_counted() -> None:
    pieces = documents(["\x05" * 30], tokens=20)
    made = make({"pretrain.rows": 2, "pretrain.row_tokens": 12, "pretrain.batch": 4}, make_learner=phases.pretraining)
    usable, dropped, malformed = learning.sift(made.run, pieces, critic=False, packing=made.learner.packing)
    assert (len(usable), len(dropped), malformed) == (0, len(pieces), len(pieces))

"""Pretraining: texts become trajectories of one step, and a phase before the warm start trains on every token."""

from __future__ import annotations

import itertools
import types

import jax
import learners
import numpy as np
import pytest
from learners import check_equal, make

from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.train import phases
from agentr1_jax.train.phases import make_documents
from agentr1_jax.trajectory import Outcome
from configs import base
from experiments.setup import read_settings

STOP = 1


def documents(texts, tokens):
    """Pieces of texts, of a tokenizer that has one id for each letter."""
    config = base.get_config("hopworld")
    config.policy.preset, config.pretrain.tokens = "tiny", tokens
    tokenizer = types.SimpleNamespace(stop_id=STOP, encode_data=lambda text: [ord(letter) for letter in text])
    task = types.SimpleNamespace(name="t", texts=lambda count: texts[:count])
    return make_documents(types.SimpleNamespace(settings=read_settings(config), tokenizer=tokenizer, task=task))


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
    settings = {"pretrain.rows": 2, "pretrain.row_tokens": 12, "pretrain.batch": 4, "pretrain.tokens": 12}
    made = make(settings, make_phase=phases.pretraining)
    assert made.phase.packing == PackingConfig("trajectory", 12, 12, 2)
    seen = []
    update = learners.recording(made.phase.update, seen)
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
    settings = {
        "pretrain.rows": 4,
        "pretrain.row_tokens": 16,
        "pretrain.tokens": 8,
        "learner.row_tokens": 16,
        "learner.row_loss_tokens": 16,
    }
    settings["budget.context_tokens"] = 16
    one, other = (make(settings, make_phase=each) for each in (phases.pretraining, phases.warm_start))
    check_equal(one.learn(pieces)[0].params, other.learn(pieces)[0].params)


def test_longer_pieces_than_rows_are_dropped_and_counted() -> None:
    pieces = documents(["\x05" * 30], tokens=20)
    made = make(
        {"pretrain.rows": 2, "pretrain.row_tokens": 12, "pretrain.batch": 4, "pretrain.tokens": 12},
        make_phase=phases.pretraining,
    )
    usable, dropped, malformed = made.sift(pieces, critic=False)
    assert (len(usable), len(dropped), malformed) == (0, len(pieces), len(pieces))

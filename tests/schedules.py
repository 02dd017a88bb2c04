"""Many trajectories on one engine, planned by their rows, and the proof that what they sampled is exact."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import tiny
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentr1_jax.agents.session import Identity
from agentr1_jax.rollout.config import AttemptLimits, EngineConfig, SamplingConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.runner import BackgroundEngine, TaskGroup, run_groups
from agentr1_jax.trajectory import Outcome

POLICY = tiny.POLICY
LENGTH = 128
CONFIG = EngineConfig(
    slots=3,
    swap_slots=2,
    slot_tokens=LENGTH,
    decode_chunk=4,
    prefill_width=8,
    prefill_rows=(1, 4),
    attention_block=32,
    attention_group=1,
)
ONCE = AttemptLimits()


def engine_of(slots: int, devices: int = 1, swap_slots: int | None = None, **habits) -> tuple[Engine, object]:
    """A compiled engine and its parameters, shared by all tests; `swap_slots` is `slots` by default."""
    return _engine(slots, devices, slots if swap_slots is None else swap_slots, tuple(sorted(habits.items())))


@functools.cache
def _engine(slots: int, devices: int, swap_slots: int, habits: tuple) -> tuple[Engine, object]:
    mesh = tiny.mesh(devices)
    params = jax.device_put(tiny.decoder_params(), NamedSharding(mesh, P()))
    engine = Engine(POLICY, dataclasses.replace(CONFIG, slots=slots, swap_slots=swap_slots, **dict(habits)), mesh)
    assert engine.compile(params) == (3 if engine.config.cache == "pages" else 4)
    return engine, params


def run_work(engine, params, work):
    """Run coroutines that use `acquire`, `generate` and `release` of an engine; their results, in order."""

    async def gather():
        return await asyncio.gather(*work)

    with BackgroundEngine(engine, params, version=0) as background:
        return background.start(gather()).result(60)


class Planned:
    """An agent that does what its row says: how to build each prompt, how much to sample, how long the tool takes."""

    async def run(self, session, row):
        opening = list(row["opening"])
        prompt, context = opening, opening
        for plan in row["steps"]:
            done = await session.generate(np.asarray(prompt, np.int32), plan["max_tokens"], plan["stop"])
            session.record(1.0, info={"reason": done.finish_reason, **plan})
            context = [*prompt, *done.ids.tolist(), *plan["observation"]]
            last = [*done.ids.tolist(), *plan["observation"]]
            rules = {
                "append": context,
                "window": [*opening, *last],
                "rewrite": [*context[: plan["at"]], *plan["observation"], 3],
            }
            prompt = rules[plan["rule"]][: LENGTH - 12]
            if plan["delay"] is not None:
                await asyncio.sleep(plan["delay"])
        session.finish(Outcome.ENV_DONE)


def episodes(delays):
    """Rows of `Planned`, at random: openings, and one to three steps whose tools take so long (seconds, or None)."""
    ids = st.integers(0, POLICY.vocab_size - 1)
    plans = st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 12),
            "stop": st.lists(st.lists(ids, min_size=1, max_size=2), max_size=2),
            "observation": st.lists(ids, max_size=12),
            "rule": st.sampled_from(["append", "append", "window", "rewrite"]),
            "at": st.integers(0, 80),
            "delay": st.sampled_from(delays),
        }
    )
    return st.fixed_dictionaries(
        {"opening": st.lists(ids, min_size=1, max_size=60), "steps": st.lists(plans, min_size=1, max_size=3)}
    )


def sampled(
    rows,
    slots=3,
    temperature=1.0,
    devices=1,
    agent=None,
    order=None,
    samples=1,
    limits=ONCE,
    sampling=None,
    **engine,
):
    """The trajectories of `rows`, keyed by the row's place, admitted in another order where one is given."""
    engine, params = engine_of(slots, devices, **engine)
    engine.reset_counters()
    order = range(len(rows)) if order is None else order
    groups = [
        TaskGroup(rows[i], [Identity(f"t/{i}", i, k, "planned", 1000 + i + 100 * k) for k in range(samples)])
        for i in order
    ]
    out = run_groups(
        engine,
        params,
        agent or Planned(),
        groups,
        sampling=sampling or SamplingConfig(temperature),
        policy_version=0,
        limits=limits,
    )
    out = sorted((t for group in out for t in group), key=lambda t: (t.group, t.sample))
    assert [t.group for t in out] == [i for i in sorted(order) for _ in range(samples)]
    return out


def planned(opening, *steps):
    """A row written by hand."""
    usual = {"max_tokens": 8, "stop": (), "observation": [9, 8, 7], "rule": "append", "at": 0, "delay": None}
    return {"opening": opening, "steps": [usual | step for step in steps]}


@functools.partial(jax.jit, static_argnums=2)
def gumbel(key, index, vocab):
    """Noise of one token, [vocab]."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), index), (vocab,))


def assert_exact(trajectories, temperature=1.0, policy=POLICY, length=LENGTH, version=None, seed=0):
    """Every sampled id and its log-probability are those of a forward pass over prompt + response alone.

    With a version, of the steps sampled by that one; the parameters are those of the seed.
    """
    steps = [(t, i, s) for t in trajectories for i, s in enumerate(t.steps) if version in (None, s.policy_version)]
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for _, _, s in steps]
    logits = tiny.full_logits(policy, tiny.decoder_params(policy, seed), sequences, length)
    for (t, i, step), full in zip(steps, logits, strict=True):
        predicted = full[len(step.prompt_ids) - 1 : -1]
        assert len(predicted) == len(step.response_ids) == len(step.logprobs) > 0
        if temperature == 0:
            scores = predicted
            assert (step.logprobs == 0).all()
        else:
            logprobs = tiny.log_softmax(predicted / temperature)
            chosen = np.take_along_axis(logprobs, step.response_ids[:, None], 1)[:, 0]
            np.testing.assert_allclose(step.logprobs, chosen, atol=1e-4)
            key = np.random.SeedSequence([t.seed, i]).generate_state(2, np.uint32)
            scores = logprobs + np.stack([gumbel(key, k, policy.vocab_size) for k in range(len(step.response_ids))])
        best = np.take_along_axis(scores, step.response_ids[:, None], 1)[:, 0]
        assert (best >= scores.max(-1) - 1e-4).all()


MANY = [planned([i, 7, 9, 11][: 1 + i % 4], {"max_tokens": 3 + i}, {"delay": 0.002 * (i % 3)}, {}) for i in range(9)]


def all_ids(trajectories):
    return [[s.response_ids.tolist() for s in t.steps] for t in trajectories]

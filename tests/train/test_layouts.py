"""The same recorded trajectories make the same updates, however many processes and devices learn from them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pair import run
from small_runs import UNOPTIMISED

from agentr1_jax.agents.session import ScriptedSession
from agentr1_jax.credit import get_scheme
from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.learner.packing import pack
from agentr1_jax.runtime import processes
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build, phases, train_step
from agentr1_jax.train.build import Setup
from agentr1_jax.train.collect import identities, process_shard
from agentr1_jax.train.progress import Progress
from agentr1_jax.trajectory import Outcome, Trajectory
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl
from configs import quickstart
from experiments.setup import make_task, read_settings, use_compile_cache

UPDATES = 3
SMALL = {
    "policy.width": 32,
    "policy.layers": 2,
    "policy.hidden": 64,
    "policy.head_dim": 8,
    "tokenizer.texts": 400,
    "task.hopworld.flaws.repeat_query": 0.3,
    "rollout.groups": 4,
    "rollout.samples": 4,
    "learner.rows": 4,
    "learner.minibatches": 1,
    "credit.args.gamma": 0.97,
    "shaping.scale_returns": True,
    "optimizer.max_grad_norm": 0.25,
    "optimizer.warmup": 0,
    "optimizer.name": "sgd",  # What differs by rounding alone must not be divided by its own size, as AdamW would.
    "optimizer.lr": 4.0,
    "optimizer.value_lr": 4.0,
}
SCHEMES = {"step": "step_gae", "token": "token_gae"}
LAYOUTS = {"2x2": (2, 2, {"mesh.fsdp": 2}), "1x4": (1, 4, {}), "1x1": (1, 1, {})}
"""Processes, devices of each, and what else differs."""
TOLERANCE = 1e-5


def config_of(folder, changes):
    config = quickstart.get_config()
    own = {"run_dir": str(folder), "compilation_cache": f"{folder}/programs"}
    config.update_from_flattened_dict({**own, **SMALL, **changes})
    return config


def setup_of(folder, changes, *, resumes):
    """The parts of a run that learns from recorded trajectories."""
    settings, nothing = read_settings(config_of(folder, changes)), None  # Nothing rolls out here.
    use_compile_cache(settings)
    task = make_task(settings, ToolMetrics(), nothing)
    tokenizer = build.make_tokenizer(settings, task, resumes=resumes)
    agent, policy = build.make_agent(settings, task, tokenizer), build.make_policy(settings, tokenizer)
    mesh = build.make_learner_mesh(settings)
    return Setup(settings, task, tokenizer, agent, policy, {}, mesh, nothing, nothing, nothing)


def recorded(folder) -> list[list[Trajectory]]:
    """Batches of the expert's trajectories, as a run might have sampled them: ended, cut, failed, of unequal shares."""
    setup = setup_of(folder, {}, resumes=False)
    task, tokenizer, agent = setup.task, setup.tokenizer, setup.agent
    rng = np.random.default_rng(0)
    c = setup.settings.rollout

    async def play(row, identity):
        session = ScriptedSession(identity, task.expert(row, identity.seed), tokenizer, agent.call_format)
        await agent.run(session, row)
        return sampled(session.trajectory())

    def sampled(t):
        """With log-probs as of a policy that knows nothing, so that some ratios are clipped and others not."""
        noisy = lambda n: rng.normal(-np.log(tokenizer.vocab_size), 0.3, n).astype(np.float32)  # noqa: E731
        steps = [dataclasses.replace(s, logprobs=noisy(len(s.response_ids))) for s in t.steps]
        return dataclasses.replace(t, steps=tuple(steps))

    def cut(t):
        return dataclasses.replace(
            t, steps=t.steps[:-1], outcome=Outcome.MAX_STEPS, final_prompt_ids=t.steps[-1].prompt_ids
        )

    batches = []
    for update in range(UPDATES):
        batch = [
            asyncio.run(play(task.row("train", prompt), identity))
            for group in range(c.groups)
            for prompt in [update * c.groups + group]
            for identity in identities(setup, "rl", group, prompt, c.samples)
        ]
        batch = [cut(t) if t.group == 2 and len(t.steps) > 1 else t for t in batch]
        failed = {(1, 0), (3, 1), (3, 3)}
        batch = [dataclasses.replace(t, outcome=Outcome.TOOL_FAILURE) if place(t) in failed else t for t in batch]
        batches.append(batch)
    return batches


def place(t):
    return t.group, t.sample


def child(folder: str, layout: str) -> None:
    """Learns in one process of a layout; the first writes the parameters before and after every update."""
    processes.initialize()
    out = {}
    setup = setup_of(folder, LAYOUTS[layout][2], resumes=True)
    settings = setup.settings
    builder = build.make_state_builder(settings, setup.policy, setup.learner_mesh)
    rl = phases.reinforcement(setup, builder.optimizer, builder.layout, None)
    whole = jax.jit(lambda params: params, out_shardings=NamedSharding(setup.learner_mesh, P()))
    start = builder.init()
    for kind, scheme in SCHEMES.items():
        phase = dataclasses.replace(rl, assign=jax.jit(get_scheme(scheme, **settings.scheme.arguments).assign))
        state, progress, seen = jax.tree.map(jnp.copy, start), Progress(), []  # An update takes its state's memory.
        for update in range(UPDATES + 1):
            seen.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(whole(state.params)))]))
            if update == UPDATES:
                break
            own = process_shard(settings.rollout.groups)
            trajectories = [t for t in read_jsonl(f"{folder}/rl_{update:06d}.jsonl.gz") if t.group in own]
            batch = train_step.pack(setup, phase, trajectories)
            outputs = train_step.token_outputs(setup, phase, state.params, batch)
            credit = train_step.assign_credit(setup, phase, batch, outputs, progress)
            rates = settings.learning_rates(update, state.params)
            state, metrics = train_step.update(setup, phase, state, batch, outputs, credit, rates)
            progress, record = progress.after(0, credit.return_statistics), metrics.fetch()
            assert record["learner/grad_norm"] > settings.optimizer.max_grad_norm and not record["learner/skipped"]
            assert 0 < record["learner/clip_fraction"] < 1
        out[kind] = np.stack(seen)
    if processes.process_index() == 0:
        np.savez(f"{folder}/{layout}.npz", **out)


@pytest.mark.slow
def test_processes_and_devices_make_the_same_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a layout's own whitening moments, running statistics, denominators or gradient norm they would differ."""
    monkeypatch.setenv("XLA_FLAGS", UNOPTIMISED["XLA_FLAGS"])
    for update, batch in enumerate(recorded(tmp_path)):
        rows = []
        for share in range(2):
            own = [t for t in batch if t.group % 2 == share and t.outcome is not Outcome.TOOL_FAILURE]
            made = pack(own, PackingConfig("trajectory", 320, 256, rows=1), final_values=True)
            rows.append(made.rows)
        assert rows[0] != rows[1], "one process must fill up with rows of no weight"
        assert len({len(t.steps) for t in batch}) > 2 and len({t.total_reward for t in batch}) > 3
        write_jsonl(tmp_path / f"rl_{update:06d}.jsonl.gz", batch)
    for layout, (count, devices, _) in LAYOUTS.items():
        run(count, devices, "import sys, test_layouts; test_layouts.child(*sys.argv[1:])", str(tmp_path), layout)
    params = {layout: np.load(tmp_path / f"{layout}.npz") for layout in LAYOUTS}
    differences = {}
    for one, other in itertools.combinations(LAYOUTS, 2):
        for case in params[one].files:
            a, b = params[one][case].astype(np.float64), params[other][case].astype(np.float64)
            np.testing.assert_array_equal(a[0], b[0])
            for update, (x, y) in enumerate(zip(np.diff(a, axis=0), np.diff(b, axis=0), strict=True)):
                differences[one, other, case, update] = np.linalg.norm(x - y) / np.linalg.norm(x)
    sys.stdout.write("\n".join(f"{' '.join(map(str, case))}: {x:.1e}" for case, x in differences.items()))
    assert len(differences) == 3 * len(SCHEMES) * UPDATES
    assert not {case: x for case, x in differences.items() if not x <= TOLERANCE}
    by_step, by_token = (np.diff(params["1x1"][kind], axis=0) for kind in SCHEMES)
    assert (np.linalg.norm(by_step - by_token, axis=1) > 0.05 * np.linalg.norm(by_step, axis=1)).all()

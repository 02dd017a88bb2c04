"""Time the rollout engine against lockstep samplers on simulated tool episodes.

    python -m experiments.bench_rollout [--episodes=256 --slots=16 --json=FILE]

    lockstep_reprefill   a batch of episodes goes turn by turn: all sample, the slowest tool is waited for, and the
                         whole history is prefilled again
    lockstep_cached      the same, but what a slot's cache holds is kept
    engine               each trajectory at its own pace
    engine_pages         the same with the KV cache in pages, as many as the slots of the others take

Episodes have 1 to 6 steps, prompts of 128 tokens in groups of 8, responses of log-normal lengths (median 24, at most
64), observations of 16 to 96 tokens and tools that take 50 ± 30 ms. Lengths are forced, so that all modes sample as
many tokens.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.agents.session import Identity, Session
from agentr1_jax.envs.base import Row
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.policy.decoder import Params
from agentr1_jax.policy.params import init_decoder
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.rollout.config import EngineConfig, SamplingConfig
from agentr1_jax.rollout.device import Counters, ResponseRequest
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.programs import Programs
from agentr1_jax.rollout.runner import BackgroundEngine, TaskGroup, run_groups
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.runtime.mesh import learner_mesh
from agentr1_jax.runtime.processes import use_huge_pages
from agentr1_jax.trajectory import Outcome

EPISODES = flags.DEFINE_integer("episodes", 256, "episodes, in groups of 8")
SLOTS = flags.DEFINE_integer("slots", 16, "responses decoded together")
ROUNDS = flags.DEFINE_integer("rounds", 3, "times that each mode is run, one after the other in turn")
JSON = flags.DEFINE_string("json", "", "file for the figures")
SEED = flags.DEFINE_integer("seed", 0, "of the workload")

POLICY = DecoderConfig(vocab_size=4096, width=256, layers=4, heads=4, kv_heads=2, head_dim=64, hidden=768)
SAMPLES, PROMPT, RESPONSE, OBSERVATION, MOST_STEPS = 8, 128, 64, (16, 96), 6
LENGTH = 1024  # 128 + 6 · 64 + 5 · 96 = 992


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step: how many tokens are sampled, how long the tool takes (seconds), and what it gives."""

    response: int
    seconds: float
    observation: np.ndarray


@dataclasses.dataclass(frozen=True)
class Episode:
    """A prompt and the turns that follow it."""

    group: int
    sample: int
    prompt: np.ndarray
    turns: Sequence[Turn]

    @property
    def seed(self) -> int:
        return self.group * SAMPLES + self.sample


def workload(episodes: int, seed: int) -> list[Episode]:
    """Episodes of simulated tool use, the same for every mode."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> np.ndarray:
        return rng.integers(0, POLICY.vocab_size, n, np.int32)

    def turn() -> Turn:
        response = int(np.clip(round(24 * np.exp(0.7 * rng.normal())), 1, RESPONSE))
        seconds = max(0.05 + 0.03 * rng.normal(), 0.0)
        return Turn(response, seconds, ids(int(rng.integers(OBSERVATION[0], OBSERVATION[1] + 1))))

    prompts = [ids(PROMPT) for _ in range(-(-episodes // SAMPLES))]
    return [
        Episode(*divmod(i, SAMPLES), prompts[i // SAMPLES], [turn() for _ in range(rng.integers(1, MOST_STEPS + 1))])
        for i in range(episodes)
    ]


@dataclasses.dataclass(frozen=True)
class SimulatedAgent:
    """Plays the episode that its row names."""

    episodes: Sequence[Episode]

    async def run(self, session: Session, row: Row) -> None:
        """One step for each turn."""
        episode = self.episodes[row["first"] + session.seed % SAMPLES]
        context = episode.prompt
        for turn in episode.turns:
            completion = await session.generate(context, turn.response)
            await asyncio.sleep(turn.seconds)
            session.record(0.0)
            context = np.concatenate([context, completion.ids, turn.observation])
        session.finish(Outcome.ENV_DONE)


def run_engine(engine: Engine, params: Params, episodes: Sequence[Episode]) -> int:
    """Every trajectory at its own pace; returns the tokens sampled."""
    groups = collections.defaultdict(list)
    for e in episodes:
        groups[e.group].append(Identity(f"bench/{e.seed}", e.group, e.sample, "bench", e.seed))
    work = [TaskGroup({"first": group * SAMPLES}, names) for group, names in groups.items()]
    complete = run_groups(engine, params, SimulatedAgent(episodes), work, sampling=SamplingConfig(), policy_version=0)
    return sum(len(s.response_ids) for group in complete for t in group for s in t.steps)


def run_lockstep(engine: Engine, params: Params, episodes: Sequence[Episode]) -> int:
    """Batch after batch, turn after turn; returns the tokens sampled."""

    async def batches() -> int:
        slots = engine.config.slots
        return sum([await batch(episodes[at : at + slots]) for at in range(0, len(episodes), slots)])

    async def batch(part: Sequence[Episode]) -> int:
        leases = [await engine.acquire((e.group, e.sample)) for e in part]
        contexts = [e.prompt for e in part]
        sampled = 0
        for index in range(MOST_STEPS):
            going = [i for i, e in enumerate(part) if index < len(e.turns)]
            turns = [part[i].turns[index] for i in going]
            responses = await asyncio.gather(
                *(
                    engine.generate(
                        leases[i],
                        ResponseRequest(
                            prompt=contexts[i],
                            max_tokens=turn.response,
                            sampling=SamplingConfig(),
                            key=np.random.SeedSequence([part[i].seed, index]).generate_state(2, np.uint32),
                        ),
                    )
                    for i, turn in zip(going, turns, strict=True)
                )
            )
            await asyncio.gather(*(asyncio.sleep(turn.seconds) for turn in turns))
            for i, turn, response in zip(going, turns, responses, strict=True):
                contexts[i] = np.concatenate([contexts[i], response.ids, turn.observation])
                sampled += len(response.ids)
        for lease in leases:
            engine.release(lease)
        return sampled

    with BackgroundEngine(engine, params, version=0) as background:
        return background.start(batches()).result()


def engines() -> Iterator[tuple[str, Engine]]:
    """An engine for each mode; those of one kind of cache share their programs."""
    shapes = EngineConfig(
        slots=SLOTS.value,
        swap_slots=16,
        slot_tokens=LENGTH,
        decode_chunk=32,
        early_exit_after=3,
        prefill_width=16,
        prefill_rows=(4, 8, 12, 16),
        attention_block=128,
        attention_group=4,
    )
    mesh = learner_mesh(-1, 1, 1)
    # A mode that waits for all responses gains nothing from an early exit.
    lockstep = dataclasses.replace(shapes, early_exit_after=0)
    configs = {
        "lockstep_reprefill": dataclasses.replace(lockstep, prefix_reuse="none"),
        "lockstep_cached": dataclasses.replace(lockstep, prefix_reuse="own"),
        "engine": shapes,
        "engine_pages": dataclasses.replace(shapes, cache="pages", page_tokens=16),
    }
    programs: dict[str, Programs] = {}
    for name, config in configs.items():
        engine = Engine(POLICY, config, mesh)
        engine.device.programs = programs.setdefault(config.cache, engine.device.programs)
        yield name, engine


def figures(counters: Counters, sampled: int) -> dict[str, float]:
    """Return the figures of a mode, those of one round where they are sums."""
    rounds = ROUNDS.value
    return {
        "seconds": round(counters.seconds / rounds, 3),
        "decode_tokens_per_s": round(sampled * rounds / counters.seconds, 1),
        "prefill_tokens": round(counters.prefill_tokens / rounds),
        "slot_occupancy": round(counters.occupancy, 4),
        "slot_occupancy_while_waiting": round(counters.occupancy_while_waiting, 4),
        "host_share": round(counters.host_share, 4),
        "decode_calls": round(counters.decode_calls / rounds),
        "prefill_calls": round(counters.prefill_calls / rounds),
        "copied_tokens": round(counters.copied_tokens / rounds),
    }


def least_prefill(episodes: Sequence[Episode]) -> int:
    """Prompts once per group, observations once, and the last sampled token of each step but the last."""
    prompts = len({e.group for e in episodes}) * PROMPT
    return prompts + sum(len(t.observation) + 1 for e in episodes for t in e.turns[:-1])


def main(argv: Sequence[str]) -> None:
    del argv
    console = Console()
    episodes = workload(EPISODES.value, SEED.value)
    shapes = jax.eval_shape(lambda: init_decoder(POLICY, jax.random.key(0)))
    layout = shardings(shapes, learner_mesh(-1, 1, 1))
    params = jax.jit(lambda: init_decoder(POLICY, jax.random.key(0)), out_shardings=layout)()
    runs = [(name, engine, run_engine if name.startswith("engine") else run_lockstep) for name, engine in engines()]
    compiled = runs[0][1].compile(params) + runs[-1][1].compile(params)
    for _, engine, run in runs:
        run(engine, params, episodes[: 2 * SLOTS.value])  # Warm-up.
        engine.reset_counters()
    compiles = CompileCounter()
    # In turn, since the speed of a machine that others use too drifts.
    for _ in range(ROUNDS.value):
        for _, engine, run in runs:
            sampled = run(engine, params, episodes)
            assert sampled == sum(t.response for e in episodes for t in e.turns)
    modes = {name: figures(engine.counters, sampled) for name, engine, _ in runs}
    out = {
        "modes": modes,
        **{
            f"speedup_vs_{name}": round(modes[name]["seconds"] / modes["engine"]["seconds"], 3)
            for name in modes
            if name != "engine"
        },
        "recompiles_after_warmup": compiles.count,
        "compiled_programs": compiled,
        "least_prefill_tokens": least_prefill(episodes),
    }
    table = Table(title=f"{len(episodes)} episodes, {SLOTS.value} slots, {jax.devices()[0].device_kind}")
    table.add_column("")
    for name in modes:
        table.add_column(name, justify="right")
    for key in next(iter(modes.values())):
        table.add_row(key, *(f"{figure[key]:,}" for figure in modes.values()))
    console.print(table)
    for key, value in out.items():
        if key != "modes":
            console.print(f"{key}: {value:,}")
    if JSON.value:
        with open(JSON.value, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=2)


if __name__ == "__main__":
    use_huge_pages()
    app.run(main)

"""Time the rollout engine against the samplers of tunix and transformers on the same tool episodes, in one run.

    pip install google-tunix transformers torch
    python -m experiments.bench_peers [--episodes=64 --peers=tunix,transformers --json=FILE]

Workload and decoder are those of `bench_rollout`: 1 to 6 steps, prompts of 128 tokens in groups of 8, responses of
log-normal lengths, tools of 50 ± 30 ms. A peer goes turn by turn, as its users do: it samples the responses of a batch
until the longest is whole, waits for the slowest tool, and reads the whole history again. Lengths are forced, so that
all sample what the engine samples. Peers have random weights of the same shape; shapes are compiled before the clock
runs. What is compared is the way of working, with the kernels of each.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.policy.params import init_decoder
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.mesh import learner_mesh
from agentr1_jax.runtime.processes import use_huge_pages
from experiments import bench_rollout
from experiments.bench_rollout import LENGTH, MOST_STEPS, POLICY, Episode

PEERS = flags.DEFINE_list("peers", ["tunix", "transformers"], "samplers to compare with")
PEER_ROUNDS = flags.DEFINE_integer("peer_rounds", 3, "times that each runs, one after the other in turn")

Generate = Callable[[Sequence[np.ndarray], int], list[np.ndarray]]
"""(contexts, number of tokens) -> so many sampled ids for each."""
STEP = 16
"""Peers that compile for each length sample a multiple of so many tokens."""


def tunix_sampler() -> Generate:
    """The sampler of tunix, with a tokenizer that leaves ids as they are."""
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen2.model import ModelConfig, Qwen2

    p = POLICY
    shape = ModelConfig(
        num_layers=p.layers,
        vocab_size=p.vocab_size,
        embed_dim=p.width,
        hidden_dim=p.hidden,
        num_heads=p.heads,
        head_dim=p.head_dim,
        num_kv_heads=p.kv_heads,
        rope_theta=int(p.rope_theta),
        norm_eps=p.norm_eps,
        use_tied_embedding=True,
    )
    cache = CacheConfig(LENGTH + bench_rollout.RESPONSE, p.layers, p.kv_heads, p.head_dim)
    sampler = Sampler(Qwen2(shape, rngs=nnx.Rngs(0)), Ids(), cache)

    def generate(contexts: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        texts = [" ".join(map(str, context)) for context in contexts]
        steps = -(-count // STEP) * STEP
        # The unused id ends nothing, so that all sample as many.
        out = sampler(texts, steps, temperature=1.0, top_p=1.0, seed=0, eos_tokens=[p.vocab_size], pad_output=True)
        return [np.asarray(tokens, np.int32)[:count] for tokens in out.tokens]

    return generate


class Ids:
    """Tokenizer of texts that are numbers."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def transformers_sampler() -> Generate:
    """`generate` of transformers on PyTorch."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    p = POLICY
    config = Qwen2Config(
        vocab_size=p.vocab_size,
        hidden_size=p.width,
        intermediate_size=p.hidden,
        num_hidden_layers=p.layers,
        num_attention_heads=p.heads,
        num_key_value_heads=p.kv_heads,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()

    @torch.inference_mode()
    def generate(contexts: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        longest = max(map(len, contexts))
        ids, mask = np.zeros((2, len(contexts), longest), np.int64)
        for row, context in enumerate(contexts):
            ids[row, longest - len(context) :], mask[row, longest - len(context) :] = context, 1
        out = model.generate(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            do_sample=True,
            top_k=0,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
        return [row[longest:].numpy().astype(np.int32) for row in out]

    return generate


SAMPLERS: dict[str, Callable[[], Generate]] = {"tunix": tunix_sampler, "transformers": transformers_sampler}


def run_peer(generate: Generate, episodes: Sequence[Episode]) -> int:
    """Batch after batch, turn after turn; returns the tokens that the episodes keep."""
    slots, sampled = bench_rollout.SLOTS.value, 0
    for at in range(0, len(episodes), slots):
        part = episodes[at : at + slots]
        contexts = [e.prompt for e in part]
        for index in range(MOST_STEPS):
            going = [i for i, e in enumerate(part) if index < len(e.turns)]
            if not going:
                break
            turns = [part[i].turns[index] for i in going]
            # The shape of a batch stays, as it must where it is compiled: those that are done go along.
            responses = generate(contexts, max(turn.response for turn in turns))
            time.sleep(max(turn.seconds for turn in turns))
            for i, turn in zip(going, turns, strict=True):
                contexts[i] = np.concatenate([contexts[i], responses[i][: turn.response], turn.observation])
                sampled += turn.response
    return sampled


def main(argv: Sequence[str]) -> None:
    """Run all in turn; print seconds and ratios."""
    del argv
    episodes = bench_rollout.workload(bench_rollout.EPISODES.value, bench_rollout.SEED.value)
    wanted = sum(turn.response for e in episodes for turn in e.turns)
    mesh = learner_mesh(-1, 1, 1)
    shapes = jax.eval_shape(lambda: init_decoder(POLICY, jax.random.key(0)))
    params = jax.jit(lambda: init_decoder(POLICY, jax.random.key(0)), out_shardings=shardings(shapes, mesh))()
    engine = dict(bench_rollout.engines())["engine"]
    engine.compile(params)
    runs: dict[str, Callable[[], int]] = {"engine": lambda: bench_rollout.run_engine(engine, params, episodes)}
    for name in PEERS.value:
        runs[name] = functools.partial(run_peer, SAMPLERS[name](), episodes)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for attempt in range(PEER_ROUNDS.value + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            assert run() == wanted, f"{name} sampled another number of tokens"
            if attempt:  # Shapes are compiled in the first round.
                seconds[name].append(time.perf_counter() - started)
    table = Table(title=f"{len(episodes)} episodes, {wanted:,} tokens, {jax.devices()[0].device_kind}")
    for column in ("", "seconds", "tokens/s", "times as long as the engine"):
        table.add_column(column, justify="right" if column else "left")
    out = {}
    for name, each in seconds.items():
        # Pairs of one round: the speed of a machine that others use too drifts.
        ratio = float(np.median(np.asarray(each) / np.asarray(seconds["engine"])))
        out[name] = {"seconds": each, "ratio": ratio}
        median = float(np.median(each))
        table.add_row(name, f"{median:.1f}", f"{wanted / median:,.0f}", f"{ratio:.1f}")
    Console().print(table)
    if bench_rollout.JSON.value:
        with open(bench_rollout.JSON.value, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=2)


if __name__ == "__main__":
    use_huge_pages()
    app.run(main)

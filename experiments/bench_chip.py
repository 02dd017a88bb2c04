"""Time engine and learner on the devices that are here, beside what the compiler expects: one command for a chip.

    python -m experiments.bench_chip --config=configs/scale_qwen2_5_3b.py --config.hardware=auto [--out=FILE]
        [--parts=gap,decode --contexts=4096 --slots=64 --repeats=5]

    gap        log-probs of sampled tokens: engine, learner, and the learner in float32
    decode     ms a token: KV slots and pages, by context and slots; lengths are spread evenly up to the context
    pages      the same by size of a page
    prefill    the largest call behind contexts of 2k and 16k
    attention  of one layer with its gradient, for one row of 1 and of 32 segments
    update     one microbatch, gradients summed in float32 and in bfloat16
    weights    from the learner to the engine, and the first decode call with them beside those after it

`expected`: the compiler's cycles at the clock of the chip (TPU only); `least`: weights and live keys, or the model's
FLOPs, at its peak. What does not fit the memory is a row that says so. FILE.json and FILE.md have the figures.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from agentr1_jax.errors import UserError
from agentr1_jax.learner.batch import to_microbatches
from agentr1_jax.learner.config import PackingConfig
from agentr1_jax.learner.packing import Packing, gather, pack, scatter_fields
from agentr1_jax.learner.update import make_token_outputs
from agentr1_jax.policy.attention import PackedRows
from agentr1_jax.policy.sharding import ROWS, over_rows
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.device import Device, ResponseRequest
from agentr1_jax.rollout.scheduler import Prefill
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime import processes
from agentr1_jax.runtime.mesh import global_batch, local_rows
from agentr1_jax.train import build
from agentr1_jax.train.settings import Settings
from agentr1_jax.trajectory import Outcome, Step, Trajectory
from experiments.estimate import assumed_trips, chip_of, estimate, expected_seconds, least_seconds, need
from experiments.plan import Plan, device_bytes, make_plan, programs
from experiments.setup import complete, read_settings, run_main, use_compile_cache

CONFIG = configs.define_config_flag()
OUT = flags.DEFINE_string("out", "", "file of the figures, without its ending")
PARTS = flags.DEFINE_list("parts", [], "parts to run; unset: all")
CONTEXTS = flags.DEFINE_list("contexts", ["4096", "16384", "32768"], "contexts of `decode`")
BEHIND = flags.DEFINE_list("behind", ["2048", "16384"], "contexts that the call of `prefill` goes on")
SLOTS = flags.DEFINE_list("slots", ["64", "128", "256"], "decode slots of `decode`")
REPEATS = flags.DEFINE_integer("repeats", 10, "calls that are timed, after one that is not")

PAGE_TOKENS = (16, 32, 64, 128)
SEGMENTS = (1, 32)
GAP_PROMPT, GAP_RESPONSE = 64, 64
ICEPOP = (0.5, 2.0)
"""Ratios outside of which `correction.kind=icepop` drops a token, by default."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A row of the table; seconds, NaN where they are not known.

    Attributes:
      part, case: what was timed.
      seconds: of one call, or of a token of `decode` and `pages`.
      expected, least: see the module.
      also: further figures by name, with their unit.
      fault: why there are none.
    """

    part: str
    case: str
    seconds: float = math.nan
    expected: float = math.nan
    least: float = math.nan
    also: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fault: str = ""


Cases = Iterator[tuple[str, Callable[[], Figure]]]
"""What a case is called, and what times it."""


class DoesNotFit(Exception):
    """The arrays of a case are larger than the memory of a device."""


def main(argv: Sequence[str]) -> None:
    """Run the parts, one after the other; a case that fails is a row that says why."""
    del argv
    settings = read_settings(CONFIG.value)
    processes.initialize(settings.processes.start_seconds, settings.processes.heartbeat_seconds)
    settings = read_settings(complete(CONFIG.value, jax.devices()))
    use_compile_cache(settings)
    unknown = set(PARTS.value) - set(BENCHES)
    if unknown:
        raise UserError(f"--parts: no part {', '.join(sorted(unknown))}; choose among {', '.join(BENCHES)}")
    figures = list[Figure]()
    for part in PARTS.value or BENCHES:
        for case, bench in BENCHES[part](settings):
            try:
                figures.append(dataclasses.replace(bench(), part=part, case=case))
            except (DoesNotFit, ValueError, UserError, jax.errors.JaxRuntimeError) as error:
                figures.append(Figure(part, case, fault=str(error).strip().splitlines()[0]))
            logging.info("%s", figures[-1])
    if processes.process_index() == 0:
        report(figures)


def report(figures: Sequence[Figure]) -> None:
    """Print the table; write it and the figures."""
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    title = f"{jax.device_count()} x {device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    title += f"; most memory in use {peak / 2**30:.2f} GiB" if peak else ""
    columns = ["part", "case", "ms", "expected ms", "least ms", "also"]
    rows = [[f.part, f.case, *map(in_ms, (f.seconds, f.expected, f.least)), also_of(f)] for f in figures]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if not OUT.value:
        return
    lines = [f"{title}. Policy and sizes: {CONFIG.value.run_dir}", "", *map(line_of, [columns, ["---"] * 6, *rows])]
    with open(f"{OUT.value}.md", "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    record = {"device": device.device_kind, "devices": jax.device_count(), "jax": jax.__version__, "peak_bytes": peak}
    record["figures"] = [{k: None if x != x else x for k, x in dataclasses.asdict(f).items()} for f in figures]
    with open(f"{OUT.value}.json", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)


def in_ms(seconds: float) -> str:
    """Write seconds in milliseconds; nothing for NaN."""
    return f"{1e3 * seconds:,.2f}" if seconds == seconds else ""


def also_of(figure: Figure) -> str:
    """Write the further figures in a line, or the fault."""
    return figure.fault or ", ".join(
        f"{name} {x:,.0f}" if x >= 100 else f"{name} {x:.2g}" for name, x in figure.also.items()
    )


def line_of(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def seconds_of(call: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Return the seconds of a call: of `--repeats` dispatched in a row, after one that is not counted."""
    wait(call())
    started = time.perf_counter()
    result = None
    for _ in range(REPEATS.value):
        result = call()
    wait(result)
    return (time.perf_counter() - started) / REPEATS.value


def random_arrays(shapes: Any, scale: float) -> Any:
    """Return random arrays of these shapes and shardings: normal ones times a scale; integers are 0."""
    leaves, tree = jax.tree.flatten(shapes)

    @functools.cache
    def filler(shape: tuple[int, ...], dtype: Any, place: Any) -> Callable[[jax.Array], jax.Array]:
        def fill(key: jax.Array) -> jax.Array:
            if not jnp.issubdtype(dtype, jnp.floating):
                return jnp.zeros(shape, dtype)
            return (scale * jax.random.normal(key, shape)).astype(dtype)

        return jax.jit(fill, out_shardings=place)

    keys = jax.random.split(jax.random.key(0), len(leaves))
    places = [x.format if x.format.layout else x.sharding for x in leaves]
    filled = (filler(x.shape, x.dtype, place)(key) for x, place, key in zip(leaves, places, keys, strict=True))
    return jax.tree.unflatten(tree, filled)


def check_memory(*trees: Any) -> None:
    """Raise DoesNotFit if one device cannot hold trees of shape structs."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    needed = sum(map(device_bytes, trees))
    if needed > limit:
        raise DoesNotFit(f"does not fit: {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}")


def with_engine(settings: Settings, **changes: Any) -> Settings:
    """Return settings with other sizes of the engine, and contexts that fit them."""
    engine = dataclasses.replace(settings.engine, **changes)
    context = min(settings.budget.context_tokens, engine.slot_tokens)
    budget = dataclasses.replace(settings.budget, context_tokens=context)
    return dataclasses.replace(settings, engine=engine, budget=budget)


def beside_estimate(plan: Plan, name: str, seconds: float, also: Mapping[str, float], parts: int = 1) -> Figure:
    """Return a figure of a program beside what the compiler expects of it; `seconds` are of one of so many parts."""
    chip = chip_of(jax.devices()[0].device_kind)
    if math.isnan(chip.flops):
        return Figure("", "", seconds, also=also)
    program = next(p for p in programs(plan) if p.name.startswith(name) and p.lower is not None)
    assert program.lower is not None
    least, found = need(plan, program), estimate(program.lower().compile(), chip.clock, assumed_trips(plan))
    expected = expected_seconds(found, least, chip) / parts
    return Figure("", "", seconds, expected, least_seconds(least, chip) / parts, also)


# The engine.


def spread_lengths(settings: Settings) -> list[int]:
    """Return a context for each decode slot, evenly from short ones to those that still have room for all calls."""
    c = settings.engine
    most = c.slot_tokens - c.decode_chunk * (REPEATS.value + 2)
    if most < 2:
        raise ValueError(f"a context of {c.slot_tokens} has no room for {REPEATS.value + 2} calls of decode")
    return np.random.default_rng(0).permutation(np.linspace(1, most, c.slots).astype(int)).tolist()


def table_of(settings: Settings, lengths: Sequence[int], shards: int) -> np.ndarray:
    """Return a table of pages in which every decode slot has its own pages, for all the calls that are timed."""
    c = settings.engine
    table = np.zeros((c.slots, c.slot_tokens // c.page_tokens), np.int32)
    for shard in np.split(np.arange(c.slots), shards):
        at = 1
        for slot in shard:
            room = min(lengths[slot] + c.decode_chunk * (REPEATS.value + 2), c.slot_tokens)
            count = -(-room // c.page_tokens)
            table[slot, :count] = np.arange(at, at + count)
            at += count
    return table


def with_pages(settings: Settings, **changes: Any) -> Settings:
    """Return settings with pages, as many as the lengths of `spread_lengths` take."""
    settings = with_engine(settings, cache="pages", pages=None, **changes)
    shards = build.make_rollout_mesh(settings).shape["data"]
    most = table_of(settings, spread_lengths(settings), shards).max() + 1
    most = max(most, settings.engine.slot_tokens // settings.engine.page_tokens + 1)
    return with_engine(settings, pages=int(most) * shards)


def open_device(plan: Plan) -> Device:
    """Return the device of a plan's engine, with random parameters and an empty cache."""
    check_memory(plan.rollout_params, plan.cache)
    device = plan.setup.engine.device
    device.open(random_arrays(plan.rollout_params, 0.02))
    return device


def start_all(device: Device, settings: Settings, lengths: Sequence[int]) -> None:
    """Begin a response in every decode slot, behind a context that the cache is taken to hold."""
    c = settings.engine
    if c.cache == "pages":
        device.set_table(table_of(settings, lengths, device.shards))
    for slot, length in enumerate(lengths):
        prompt = np.full(length, 5, np.int32)
        key = np.asarray([0, slot], np.uint32)
        device.start(slot, ResponseRequest(prompt, c.slot_tokens - length, SamplingConfig(), key), prompt)


def decode_figure(sized: Callable[[], Settings]) -> Figure:
    """Time decode calls on contexts of all lengths."""
    settings = sized()
    plan = make_plan(settings)
    device = open_device(plan)
    start_all(device, settings, spread_lengths(settings))
    seconds = seconds_of(device.decode, lambda _: device.wait())
    device.close()
    chunk = settings.engine.decode_chunk
    also = {"tokens/s of a process": settings.engine.slots * chunk / seconds}
    return beside_estimate(plan, "decode", seconds / chunk, also, chunk)


def decode_cases(settings: Settings) -> Cases:
    """Slots and pages, by context and slots."""
    for context in map(int, CONTEXTS.value):
        for slots in map(int, SLOTS.value):
            sizes = {"slot_tokens": context, "slots": slots, "swap_slots": 0}
            by_slots = functools.partial(with_engine, settings, cache="slots", pages=None, **sizes)
            by_pages = functools.partial(with_pages, settings, **sizes)
            yield f"slots {slots} x {context}", functools.partial(decode_figure, by_slots)
            yield f"pages {slots} x {context}", functools.partial(decode_figure, by_pages)


def page_cases(settings: Settings) -> Cases:
    """Decode calls by size of a page, as many slots as the config has."""
    for tokens in (t for t in PAGE_TOKENS if settings.engine.attention_block % t == 0):
        sized = functools.partial(with_pages, settings, page_tokens=tokens, swap_slots=0)
        yield f"{tokens} tokens", functools.partial(decode_figure, sized)


def prefill_figure(settings: Settings, behind: int) -> Figure:
    """Time the largest prefill call, of one prompt behind a context."""
    new = settings.engine.prefill_rows[-1] * settings.engine.prefill_width
    tokens = -(-(behind + new) // settings.engine.attention_block) * settings.engine.attention_block
    sizes = {"slot_tokens": tokens, "swap_slots": 0}
    paged = settings.engine.cache == "pages"
    settings = with_pages(settings, **sizes) if paged else with_engine(settings, **sizes)
    plan = make_plan(settings)
    device, shards = open_device(plan), plan.rollout_mesh.shape["data"]
    if paged:
        lengths = [1] * settings.engine.slots
        for shard in range(shards):
            lengths[shard * settings.engine.slots // shards] = behind + new
        device.set_table(table_of(settings, lengths, shards))
    each = (settings.engine.slots if paged else settings.engine.kv_slots(shards)) // shards
    work = [Prefill(shard * each, np.full(behind + new, 5, np.int32), behind) for shard in range(shards)]
    spare = [settings.engine.slots // shards - 1 if paged else each - 1] * shards
    seconds = seconds_of(lambda: device.prefill(work, spare), lambda _: device.wait())
    device.close()
    return beside_estimate(plan, "prefill", seconds, {"tokens/s of a process": new * shards / seconds})


def prefill_cases(settings: Settings) -> Cases:
    """The largest call, by what lies before it."""
    for behind in map(int, BEHIND.value):
        yield f"behind {behind}", functools.partial(prefill_figure, settings, behind)


# The learner.


def row_layout(settings: Settings, rows: int, segments: int) -> Packing:
    """Return full rows of so many segments each: trajectories of one step, with random ids."""
    c, rng = settings.learner, np.random.default_rng(0)
    length = c.row_tokens // segments
    response = max(min(length // 2, c.row_loss_tokens // segments), 1)

    def trajectory(i: int) -> Trajectory:
        ids = rng.integers(5, 1000, length).astype(np.int32)
        step = Step(ids[:-response], ids[-response:], np.full(response, -1, np.float32), reward=0.0)
        return Trajectory(f"t/{i}", i, 0, "bench", 0, (step,), Outcome.ENV_DONE)

    config = PackingConfig("trajectory", c.row_tokens, c.row_loss_tokens, rows=1)
    return pack([trajectory(i) for i in range(rows * segments)], config, final_values=False)


def update_figure(settings: Settings) -> Figure:
    """Time an update of one microbatch of full rows."""
    smallest = dataclasses.replace(settings.rollout, groups=jax.process_count(), samples=2)
    learner = dataclasses.replace(settings.learner, minibatches=1)
    plan = make_plan(dataclasses.replace(settings, rollout=smallest, learner=learner))
    program = next(p for p in programs(plan) if p.name == "update (RL)")
    lower: Any = program.lower
    state, frozen, batch, _, rates = lower.args
    check_memory(state, state.params, frozen)
    mesh, c = plan.setup.learner_mesh, settings.learner
    layout = row_layout(settings, c.rows // jax.process_count(), 1)
    count = len(layout.token_index)
    per_token = {"advantage": np.ones(count, np.float32), "weight": np.full(count, 1 / count, np.float32)}
    optional = {f.name: np.zeros(count, np.float32) for f in dataclasses.fields(batch.loss_tokens) if f.default is None}
    per_token |= {name: x for name, x in optional.items() if getattr(batch.loss_tokens, name) is not None}
    own = to_microbatches(
        layout.packed_tokens,
        scatter_fields(layout, per_token),
        microbatches=plan.phases[-1].microbatches,
        rows=c.rows // jax.process_count(),
    )
    full, phase = global_batch(own, mesh), plan.phases[-1]
    arrays = dataclasses.replace(random_arrays(state, 0.0), params=random_arrays(state.params, 0.02))
    weights = random_arrays(frozen, 0.02)

    def call() -> Any:
        nonlocal arrays
        arrays, metrics = phase.update(arrays, weights, full, np.int32(1), rates)
        return metrics

    seconds = seconds_of(call)
    figure = beside_estimate(plan, "update (RL)", seconds, {"tokens/s": c.rows * c.row_tokens / seconds})
    several = phase.microbatches
    return dataclasses.replace(figure, expected=figure.expected / several, least=figure.least / several)


def update_cases(settings: Settings) -> Cases:
    """Gradients summed over devices in both dtypes."""
    for dtype in ("float32", "bfloat16"):
        learner = dataclasses.replace(settings.learner, reduce_dtype=dtype)
        case = functools.partial(update_figure, dataclasses.replace(settings, learner=learner))
        yield f"gradients summed in {dtype}", case


def attention_figure(settings: Settings, segments: int) -> Figure:
    """Time attention of one layer with its gradient, for a row on each shard of a batch."""
    plan = make_plan(settings)
    policy, mesh, length = plan.setup.policy, plan.setup.learner_mesh, settings.learner.row_tokens
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    by_row = NamedSharding(mesh, P(ROWS))
    ends = (np.arange(length) // (length // segments) + 1) * (length // segments)
    ends = np.minimum(ends, length).astype(np.int32)

    def attend(query: Any, key: Any, value: Any, ends: Any) -> Any:
        memory = PackedRows(ends, policy.attention, mesh)
        return memory.attend(query, key, value, jnp.int32(0), None)[0]

    def loss(query: Any, key: Any, value: Any) -> Any:
        rows_of_ends = jnp.broadcast_to(jnp.asarray(ends), (rows, length))
        out = over_rows(attend, mesh, (P(ROWS),) * 4, P(ROWS))(query, key, value, rows_of_ends)
        return out.astype(jnp.float32).sum()

    def shape(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length, heads, policy.head_dim), policy.dtype, sharding=by_row)

    inputs = random_arrays([shape(policy.heads), shape(policy.kv_heads), shape(policy.kv_heads)], 1.0)
    return Figure("", "", seconds_of(functools.partial(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), *inputs)))


def attention_cases(settings: Settings) -> Cases:
    """One long chain, and many short ones."""
    for segments in SEGMENTS:
        yield f"{segments} segments of a row", functools.partial(attention_figure, settings, segments)


# Both.


def weights_figure(settings: Settings, *, adopts: bool) -> Figure:
    """Time the way of new weights to the engine; or a decode call that is the first with them, beside later ones."""
    plan = make_plan(settings)
    check_memory(plan.state.params, plan.setup.frozen, plan.rollout_params, plan.rollout_params, plan.cache)
    trained, frozen = random_arrays(plan.state.params, 0.02), random_arrays(plan.setup.frozen, 0.02)
    to_engine = build.make_rollout_params(plan.setup.policy, plan.setup.learner_mesh, plan.rollout_mesh, copy=True)
    size = device_bytes(plan.rollout_params)
    if not adopts:
        seconds = seconds_of(functools.partial(to_engine, trained, frozen))
        return Figure("", "", seconds, also={"MiB on each device": size / 2**20, "GB/s": size / seconds / 1e9})
    device = plan.setup.engine.device
    device.open(to_engine(trained, frozen))
    start_all(device, settings, spread_lengths(settings))
    usual = seconds_of(device.decode, lambda _: device.wait())
    device.set_params(to_engine(trained, frozen))
    started = time.perf_counter()
    device.decode()
    device.wait()
    seconds = time.perf_counter() - started
    device.close()
    return Figure("", "", seconds, also={"ms of the calls before": 1e3 * usual})


def weights_cases(settings: Settings) -> Cases:
    """The transfer, and the adoption between two decode calls."""
    yield "learner to engine", functools.partial(weights_figure, settings, adopts=False)
    yield "first decode call", functools.partial(weights_figure, settings, adopts=True)


def sampled_trajectories(plan: Plan, params: Any, settings: Settings) -> list[Trajectory]:
    """Return one step of each decode slot, sampled at temperature 1 behind random prompts."""
    c, device, rng = settings.engine, plan.setup.engine.device, np.random.default_rng(processes.process_index())
    device.open(params)
    prompts = rng.integers(5, plan.setup.policy.vocab_size, (c.slots, GAP_PROMPT)).astype(np.int32)
    if c.cache == "pages":
        device.set_table(table_of(settings, [GAP_PROMPT + GAP_RESPONSE] * c.slots, device.shards))
    per_shard = c.slots // device.shards
    of_shard = per_shard if c.cache == "pages" else c.kv_slots(device.shards) // device.shards
    slots = [i // per_shard * of_shard + i % per_shard for i in range(c.slots)]
    unread = per_shard if c.cache == "pages" else of_shard - 1  # A slot without pages; the spare one of each shard.
    prefills = [Prefill(slot, p[:-1], 0) for slot, p in zip(slots, prompts, strict=True)]
    device.prefill(prefills, [unread] * device.shards)
    for slot, prompt in enumerate(prompts):
        key = rng.integers(0, 2**32, 2, np.uint32)
        device.start(slot, ResponseRequest(prompt, GAP_RESPONSE, SamplingConfig(), key), prompt)
    parts = []
    for _ in range(-(-GAP_RESPONSE // c.decode_chunk)):
        device.decode()
        parts.append(device.fetch())
    device.close()

    def trajectory(i: int) -> Trajectory:
        ids, logprobs = (
            np.concatenate([getattr(part, name)[i, : part.count[i]] for part in parts]) for name in ("ids", "logprobs")
        )
        step = Step(prompts[i], ids, logprobs, reward=0.0)
        return Trajectory(f"t/{i}", i, 0, "gap", 0, (step,), Outcome.ENV_DONE)

    return [trajectory(i) for i in range(c.slots)]


def learner_logprobs(plan: Plan, trained: Any, frozen: Any, trajectories: Sequence[Trajectory], **other: Any) -> Any:
    """Return the learner's log-probs of all response tokens, with other fields of the policy."""
    settings, mesh = plan.setup.settings, plan.setup.learner_mesh
    c = settings.learner
    layout = pack(
        trajectories, PackingConfig("trajectory", c.row_tokens, c.row_loss_tokens, rows=1), final_values=False
    )
    rows = c.rows // jax.process_count()
    count = -(-layout.rows // rows)
    batch = global_batch(to_microbatches(layout.packed_tokens, layout.loss_tokens, microbatches=count, rows=rows), mesh)
    policy = dataclasses.replace(plan.setup.policy, **other)
    objective = dataclasses.replace(settings.objective, temperature=1.0)
    outputs = make_token_outputs(policy, objective, mesh)(trained, frozen, None, batch, jnp.int32(count))
    found = local_rows(outputs.logprob, mesh)
    return gather(layout, found.reshape(-1, found.shape[-1]))


def three_logprobs(settings: Settings) -> dict[str, np.ndarray]:
    """Return the log-probs of the same sampled tokens, of this process, by who computed them."""
    plan = make_plan(settings)
    policy, mesh = plan.setup.policy, plan.setup.learner_mesh
    frozen = build.make_frozen(settings, policy, mesh)
    trained = build.make_state_builder(settings, policy, mesh).init().params
    params = build.make_rollout_params(policy, mesh, plan.rollout_mesh)(trained, frozen)
    trajectories = sampled_trajectories(plan, params, settings)
    of_learner = functools.partial(learner_logprobs, plan, trained, frozen, trajectories)
    in_float32 = "xla" if policy.attention == "cudnn" else policy.attention  # cuDNN attends in 16 bits alone.
    return {
        "engine": np.concatenate([step.logprobs for t in trajectories for step in t.steps]),
        "learner": of_learner(),
        "float32": of_learner(dtype="float32", precision="highest", attention=in_float32),
    }


def gap_figure(measured: Callable[[], dict[str, np.ndarray]], one: str, other: str) -> Figure:
    """Describe the differences of two log-probs."""
    gap = measured()[one] - measured()[other]
    size, ratio = np.abs(gap), np.exp(-gap)
    outside = (ratio < ICEPOP[0]) | (ratio > ICEPOP[1])
    also = {
        "mean |gap|, nats": size.mean(),
        "99 % below": np.quantile(size, 0.99),
        "largest": size.max(),
        "mean gap": gap.mean(),
        f"|sum| over {GAP_RESPONSE} tokens": np.abs(gap.reshape(-1, GAP_RESPONSE).sum(axis=1)).mean(),
        "% outside of IcePop's bounds": 100 * outside.mean(),
    }
    return Figure("", "", also={name: float(x) for name, x in also.items()})


def gap_cases(settings: Settings) -> Cases:
    """Each two of the three."""
    measured = functools.cache(functools.partial(three_logprobs, settings))
    for one, other in (("engine", "learner"), ("engine", "float32"), ("learner", "float32")):
        yield f"{one} - {other}", functools.partial(gap_figure, measured, one, other)


BENCHES: dict[str, Callable[[Settings], Cases]] = {
    "gap": gap_cases,
    "decode": decode_cases,
    "pages": page_cases,
    "prefill": prefill_cases,
    "attention": attention_cases,
    "update": update_cases,
    "weights": weights_cases,
}


if __name__ == "__main__":
    run_main(main)

"""Estimate of a compiled program: its time, what it exchanges and copies, and its memory, without the chip.

The TPU compiler writes into each fusion how many cycles it expects. Summed, each times the trips of the loops that it
lies in, they compare two forms of one program. They leave out kernels (attention by splash), waits for collectives and
the host: ratios can be trusted, absolute times cannot.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from rich.table import Table

from agentr1_jax.policy.attention import BLOCK, GPU_BLOCK
from agentr1_jax.policy.config import DecoderConfig
from agentr1_jax.rollout.pages import DECODE_BLOCK
from agentr1_jax.rollout.programs import KERNEL_HEAD_DIM
from experiments import topology
from experiments.hlo import Execution, parse
from experiments.plan import Plan, Program, device_bytes

MIB = 2**20
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
RING = "windowed_dot_general"
"""What the compiler calls the loop of a product whose operand goes round the devices."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """What its maker tells of a chip: bf16 FLOP/s, bytes/s and bytes of memory; and the clock of the estimates, Hz."""

    flops: float
    bandwidth: float
    memory: float
    clock: float


# https://cloud.google.com/tpu/docs/v5e, /v5p, /v6e; the data sheets of H100 SXM and H200. GPU compilers tell no cycles.
CHIPS: Mapping[str, Chip] = {
    "v5e": Chip(197e12, 819e9, 16 * 2**30, 1.5e9),
    "v5p": Chip(459e12, 2765e9, 95 * 2**30, 1.75e9),
    "v6e": Chip(918e12, 1640e9, 32 * 2**30, 1.75e9),
    "h100": Chip(989e12, 3352e9, 80e9, math.nan),
    "h200": Chip(989e12, 4800e9, 141e9, math.nan),
}


USABLE = 0.96
"""Share of a chip's memory that programs can have."""
UNKNOWN = Chip(math.nan, math.nan, math.nan, math.nan)


def chip_of(kind: str) -> Chip:
    """Return the peak of a chip, by JAX's `device_kind` or the name of a topology; NaN where it is not known."""
    said = {"v5e": "v5e", "v5 lite": "v5e", "v5": "v5p", "v6": "v6e", "h100": "h100", "h200": "h200"}
    return next((CHIPS[name] for part, name in said.items() if part in kind.lower()), UNKNOWN)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective: its kind, how many loops it lies in, bytes of its result, how often it runs, where it came from."""

    kind: str
    depth: int
    bytes: int
    times: float
    source: str


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a compiled program says of itself; bytes and seconds of each device.

    Attributes:
      seconds: of all that has cycles, all branches of a conditional among it; NaN where the chip is unknown.
      exchanges: collectives, once for each place in the program.
      rings: loops that multiply while an operand goes round the devices.
      entry_copies: bytes of each copy outside of loops that is larger than 1 MiB: an argument in another layout.
      loop_copies: the same inside of loops.
      sorts: sorts, once for each place.
      kernels: on TPU executions of kernels, whose time is not in `seconds`; on GPU launches of any kernel.
      untold_loops: sources of loops whose trips the program does not tell; they were assumed.
      peak_bytes: most memory at one time, as the compiler tells it.
      sum_bytes: arguments, results and temporaries, less what is shared: at least as much.
    """

    seconds: float
    exchanges: tuple[Exchange, ...]
    rings: int
    entry_copies: tuple[int, ...]
    loop_copies: tuple[int, ...]
    sorts: int
    kernels: int
    untold_loops: tuple[str, ...]
    peak_bytes: int
    sum_bytes: int

    def exchanges_at(self, depth: int, kind: str = "") -> list[Exchange]:
        """Return the collectives in exactly so many loops, of one kind or of all."""
        return [x for x in self.exchanges if x.depth == depth and kind in ("", x.kind)]


@dataclasses.dataclass(frozen=True)
class Need:
    """What a program cannot do without, on each device.

    Attributes:
      flops: of the model.
      bytes: of weights and live KV.
      kernel_flops, kernel_bytes: what kernels do that attend to pages: their time is not in the compiler's cycles.
    """

    flops: float = math.nan
    bytes: float = math.nan
    kernel_flops: float = 0.0
    kernel_bytes: float = 0.0


def estimate(compiled: jax.stages.Compiled, clock: float, assumed: Mapping[str, float]) -> Estimate:
    """Read the estimate off a compiled program.

    Args:
      compiled: a program compiled for TPU.
      clock: cycles a second.
      assumed: trips of the loops that the program does not tell, by a regular expression of their source.
    """
    program = parse(compiled.as_text() or "")
    executions = list(program.executions(assumed))
    loops = [v for v in executions if v.instruction.opcode == "while"]
    m: Any = compiled.memory_analysis()
    whole = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    on_gpu = not any(v.instruction.cycles for v in executions)
    copies = [v for v in executions if v.instruction.opcode == "copy" and not v.in_fusion and v.instruction.bytes > MIB]
    return Estimate(
        seconds=sum(v.times * v.instruction.cycles for v in executions if not v.in_fusion) / clock,
        exchanges=_exchanges(executions),
        rings=sum(RING in v.instruction.computations()[0] for v in loops),
        entry_copies=tuple(v.instruction.bytes for v in copies if not v.loops),
        loop_copies=tuple(v.instruction.bytes for v in copies if v.loops),
        sorts=sum(v.instruction.opcode == "sort" for v in executions),
        kernels=round(sum(v.times for v in executions if (_is_launch if on_gpu else _is_kernel)(v))),
        untold_loops=tuple(loop.source for loop in program.untold_loops()),
        peak_bytes=m.peak_memory_in_bytes,
        sum_bytes=whole,
    )


def _is_kernel(execution: Execution) -> bool:
    return execution.instruction.opcode == "custom-call" and "tpu_custom_call" in execution.instruction.attributes


def _is_launch(execution: Execution) -> bool:
    return (
        execution.instruction.opcode in ("fusion", "custom-call", "copy", "sort", "scatter") and not execution.in_fusion
    )


def _exchanges(executions: Iterable[Execution]) -> tuple[Exchange, ...]:
    """Return the collectives; one that the compiler has split into pieces, which share a channel, counts once."""
    seen, fusion = dict[tuple[str, ...], Exchange](), None
    for execution in executions:
        x = execution.instruction
        if not execution.in_fusion:
            fusion = x
        kind = x.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        # A started one returns its operand, too.
        size = x.bytes // 2 if x.opcode.endswith("-start") else x.bytes
        if kind == "all-reduce" and execution.in_fusion and fusion is not None:  # Fused with the slice that it is for.
            kind, size = "reduce-scatter", fusion.bytes
        loops = tuple(loop.name for loop in execution.loops)
        piece = x.attribute("channel_id") if execution.in_fusion else ""
        seen.setdefault((kind, piece or x.name, *loops), Exchange(kind, len(loops), size, execution.times, x.source))
    return tuple(seen.values())


def assumed_trips(plan: Plan) -> dict[str, float]:
    """Return the trips of loops that depend on data, at their most: full batches, contexts, rows and decode calls.

    The branch of `sample` for top-k and top-p is taken only where the run truncates, that of `cudnn` for rows of more
    segments than its tables hold never.
    """
    settings = plan.setup.settings
    c, e, mesh = settings.learner, settings.engine, plan.setup.learner_mesh.shape
    microbatches = max((phase.microbatches for phase in plan.phases), default=1)
    loss_tokens = -(-c.rows // (mesh["data"] * mesh["fsdp"])) * c.row_loss_tokens
    gpu = plan.setup.learner_mesh.devices.flat[0].platform == "gpu"
    blocks = -(-c.row_tokens // min(GPU_BLOCK if gpu else BLOCK, c.row_tokens))
    truncates = settings.sampling.top_k > 0 or settings.sampling.top_p < 1
    return {
        r"^jit\(decode\)/(shard_map/)?while/body/cond$": float(truncates),
        r"^jit\(decode\).*/layers(_\d+)?/.*while$": -(-e.slot_tokens // e.attention_block),
        r"^jit\(prefill\).*/layers(_\d+)?/.*while$": -(-e.slot_tokens // e.attention_block),
        r"^jit\(decode\)/(shard_map/)?while$": e.decode_chunk,
        r"/layers/cond/branch_0_fun/.*while$": 0.0,
        r"/layers/.*while$": (blocks + 1) / 2,
        r"^jit\(\w+\)/(shard_map/)?while$": microbatches,
        r"^jit\(\w+\)/(shard_map/)?while/body/.*while$": -(-loss_tokens // min(settings.loss.chunk, loss_tokens)),
    }


def need(plan: Plan, program: Program) -> Need:
    """Return what a program needs at the least, with full batches and contexts of half their most tokens.

    A backward pass counts twice its forward pass, and what `remat` computes again does not count.
    """
    settings, policy = plan.setup.settings, plan.setup.policy
    c, e, devices = settings.learner, settings.engine, plan.setup.learner_mesh.size
    kind = program.name.split()[0]
    if kind in ("decode", "prefill"):
        shards, tensor = plan.rollout_mesh.shape["data"], plan.rollout_mesh.shape["tensor"]
        paged = e.cache == "pages"
        kernel = paged and policy.head_dim % KERNEL_HEAD_DIM == 0
        held = e.page_count(shards) * e.page_tokens if paged else e.kv_slots(shards) * e.slot_tokens
        token_bytes = device_bytes(plan.cache) * shards / held
        if kind == "decode":
            live = e.slots / shards * e.slot_tokens / 2 * token_bytes
            # The kernel reads whole blocks.
            read = live + e.slots / shards * min(e.attention_block, DECODE_BLOCK) / 2 * token_bytes
            reads = device_bytes(plan.rollout_params) + live
            return Need(bytes=e.decode_chunk * reads, kernel_bytes=e.decode_chunk * read if kernel else 0.0)
        tokens = e.prefill_rows[-1] * e.prefill_width
        mixing = 4 * tokens / tensor * policy.layers * e.slot_tokens / 2 * policy.heads * policy.head_dim
        return Need(
            2 * tokens / tensor * token_flops(policy, e.slot_tokens / 2),
            kernel_flops=mixing if kernel else 0.0,
            kernel_bytes=e.prefill_rows[-1] * e.slot_tokens / 2 * token_bytes if kernel else 0.0,
        )
    passes = {"update": 3, "token": 1, "log": 1}.get(kind, math.nan)
    microbatches = max(phase.microbatches for phase in plan.phases)
    body = c.rows * c.row_tokens * token_flops(policy, c.row_tokens / 2)
    head = c.rows * c.row_loss_tokens * policy.width * policy.vocab_size
    return Need(2 * passes * microbatches * (body + head) / devices)


def token_flops(policy: DecoderConfig, context: float) -> float:
    """Return the multiplications of one token in all layers, attending to so many positions; without the head."""
    heads = (2 * policy.heads + 2 * policy.kv_heads) * policy.head_dim
    return policy.layers * (policy.width * (heads + 3 * policy.hidden) + 2 * context * policy.heads * policy.head_dim)


def estimates_table(
    plan: Plan, topology_name: str, programs: Iterable[Program]
) -> tuple[Table, list[str], dict[str, int]]:
    """Compile the large programs (of prefill the largest) for a TPU slice or GPUs.

    Returns:
      a table of their estimates; the names of the programs that the compiler refused; the peak bytes of the others.
    """
    chip = chip_of(topology_name)
    table = Table(title=f"Compiled for {topology_name}, not run; of each device", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "program" else "right", no_wrap=True)
    table.caption = CAPTION
    failed, assumed, peaks = [], assumed_trips(plan), dict[str, int]()
    for program in programs:
        if program.lower is None:
            continue
        try:
            with topology.no_compile_cache():
                compiled = program.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            failed.append(program.name)
            table.add_row(program.name, str(error).strip().splitlines()[0])
            continue
        found, least = estimate(compiled, chip.clock, assumed), need(plan, program)
        peaks[program.name] = found.peak_bytes
        table.add_row(program.name, *_cells(found, least, chip))
    return table, failed, peaks


def describe_fit(plan: Plan, peaks: Mapping[str, int], chip: Chip) -> tuple[list[str], bool]:
    """Return lines that say what a device holds while rolling out and while learning, and whether both fit the chip.

    With `rollout.staleness` the engine stays while the learner works.
    """
    settings, usable = plan.setup.settings, USABLE * chip.memory
    in_engine = [x for name, x in peaks.items() if name.split()[0] in ("prefill", "decode", "copy")]
    in_learner = [x for name, x in peaks.items() if name.split()[0] in ("update", "token", "log")]
    if not in_engine or not in_learner or math.isnan(usable):
        return [], True
    references = [phase.reference for phase in plan.phases if phase.reference is not None]
    engine, state = max(in_engine), device_bytes((plan.state, plan.setup.frozen, references))
    ahead = beside = 0
    if settings.rollout.staleness:  # New parameters wait beside those of the responses in progress.
        ahead = device_bytes(plan.rollout_params)
        beside = 2 * ahead + device_bytes(plan.cache)
    rolling_out, learning = engine + ahead + state, max(in_learner) + device_bytes(references) + beside

    def gib(count: float) -> str:
        return f"{count / 2**30:.2f}"

    lines = [
        f"rolling out: {gib(rolling_out)} GiB on each device, the engine's peak {gib(engine)} and the learner's state "
        f"{gib(state)}; learning: {gib(learning)}" + (f", {gib(beside)} of it the engine's" if beside else ""),
    ]
    e, shards = settings.engine, plan.rollout_mesh.shape["data"]
    if e.cache == "pages":
        page = device_bytes(plan.cache.pages) * shards / e.page_count(shards)
        more = min(usable - rolling_out, usable - learning if beside else math.inf)
        most = int(e.page_count(shards) // shards + more // page) * shards
        lines.append(f"rollout.pages: {e.page_count(shards):,} of {e.page_tokens} tokens, {max(most, 0):,} would fit")
    fits = max(rolling_out, learning) <= usable
    lines.append(f"{'fits' if fits else 'does not fit'} the {gib(usable)} GiB that programs have of {gib(chip.memory)}")
    return lines, fits


COLUMNS = "program, peak GiB, sum, ms, MFU, HBM, rings, collectives *, copies *, sorts, kernels, open".split(", ")
CAPTION = (
    "ms: the compiler's cycles, each times its trips, without waits and kernels (those that attend to pages are in it, "
    "at the chip's peak); loops that depend on data at their most: full batches, contexts, chunks. MFU, HBM: shares of "
    "the chip's peak that the least work would be, with contexts half full. * their number in as many loops, and MiB; "
    "copies: MiB of those above 1 outside and inside of loops. open: loops whose trips depend on data. Of a GPU the "
    "kernels are all launches, and there are no ms"
)


def expected_seconds(found: Estimate, least: Need, chip: Chip) -> float:
    """Return the compiler's estimate, with kernels that attend to pages at the chip's peak; NaN where it tells none."""
    kernels = max(least.kernel_bytes / chip.bandwidth, least.kernel_flops / chip.flops)
    return found.seconds + kernels if found.seconds else math.nan


def least_seconds(least: Need, chip: Chip) -> float:
    """Return what the least work would take at the chip's peak; NaN where neither is known."""
    known = [x for x in (least.flops / chip.flops, least.bytes / chip.bandwidth) if x == x]
    return max(known, default=math.nan)


def _cells(found: Estimate, least: Need, chip: Chip) -> list[str]:
    seconds = expected_seconds(found, least, chip)

    def share(amount: float, peak: float) -> str:
        x = amount / peak / seconds if seconds else math.nan
        return f"{100 * x:.0f} %" if np.isfinite(x) else ""

    depths = range(1 + max((x.depth for x in found.exchanges), default=0))
    exchanged = [(depth, found.exchanges_at(depth)) for depth in depths]
    return [
        f"{found.peak_bytes / 2**30:.2f}",
        f"{found.sum_bytes / 2**30:.2f}",
        f"{1e3 * seconds:,.1f}" if np.isfinite(seconds) else "",
        share(least.flops, chip.flops),
        share(least.bytes, chip.bandwidth),
        str(found.rings),
        "\n".join(f"{depth}: {len(each)}, {sum(x.bytes for x in each) / MIB:,.1f}" for depth, each in exchanged),
        " / ".join(f"{sum(copies) / MIB:,.0f}" for copies in (found.entry_copies, found.loop_copies)),
        str(found.sorts),
        str(found.kernels),
        str(len(found.untold_loops)),
    ]

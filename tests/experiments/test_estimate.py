"""What the estimate reads off compiled programs: trips of loops, collectives, copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from agentr1_jax.policy.config import DecoderConfig
from experiments.estimate import Exchange, estimate, token_flops
from experiments.hlo import parse, shape_bytes

# As the TPU compiler writes them: a ring that counts from 2 to 8 by twos, inside of a loop of data's length; a sum
# fused with the slice that it is for, in two pieces that share a channel.
TEXT = """HloModule jit_update, is_scheduled=true

%windowed_dot_general_cond (p.1: (u32[], f32[4])) -> pred[] {
  %constant.1 = u32[]{:T(128)} constant(8)
  %p.1 = (u32[]{:T(128)}, f32[4]{0:T(8,128)}) parameter(0)
  %gte.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt.1 = pred[] compare(%gte.1, %constant.1), direction=LT
}

%windowed_dot_general_body (p.2: (u32[], f32[4])) -> (u32[], f32[4]) {
  %p.2 = (u32[], f32[4]) parameter(0)
  %gte.2 = u32[] get-tuple-element(%p.2), index=0
  %one = u32[] constant(1)
  %add.1 = u32[] add(%gte.2, %one)
  %add.2 = u32[] add(%add.1, %one)
  %gte.3 = f32[4] get-tuple-element(%p.2), index=1
  %fusion.1 = f32[4] fusion(%gte.3), kind=kOutput, calls=%fused.1, backend_config={"estimated_cycles":"100"}
  ROOT %tuple.2 = (u32[], f32[4]) tuple(%add.2, %fusion.1)
}

%fused.1 (p.3: f32[4]) -> f32[4] {
  ROOT %p.3 = f32[4] parameter(0)
}

%scatter.1 (p.4: f32[1024,1024]) -> f32[64,1024] {
  %p.4 = f32[1024,1024] parameter(0)
  %zero = s32[] constant(0)
  %all-reduce.1 = f32[1024,1024] all-reduce(%p.4), channel_id=7, to_apply=%fused.1
  ROOT %slice = f32[64,1024] dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={64,1024}
}

%cond (p.5: (u32[], f32[4])) -> pred[] {
  %p.5 = (u32[], f32[4]) parameter(0)
  ROOT %more = pred[] get-tuple-element(%p.5), index=0
}

%body (p.6: (u32[], f32[4])) -> (u32[], f32[4]) {
  %p.6 = (u32[], f32[4]) parameter(0)
  %two = u32[] constant(2)
  %start = u32[] copy(%two)
  %gte.6 = f32[4] get-tuple-element(%p.6), index=1
  %tuple.6 = (u32[], f32[4]) tuple(%start, %gte.6)
  %while.1 = (u32[], f32[4]) while(%tuple.6), condition=%windowed_dot_general_cond, body=%windowed_dot_general_body
  %big = f32[1024,1024] broadcast(%two), dimensions={}
  %copy.1 = f32[1024,1024]{0,1} copy(%big), backend_config={"estimated_cycles":"10"}
  %piece.1 = f32[64,1024] fusion(%copy.1), kind=kCustom, calls=%scatter.1, backend_config={"estimated_cycles":"1"}
  %piece.2 = f32[64,1024] fusion(%copy.1), kind=kCustom, calls=%scatter.1
  %kernel = f32[4] custom-call(%gte.6), custom_call_target="tpu_custom_call", "note":"over
}} two lines"
  %gather = (f32[4], f32[64]) all-gather-start(%gte.6), channel_id=8, metadata={op_name="jit(update)/all_gather"}
  ROOT %tuple.7 = (u32[], f32[4]) tuple(%start, %kernel)
}

ENTRY %main (p.7: (u32[], f32[4])) -> (u32[], f32[4]) {
  %p.7 = (u32[], f32[4]) parameter(0)
  %weights = bf16[2048,1024]{1,0} broadcast(%p.7), dimensions={}
  %copy.2 = bf16[2048,1024]{0,1} copy(%weights), backend_config={"estimated_cycles":"1000"}
  ROOT %while.2 = (u32[], f32[4]) while(%p.7), condition=%cond, body=%body, metadata={op_name="jit(update)/while"}
}
"""


class Compiled:
    """Stands for a compiled program with such a text."""

    def as_text(self):
        return TEXT

    def memory_analysis(self):
        return jax.jit(jnp.sin).lower(1.0).compile().memory_analysis()


def test_a_program_of_the_tpu_compiler():
    found = estimate(Compiled(), clock=1e3, assumed={r"^jit\(update\)/while$": 5})
    assert found.seconds == pytest.approx((1000 + 5 * (10 + 1 + 3 * 100)) / 1e3)
    scattered = Exchange("reduce-scatter", 1, 4 * 64 * 1024, 5, "")
    gathered = Exchange("all-gather", 1, 4 * (4 + 64) // 2, 5, "jit(update)/all_gather")
    assert found.exchanges == (scattered, gathered)
    assert found.exchanges_at(1, "all-gather") == [gathered] and not found.exchanges_at(0)
    assert (found.rings, found.sorts, found.kernels) == (1, 0, 5)
    assert found.entry_copies == (2 * 2048 * 1024,) and found.loop_copies == (4 * 1024 * 1024,)
    assert found.untold_loops == ("jit(update)/while",)


def test_loops_of_this_machines_compiler_run_as_often_as_they_were_traced():
    def body(x, _):
        return jax.lax.scan(lambda y, _: (jnp.sin(y @ y), None), x, length=3)[0], None

    compiled = jax.jit(lambda x: jax.lax.scan(body, x, length=7)[0]).lower(jnp.ones((8, 8))).compile()
    program = parse(compiled.as_text())
    assert not program.untold_loops()
    products = [v.times for v in program.executions({}) if v.instruction.opcode in ("dot", "custom-call")]
    assert products == [21]


def test_bytes_of_shapes():
    assert shape_bytes("(bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/pred[4], f32[], f8e4m3fn[8])") == 12 + 4 + 4 + 8
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule nothing")


def test_multiplications_of_a_token_are_those_of_its_matrices():
    """Parameters of the layers without norms and biases, and scores and mixing over the context."""
    policy = DecoderConfig(vocab_size=5, width=16, layers=3, heads=4, kv_heads=2, head_dim=8, hidden=24)
    matrices = 3 * (2 * 16 * 4 * 8 + 2 * 16 * 2 * 8 + 3 * 16 * 24)
    assert token_flops(policy, 0) == matrices and token_flops(policy, 10) == matrices + 3 * 2 * 10 * 4 * 8

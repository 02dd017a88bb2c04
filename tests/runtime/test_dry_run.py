"""The dry run against what a run really holds; and, where libtpu is, what the TPU compiler makes of its programs."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import fixed_batch
from changes import changed
from examples import layout

from agentr1_jax.errors import UserError
from agentr1_jax.learner.batch import CRITIC_FIELDS, batch_shapes, to_microbatches
from agentr1_jax.learner.packing import scatter_fields
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train import build
from configs import base, multihop_tiny, quickstart, scale_qwen2_5_3b
from experiments import topology
from experiments.checks import check_attention
from experiments.estimate import USABLE, Chip, describe_fit, estimate
from experiments.plan import device_bytes, make_plan, programs, total_bytes
from experiments.setup import complete, make_task, read_settings

GRPO = {"credit__name": "grpo", "credit__args__lam": None}
ROOT = Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")


def small(run_dir, **changes):
    """Settings of the quickstart on 8 devices."""
    sizes = {"mesh__fsdp": 2, "mesh__tensor": 2, "rollout__tensor": 2, "learner__rows": 8, "tokenizer__texts": 400}
    sizes |= {"learner__packing": "trajectory"}
    return read_settings(changed(quickstart.get_config(), run_dir=str(run_dir), **sizes | changes))


def held(tree):
    """Bytes of real arrays on the first device."""
    first = jax.devices()[0]
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first)


def shapes(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def test_what_it_says_is_what_a_run_holds(tmp_path):
    settings = small(tmp_path / "run", policy__lora__rank=4, critic="separate")
    plan = make_plan(settings)
    assert not list(tmp_path.iterdir())
    tokenizer = build.make_tokenizer(settings, make_task(settings, ToolMetrics()), resumes=False)
    policy = build.make_policy(settings, tokenizer)
    assert policy == plan.setup.policy
    mesh = build.make_learner_mesh(settings)
    builder = build.make_state_builder(settings, policy, mesh)
    state, frozen = builder.init(), build.make_frozen(settings, policy, mesh)
    assert device_bytes(plan.state) == held(state)
    assert device_bytes(plan.setup.frozen) == held(frozen)
    assert shapes(plan.state) == shapes(builder.shapes) == shapes(state)
    rollout_params = build.make_rollout_params(policy, mesh, plan.rollout_mesh)(state.params, frozen)
    assert device_bytes(plan.rollout_params) == held(rollout_params)
    cache = plan.setup.engine.device.programs.new_cache()
    assert device_bytes(plan.cache) == held(cache) > 0
    assert total_bytes(plan.cache) == sum(x.nbytes for x in jax.tree.leaves(cache))


def test_it_names_every_program_of_the_engine_and_of_each_phase(tmp_path):
    plan = make_plan(small(tmp_path))
    names = [program.name for program in programs(plan)]
    assert len(set(names)) == len(names)
    c = plan.setup.settings.engine
    assert sum(name.startswith(("prefill", "decode", "copy")) for name in names) == len(c.prefill_rows) + 2
    last = ["learner state, restarted", "update (warm start)", "token outputs", "credit", "update (RL)"]
    assert names[-5:] == last
    without = make_plan(small(tmp_path, warm_start__updates=0, credit__name="grpo", credit__args__lam=None))
    assert [p.name for p in programs(without)][-2:] == ["credit", "update (RL)"]
    assert not {"token outputs", "update (warm start)"} & {p.name for p in programs(without)}
    for program in programs(plan):
        if program.lower is not None:
            assert program.lower().as_text()  # Its shapes fit together.


def test_the_precision_asked_for_is_that_of_every_matmul(tmp_path):
    """Of engine and learner alike, also of gradients that are written by hand."""
    sizes = {"critic": "separate", "kl__coef": 0.1, "optimizer__name": "adamw"}  # Muon has matmuls of its own.
    for precision, asked in (("highest", True), ("default", False)):
        settings = small(tmp_path, policy__precision=precision, **sizes)
        lowered = [p.lower().as_text() for p in programs(make_plan(settings)) if p.lower is not None]
        products = [line for text in lowered for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(lowered) > 4 and len(products) > 60
        assert all(("HIGHEST" in line) == asked for line in products)
    with pytest.raises(UserError, match=r"precision=highest is of matmuls in float32, and dtype is bfloat16"):
        make_plan(small(tmp_path, policy__precision="highest", policy__dtype="bfloat16"))


def test_what_fits_a_chip_is_what_engine_and_learner_hold_together(tmp_path):
    """Its pages: so many fit, one more for each shard does not."""

    def judge(memory, **changes):
        settings = small(tmp_path, rollout__cache="pages", rollout__staleness=1, critic="none", **GRPO, **changes)
        plan = make_plan(settings)
        cache, weights = device_bytes(plan.cache), device_bytes(plan.rollout_params)
        state = device_bytes((plan.state, plan.setup.frozen))
        peaks = {"prefill 32": cache + weights + 1000, "decode": cache + weights, "update (RL)": 2 * state}
        lines, fits = describe_fit(plan, peaks, Chip(1.0, 1.0, memory, 1.0))
        # Staleness: the weights of the responses in progress, and the next ones.
        least = max(cache + 2 * weights + 1000 + state, 2 * state + cache + 2 * weights)
        assert fits == (least <= USABLE * memory)
        return plan, lines, fits

    plan, lines, fits = judge(2**20, rollout__pages=400)
    assert not fits and "does not fit the" in lines[-1]
    plan, lines, fits = judge(64 * 2**20, rollout__pages=400)
    assert fits
    most = int(re.search(r"of 16 tokens, ([\d,]+) would fit", lines[1])[1].replace(",", ""))
    shards = plan.rollout_mesh.shape["data"]
    assert judge(64 * 2**20, rollout__pages=most)[2] and not judge(64 * 2**20, rollout__pages=most + shards)[2]


def test_batches_have_the_shapes_it_says():
    packing = layout(fixed_batch("append", 0), "trajectory")
    for present in (CRITIC_FIELDS, ()):
        values = dict.fromkeys(("advantage", "weight", *present), np.zeros(len(packing.token_index), np.float32))
        real = to_microbatches(packing.packed_tokens, scatter_fields(packing, values), microbatches=2, rows=8)
        length, loss_tokens = real.packed_tokens.tokens.shape[2], real.loss_tokens.logit_index.shape[2]
        said = batch_shapes(microbatches=2, rows=8, row_tokens=length, row_loss_tokens=loss_tokens, present=present)
        assert jax.tree.structure(real) == jax.tree.structure(said) and shapes(real) == shapes(said)


def test_the_command_prints_tables_and_writes_nothing(tmp_path):
    arguments = ["--config=configs/quickstart.py", f"--config.run_dir={tmp_path}/run", "--dry_run"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for text in ("parameters", "615,425", "KV cache", "60.94 MiB", "(estimate)", "decode", "update (RL)"):
        assert text in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_preset_with_a_vocabulary_needs_neither_tokenizer_nor_data(tmp_path):
    config = changed(scale_qwen2_5_3b.get_config(), hardware="v5e-8", policy__attention="xla", rollout__tensor=4)
    config = changed(config, tokenizer__path=str(tmp_path / "none"), task__data_dir=str(tmp_path / "none"))
    plan = make_plan(read_settings(config))
    assert sum(x.size for x in jax.tree.leaves(plan.state.params)) == 3_085_938_688  # As published.
    # 2 key heads on 4 devices: each holds one, of the KV slots of its half: 32 decode, 16 swap, 1 spare.
    per_token = 36 * 2 * 128 * 2
    assert device_bytes(plan.cache) == per_token * 49 * 4096
    assert device_bytes(plan.state.params) == pytest.approx(4 * 3_085_938_688 / 8, rel=1e-3)


@pytest.mark.parametrize(("key", "tensor"), [("mesh.tensor", 4), ("rollout.tensor", 8)])
def test_query_heads_that_the_tensor_axis_does_not_divide_are_refused(key, tensor):
    config = changed(multihop_tiny.get_config(), policy__preset="qwen2.5-0.5b", policy__width=None)
    config = changed(config, policy__layers=None, policy__head_dim=None, policy__hidden=None)
    config = changed(config, learner__rows=8, rollout__swap_slots=8)
    config = changed(config, **{key.replace(".", "__"): tensor})
    with pytest.raises(
        UserError, match=rf"{key} is {tensor}, which does not divide 14 query heads; choose among \[1, 2"
    ):
        make_plan(read_settings(config))


def test_sums_in_half_precision_over_cpu_devices_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"learner.reduce_dtype is bfloat16: .* need float32"):
        make_plan(small(tmp_path, learner__reduce_dtype="bfloat16"))
    with pytest.raises(UserError, match=r"policy.param_dtype is bfloat16: .* need float32"):
        make_plan(small(tmp_path, policy__param_dtype="bfloat16"))


def test_attention_that_cannot_run_is_refused_with_the_remedy(tmp_path):
    config = small(tmp_path, policy__attention="splash")
    with pytest.raises(UserError, match=r"needs a TPU.*policy.attention=xla"):
        make_plan(config)
    plan = make_plan(small(tmp_path))
    policy = dataclasses.replace(plan.setup.policy, attention="splash_tree")
    with pytest.raises(UserError, match=r"needs a TPU"):
        check_attention(config, policy, plan.setup.learner_mesh)


def test_a_missing_libtpu_is_one_message(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"--topology needs libtpu.*jax\[tpu\]=={jax.__version__}"):
        topology.devices("v5e:4x4")


def test_a_missing_cuda_compiler_and_a_strange_number_of_gpus_are_one_message(monkeypatch):
    with pytest.raises(UserError, match="--topology=h200:many: write the number of GPUs, e.g. h200:8"):
        topology.devices("h200:many")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"--topology=h200 needs .*jax-cuda13-pjrt=={jax.__version__}"):
        topology.devices("h200")


@needs_libtpu
def test_an_unknown_topology_is_one_message():
    with pytest.raises(UserError, match=r"--topology=v9z:4x4: .*examples: v5e:4x4"):
        topology.devices("v9z:4x4")


def compile_program(plan, name):
    """The first large program whose name starts so."""
    program = next(p for p in programs(plan) if p.lower is not None and p.name.startswith(name))
    with topology.no_compile_cache():
        return program.lower().compile()


def compile_memory(plan, name):
    return compile_program(plan, name).memory_analysis()


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_the_tpu_compiler_takes_the_engine_of_qwen2_5_3b_and_it_fits(kind):
    """The update of that size is compiled by `test_configs`."""
    config = changed(scale_qwen2_5_3b.get_config(), critic="shared_trunk", credit__name="step_gae", rollout__cache=kind)
    plan = make_plan(read_settings(config), "v5e:4x4")
    learner, view, cache = device_bytes(plan.state), device_bytes(plan.rollout_params), device_bytes(plan.cache)
    for program in ("prefill", "decode") if kind == "pages" else ("prefill", "decode", "copy"):
        compiled = compile_program(plan, program)
        m = compiled.memory_analysis()
        assert m.alias_size_in_bytes >= cache, program
        found = estimate(compiled, clock=1.0, assumed={})
        assert not found.entry_copies, f"{program} lays its arguments anew"
        if program == "decode":
            in_a_layer = [x.kind for x in found.exchanges if "/layers/" in x.source]
            assert in_a_layer == ["all-reduce", "all-reduce"] and not found.sorts
            assert bool(found.kernels) == (kind == "pages")
        if program != "prefill":
            assert m.temp_size_in_bytes < 0.1 * cache
        total = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
        assert total + learner < 0.95 * 16 * 2**30, program
    assert view >= 2 * 3.08e9 / 2  # bfloat16, on two devices


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="no CUDA compiler")
@pytest.mark.nightly
def test_a_gpu_decodes_with_one_call_of_a_kernel_a_layer():
    config = changed(scale_qwen2_5_3b.get_config(), hardware="h200", rollout__tensor=1, rollout__swap_slots=0)
    plan = make_plan(read_settings(complete(config, topology.devices("h200"))), "h200")
    compiled = compile_program(plan, "decode")
    found, memory = estimate(compiled, clock=1.0, assumed={}), compiled.memory_analysis()
    text, layers = compiled.as_text() or "", plan.setup.policy.layers
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == layers
    assert "bf16[1,2048,11008]" not in text, "a layer is copied out of a stack"
    assert found.untold_loops == ("jit(decode)/while",), "the host reads whether attention is done"
    assert memory.temp_size_in_bytes < 0.1 * device_bytes(plan.cache)


@needs_libtpu
@pytest.mark.nightly
def test_the_tpu_compiler_takes_what_the_table_of_hardware_says_and_it_fits():
    """Update and decoding of Qwen2.5-0.5B in contexts of 2048 tokens; the hardware decides all else."""
    slice_, hardware, memory = "v5e:2x4", "v5e-8", 16 * 2**30
    config = changed(base.get_config("hopworld"), policy__preset="qwen2.5-0.5b", hardware="auto")
    config = changed(config, budget__context_tokens=2048, budget__response_tokens=256)
    named = complete(changed(config, hardware=hardware))
    config = complete(config, topology.devices(slice_))
    assert {**named.to_dict(), "hardware": "auto"} == config.to_dict()
    assert (config.policy.dtype, config.policy.attention, config.mesh.fsdp) == ("bfloat16", "splash", 8)
    plan = make_plan(read_settings(config), slice_)
    for program, beside in (("update (RL)", 0), ("decode", device_bytes(plan.state))):
        found = estimate(compile_program(plan, program), clock=1.0, assumed={})
        assert found.sum_bytes + beside < 0.9 * memory, program
        assert found.rings == 0, program
        # Sums of gradients are scattered as they are made, but for a few whose parts do not fill the compiler's tiles.
        whole = sum(x.bytes * x.times for x in found.exchanges if x.kind == "all-reduce" and x.depth)
        assert whole < 0.25 * total_bytes(plan.state.params), program


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.parametrize("program", ["prefill", "decode"])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_the_tpu_compiler_takes_pages_whose_heads_are_on_one_device(program, kv_dtype):
    """It splits no kernel: not even over a mesh axis of one device."""
    sizes = {
        "policy__preset": "qwen2.5-1.5b",
        "rollout__tensor": 1,
        "rollout__swap_slots": 0,
        "rollout__cache": "pages",
    }
    correct = {"correction__kind": "tis_token", "learner__old_logprobs": "learner", "rollout__kv_dtype": kv_dtype}
    config = changed(scale_qwen2_5_3b, hardware="auto", **sizes, **correct)
    plan = make_plan(read_settings(complete(config, topology.devices("v5e:2x2"))), "v5e:2x2")
    found = estimate(compile_program(plan, program), clock=1.0, assumed={})
    assert found.kernels and not found.entry_copies and not found.exchanges


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.parametrize(("program", "tensor"), [("prefill", 4), ("decode", 1)])
def test_more_cache_needs_no_more_temporaries_on_a_tpu(program, tensor):
    """Weights in another layout and scores of a prefill do not depend on the number of slots; a copied cache would."""
    temporary, cache = [], []
    for slots in (32, 64):
        config = changed(scale_qwen2_5_3b, hardware="auto", rollout__tensor=tensor, rollout__slots=slots)
        plan = make_plan(read_settings(complete(config, topology.devices("v5e:2x2"))), "v5e:2x2")
        memory = compile_memory(plan, program)
        cache.append(device_bytes(plan.cache))
        temporary.append(memory.temp_size_in_bytes)
        assert memory.alias_size_in_bytes >= cache[-1]
    assert temporary[1] - temporary[0] < 0.1 * (cache[1] - cache[0])

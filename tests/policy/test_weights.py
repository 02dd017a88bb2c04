"""Weights in and out: equal to PyTorch, exact there and back, read by parts; a real checkpoint tells its story."""

import dataclasses
import functools
import json
import tracemalloc

import jax
import jax.numpy as jnp
import make_golden_logits as golden
import numpy as np
import pytest
import tiny
from checkpoints import check_equal, checkpoint, layout, read, tensors_of
from safetensors.numpy import load_file
from schedules import run_work
from stories import text_of, write_folder

from agentr1_jax.policy import weights
from agentr1_jax.policy.config import DecoderConfig, LoraConfig
from agentr1_jax.policy.params import init_decoder
from agentr1_jax.policy.weights import files, names
from agentr1_jax.rollout.config import EngineConfig, SamplingConfig
from agentr1_jax.rollout.device import ResponseRequest
from agentr1_jax.rollout.engine import Engine

TOLERANCE = 2e-5
CASES = golden.CASES


def our_logits(config, params):
    return tiny.full_logits(config, params, golden.sequences(), max(golden.LENGTHS), rows=2)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_stored_ones_of_pytorch(case, tmp_path):
    ours = our_logits(*read(checkpoint(tmp_path, case)))
    with np.load(golden.GOLDEN) as stored:
        assert np.abs(np.concatenate(ours)[:: golden.EVERY] - stored[case]).max() <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_pytorch_both_ways(case, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    model = golden.torch_model(CASES[case])
    model.save_pretrained(tmp_path / "theirs")
    theirs = golden.torch_logits(model)
    config, params = read(tmp_path / "theirs")
    assert config == weights.from_hf(CASES[case], "older form")
    ours = our_logits(config, params)
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) <= TOLERANCE

    weights.save(tmp_path / "ours", config, params, max_shard_bytes=20_000)
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    for a, b in zip(golden.torch_logits(back), theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").eos_token_id is None


@pytest.mark.parametrize("case", ["qwen2_untied", "llama3"])
def test_a_saved_policy_is_the_same_when_it_is_loaded(case, tmp_path):
    config, params = read(checkpoint(tmp_path / "in", case))
    weights.save(tmp_path / "one", config, params)
    weights.save(tmp_path / "many", config, params, max_shard_bytes=9_000)
    weights.save(tmp_path / "small", config, params, dtype="bfloat16")
    assert {p.name for p in (tmp_path / "one").iterdir()} == {"config.json", "model.safetensors"}
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 4 and all(sum(x.nbytes for x in load_file(s).values()) <= 9_000 for s in shards)
    index = json.loads((tmp_path / "many" / files.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    for folder in ("one", "many"):
        again, same = read(tmp_path / folder)
        assert again == config
        check_equal(same, params)
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    check_equal(read(tmp_path / "small", param_dtype="bfloat16")[1], halved)
    check_equal(read(tmp_path / "small")[1], jax.tree.map(lambda x: x.astype(jnp.float32), halved))
    assert json.loads((tmp_path / "small" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_stored_dtypes_are_cast(dtype, tmp_path):
    _, params = read(checkpoint(tmp_path, dtype=jnp.dtype(dtype)))
    exact = golden.weight("lm_head.weight", params["head"].shape[::-1]).T
    assert params["head"].dtype == jnp.float32
    np.testing.assert_array_equal(params["head"], exact.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("case", ["qwen2_tied", "llama3"])
def test_eight_devices_hold_what_one_holds_and_everything_is_read_once(case, tmp_path, monkeypatch):
    folder = checkpoint(tmp_path, case)
    config, one = read(folder)
    elements = count_reads(monkeypatch)
    _, eight = read(folder, layout(2, 2, 2))
    check_equal(one, eight)
    assert not eight["layers"]["gate"]["kernel"].is_fully_replicated
    assert elements == {name: np.prod(shape) for name, shape in tensors_of(config).items()}


def test_a_device_causes_only_its_own_part_to_be_read(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path, "qwen2_tied")
    config = weights.read_config(folder)
    elements = count_reads(monkeypatch)

    def first_only(shape, sharding, callback, dtype):
        index = next(iter(sharding.devices_indices_map(shape).values()))
        part = callback(index)
        assert part.shape == sharding.shard_shape(shape) and part.dtype == dtype
        return part

    monkeypatch.setattr(jax, "make_array_from_callback", first_only)
    weights.load(folder, config, layout(2, 2, 2))
    for name, shape in tensors_of(config).items():
        split = 4 if len(shape) == 2 else 2 if name.endswith("bias") else 1
        assert elements[name] * split == np.prod(shape), name


def count_reads(monkeypatch):
    """How many elements of each tensor are read from now on."""
    elements = {}
    open_folder = files.open_folder

    def counted(name, tensor, cuts):
        part = tensor.read(cuts)
        elements[name] = elements.get(name, 0) + part.size
        return part

    def opened(folder):
        return {
            name: dataclasses.replace(tensor, read=functools.partial(counted, name, tensor))
            for name, tensor in open_folder(folder).items()
        }

    monkeypatch.setattr(files, "open_folder", opened)
    return elements


def test_host_memory_stays_near_one_stacked_tensor(tmp_path, monkeypatch):
    """Of 96 layers in 50 files: beside finished arrays, never more than one parameter and one layer of it."""
    shape = DecoderConfig(vocab_size=512, width=64, layers=96, heads=4, kv_heads=4, head_dim=16, hidden=64, tied=False)
    params = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), names.parameter_shapes(shape))
    weights.save(tmp_path, shape, params, max_shard_bytes=200_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 40
    stacked = shape.layers * shape.width * shape.hidden * 4
    peaks = []
    make = jax.make_array_from_callback

    def measured(*args):
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        out = make(*args)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return out

    monkeypatch.setattr(jax, "make_array_from_callback", measured)
    tracemalloc.start()
    try:
        read(tmp_path)
    finally:
        tracemalloc.stop()
    assert len(peaks) == len(jax.tree.leaves(params))
    assert stacked <= max(peaks) <= 1.15 * stacked


def test_lora_weights_load_without_adapters(tmp_path):
    folder = checkpoint(tmp_path)
    _, plain = read(folder)
    config, params = read(folder, lora=LoraConfig(rank=2))
    check_equal(plain, params)
    shapes = jax.eval_shape(functools.partial(init_decoder, config), jax.random.key(0))
    with pytest.raises(ValueError, match=r"lora_a: merge the adapters first"):
        weights.save(tmp_path / "out", config, shapes)


STORY = " Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture(scope="module")
def stories(data_dir, tmp_path_factory):
    """Shape, parameters and tokenizer of the real checkpoint."""
    source, folder = data_dir / "weights" / "stories260K", tmp_path_factory.mktemp("stories") / "hf"
    write_folder(source / "stories260K.bin", folder)
    return *read(folder), source / "tok512.bin"


def test_stories_are_told_without_a_cache(stories):
    config, params, tokenizer = stories
    ids = [1]
    while len(text_of(tokenizer, ids[1:])) < len(STORY):
        ids.append(int(tiny.full_logits(config, params, [ids], 64, rows=1)[0][-1].argmax()))
    assert text_of(tokenizer, ids[1:]) == STORY


def test_stories_are_told_by_the_engine(stories):
    config, params, tokenizer = stories
    shapes = EngineConfig(
        slots=2,
        slot_tokens=64,
        decode_chunk=8,
        prefill_width=8,
        prefill_rows=(1,),
        attention_block=32,
        attention_group=1,
    )
    engine = Engine(config, shapes, tiny.mesh())

    async def story(prompt):
        lease = await engine.acquire()
        request = ResponseRequest(np.int32(prompt), 40, SamplingConfig(0.0), key=np.zeros(2, np.uint32))
        completion = await engine.generate(lease, request)
        engine.release(lease)
        return [*prompt, *completion.ids]

    (whole,) = run_work(engine, params, [story([1])])
    assert text_of(tokenizer, whole[1:]).startswith(STORY)
    (resumed,) = run_work(engine, params, [story(whole[:12])])
    assert resumed[: len(whole)] == whole

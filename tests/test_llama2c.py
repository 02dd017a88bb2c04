"""Checkpoints of llama2.c; the real one tells its story."""

import struct

import numpy as np
import pytest
import tiny
from checkpoints import check_equal, read

from agentr1_jax.rollout.config import EngineConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.sampling import Sampling

STORY = " Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def text_of(folder, ids):
    """What ids of its tok512.bin say: records of score (float32), length (int32), bytes."""
    stored = (folder / "tok512.bin").read_bytes()
    pieces, at = [], 4
    while at < len(stored):
        _, length = struct.unpack_from("<fi", stored, at)
        pieces.append(stored[at + 8 : at + 8 + length])
        at += 8 + length
    return b"".join(pieces[i] for i in ids).decode()


def test_stories_are_told_without_a_cache(data_dir):
    folder = data_dir / "weights" / "stories260K"
    config, params = read(folder)
    ids = [1]
    while len(text_of(folder, ids[1:])) < len(STORY):
        ids.append(int(tiny.full_logits(config, params, [ids], 64, rows=1)[0][-1].argmax()))
    assert text_of(folder, ids[1:]) == STORY


def test_stories_are_told_by_the_engine(data_dir):
    folder = data_dir / "weights" / "stories260K"
    config, params = read(folder)
    shapes = EngineConfig(
        slots=2, length=64, decode_chunk=8, prefill_width=8, prefill_rows=(1,), attention_block=32, attention_slots=1
    )
    engine = Engine(config, shapes, tiny.mesh())

    async def story(prompt):
        ticket = await engine.acquire()
        told = await engine.generate(
            ticket, np.array(prompt), 40, sampling=Sampling(0.0), key=np.zeros(2, np.uint32), stop=[]
        )
        engine.release(ticket)
        return [*prompt, *told.ids]

    (whole,) = engine.run(params, [story([1])])
    assert text_of(folder, whole[1:]).startswith(STORY)
    (resumed,) = engine.run(params, [story(whole[:12])])
    assert resumed[: len(whole)] == whole


def llama2c_file(path, *, vocab=-8, extra=b""):
    """A llama2.c checkpoint of one layer, 2 heads of 4 and a head of its own."""
    counts = [64, 8, 64, 32, 32, 64, 8, 96, 96, 96, 8, 5 * 4, 64 if vocab < 0 else 0]
    numbers = np.arange(sum(counts), dtype="<f4")
    path.write_bytes(struct.pack("<7i", 8, 12, 1, 2, 1, vocab, 5) + numbers.tobytes() + extra)
    return np.split(numbers, np.cumsum(counts))


def test_llama2c_tensors_are_where_its_format_says(tmp_path):
    parts = llama2c_file(tmp_path / "model.bin")
    (tmp_path / "tok8.bin").write_bytes(b"x")
    config, params = read(tmp_path)
    check_equal(params, read(tmp_path / "model.bin")[1])
    assert (config.layers, config.heads, config.kv_heads, config.head_dim, config.tied) == (1, 2, 1, 4, False)
    layers = params["layers"]
    np.testing.assert_array_equal(params["embed"].reshape(-1), parts[0])
    np.testing.assert_array_equal(layers["gate"]["kernel"][0].T.reshape(-1), parts[7])
    np.testing.assert_array_equal(layers["down"]["kernel"][0].T.reshape(-1), parts[8])
    np.testing.assert_array_equal(params["head"].T.reshape(-1), parts[12])
    # Row 2i of a head there is row i here, row 2i + 1 there is row i + dim/2 here.
    np.testing.assert_array_equal(layers["key"]["kernel"][0, :, 0].T, parts[3].reshape(4, 8)[[0, 2, 1, 3]])
    np.testing.assert_array_equal(layers["value"]["kernel"][0, :, 0].T, parts[4].reshape(4, 8))


def test_bad_llama2c_files_are_named(tmp_path):
    file = tmp_path / "model.bin"
    llama2c_file(file, extra=b"1234")
    with pytest.raises(ValueError, match=r"model.bin: has \d+ bytes where its header asks for \d+"):
        read(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.bin: .* truncated"):
        read(tmp_path)
    file.write_bytes(b"24ka" + bytes(300))
    with pytest.raises(ValueError, match=r"model.bin: not version 0"):
        read(tmp_path)
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"model.bin: not a llama2.c checkpoint"):
        read(tmp_path)

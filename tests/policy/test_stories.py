"""The real checkpoint tells its story, without a cache and by the engine."""

import numpy as np
import pytest
import tiny
from checkpoints import read
from schedules import run_work
from stories import text_of, write_folder

from agentr1_jax.rollout.config import EngineConfig, SamplingConfig
from agentr1_jax.rollout.device import ResponseRequest
from agentr1_jax.rollout.engine import Engine

STORY = " Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture(scope="module")
def checkpoint(data_dir, tmp_path_factory):
    """Shape, parameters and tokenizer of the real checkpoint."""
    source, folder = data_dir / "weights" / "stories260K", tmp_path_factory.mktemp("stories") / "hf"
    write_folder(source / "stories260K.bin", folder)
    return *read(folder), source / "tok512.bin"


def test_stories_are_told_without_a_cache(checkpoint):
    config, params, tokenizer = checkpoint
    ids = [1]
    while len(text_of(tokenizer, ids[1:])) < len(STORY):
        ids.append(int(tiny.full_logits(config, params, [ids], 64, rows=1)[0][-1].argmax()))
    assert text_of(tokenizer, ids[1:]) == STORY


def test_stories_are_told_by_the_engine(checkpoint):
    config, params, tokenizer = checkpoint
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

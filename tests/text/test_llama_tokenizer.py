"""A tokenizer in the manner of Llama 3, made here: several stop ids, bare tool calls, tags unlike the common ones."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from checkpoints import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from letters import BUDGET, ROW, ScriptedEnv

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Completion, Identity, ScriptedSession, Session
from agentr1_jax.text.call_formats import hermes, make_call_format
from agentr1_jax.text.call_formats.hermes import COMMON, CallTags, call_tags
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.tokenizer import load_tokenizer
from agentr1_jax.text.tool_calls import parse_tool_calls, render_call
from agentr1_jax.trajectory import Budget

ADDED = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
HEADER = "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
FUNCTION = '{"name": "{{ f.name }}", "%s": {{ f.arguments | tojson }}}'
BARE = FUNCTION % "parameters"
BRACKETS = f"[CALL]{FUNCTION % 'arguments'}[/CALL]"


def template(call: str) -> str:
    """A chat template that writes a tool call as `call`, of a function `f`."""
    call = "{% set f = m.tool_calls[0].function %}" + call
    content = "{% if m.tool_calls %}" + call + "{% else %}{{ m.content }}{% endif %}"
    # Jinja drops a newline at the very end of a template, but not within a string.
    ask = "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    return f"<|begin_of_text|>{{% for m in messages %}}{HEADER}{content}<|eot_id|>{{% endfor %}}{ask}"


def write(folder, call=BARE, eos_token="<|eot_id|>", generation=None, added=ADDED):
    """Writes a tokenizer; `generation` is the text of its generation config."""
    write_tokenizer(folder, added, eos_token=eos_token, chat_template=template(call))
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    return str(folder)


FIRST = 256 + 5
"""Id of the first added token: bytes and merges come before it."""
END, EOM, EOT = (FIRST + ADDED.index(token) for token in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    generation = json.dumps({"eos_token_id": [END, EOM, EOT]})
    return load_tokenizer(write(tmp_path_factory.mktemp("llama"), BRACKETS, generation=generation))


@pytest.mark.parametrize(
    ("eos_token", "generation", "expected"),
    [
        ("<|eot_id|>", None, (EOT,)),
        ("<|eot_id|>", f'{{"eos_token_id": {EOT}}}', (EOT,)),
        ("<|eot_id|>", f'{{"eos_token_id": [{END}, {EOM}, {EOT}]}}', (EOT, END, EOM)),
        # A base model's tokenizer with a chat template: what ends a text does not end a turn.
        ("<|end_of_text|>", f'{{"eos_token_id": [{END}, {EOT}]}}', (EOT, END)),
    ],
)
def test_stop_ids_come_from_the_tokenizer_and_the_generation_config(tmp_path, eos_token, generation, expected):
    tokenizer = load_tokenizer(write(tmp_path, eos_token=eos_token, generation=generation))
    assert tokenizer.stop_ids == expected and tokenizer.stop_id == EOT
    assert chat_format(tokenizer).render_observation("x", "tool", False)[0] == EOT


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ('{"eos_token_id": [5]}', r"generation_config\.json: eos_token_id \[5\] are no added tokens of this tokenizer"),
        ('{"eos_token_id": ["<|eot_id|>"]}', r"generation_config\.json: not a generation config \(.*repair or remove"),
        ("{", "not a generation config"),
    ],
)
def test_a_generation_config_of_another_model_is_refused(tmp_path, generation, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write(tmp_path, generation=generation))


class Speaker(Session):
    """Says prepared ids, and keeps the stop sequences that it was given."""

    def __init__(self, responses):
        super().__init__(Identity("u", 0, 0, "letters", 0))
        self.responses, self.stops = iter(responses), []

    async def respond(self, prompt_ids, max_tokens, stop):
        self.stops.append(stop)
        ids = np.asarray(next(self.responses), np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), "stop")


def loop(tokenizer, env, call_format=None):
    limits = Budget(**{**BUDGET, "response_tokens": 100, "context_tokens": 1000, "trajectory_tokens": 1000})
    call_format = call_format or hermes.call_format()
    return EnvLoop(
        lambda: env, tokenizer, chat_format(tokenizer, call_format), context_rule("append"), limits, call_format
    )


def test_a_response_may_end_with_any_stop_id_and_keeps_it(llama):
    env = ScriptedEnv(["seen"] * 3, end=3)
    said = [[*llama.encode_data("the thing"), stop] for stop in (EOM, END, EOT)]
    session = Speaker(said)
    asyncio.run(loop(llama, env).run(session, ROW))
    assert [list(map(tuple, stop)) for stop in session.stops] == [[(EOT,), (END,), (EOM,)]] * 3
    assert [a.text for a in env.actions] == ["the thing"] * 3 and not any(a.truncated for a in env.actions)
    steps = session.trajectory().steps
    assert [s.response_ids.tolist() for s in steps] == said
    # Its turn is over: no second end-of-turn token is put behind the one that was sampled.
    between = steps[1].prompt_ids[len(steps[0].prompt_ids) + len(said[0]) :]
    assert llama.decode(between) == (
        "<|start_header_id|>ipython<|end_header_id|>\n\nseen<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_tags_are_those_that_the_template_writes(llama, tmp_path):
    assert call_tags(llama) == CallTags("[CALL]", "[/CALL]")
    spaced = f"\n<|call|>\n{FUNCTION % 'arguments'}\n<|/call|>"
    added = (*ADDED, "<|call|>", "<|/call|>")
    tokenizer = load_tokenizer(write(tmp_path, call=spaced, added=added))
    assert call_tags(tokenizer) == CallTags("<|call|>", "<|/call|>")


def test_tags_of_a_template_that_writes_no_calls_are_a_pair_of_added_tokens(tmp_path, small):
    added = (*ADDED, "<toolcall>", "</toolcall>")
    for call in ("", "{{ raise_exception('no tools') }}"):
        tokenizer = load_tokenizer(write(tmp_path, call=call, added=added))
        assert call_tags(tokenizer) == CallTags("<toolcall>", "</toolcall>")
    assert call_tags(small) == COMMON


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "minimind-6400"])
def test_tags_of_real_tokenizers_are_added_tokens(load, name):
    tokenizer = load(name)
    tags = call_tags(tokenizer)
    assert tags == COMMON and {tags.open, tags.close} <= tokenizer.added.keys()


@pytest.mark.parametrize(
    ("call", "added", "message"),
    [
        (BARE, (), r"writes calls as '\{\"name\": .*\"parameters\": .*tags of their own.*chat_template\.jinja"),
        (f"[CALLS][{FUNCTION % 'arguments'}]", (), r"writes calls as '\[CALLS\]\[\{"),
        ("", (), "its chat template writes no tool calls, and tools need"),
        ("", ("<tool_call>",), "its chat template writes no tool calls"),
    ],
)
def test_a_tokenizer_without_tags_is_refused_for_tools(tmp_path, call, added, message):
    with pytest.raises(ValueError, match=f"{tmp_path.name}.*{message}"):
        call_tags(load_tokenizer(write(tmp_path, call=call, added=(*ADDED, *added))))


@given(
    st.lists(
        st.sampled_from(["[CALL]", "[/CALL]", "<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', "x"])
    ).map("".join)
)
def test_only_a_policys_own_tags_make_a_call(text):
    parse = hermes.call_format(CallTags("[CALL]", "[/CALL]")).parse
    # The same text with unlike tags in both places says what the calls are.
    other = text.replace("<", "(").replace("[CALL]", COMMON.open).replace("[/CALL]", COMMON.close)
    assert len(parse_tool_calls(parse(text, ()))) == len(parse_tool_calls(other))
    assert hermes.call_format().parse(text, ()) == text


def test_an_expert_speaks_with_the_policys_tags_and_is_understood(llama):
    env, call_format = ScriptedEnv(["seen"], end=1), make_call_format("auto", llama)
    call = render_call("search", {"query": "the thing"})
    session = ScriptedSession(Identity("u", 0, 0, "letters", 0), lambda observation: call, llama, call_format)
    asyncio.run(loop(llama, env, call_format).run(session, ROW))
    (step,) = session.trajectory().steps
    assert llama.decode(step.response_ids) == f"{call_format.render(call)}<|eot_id|>"
    assert "[CALL]" in llama.decode(step.response_ids) and env.actions[0].text == call

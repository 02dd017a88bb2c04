"""Tokenizer adapters: round trips, data that never becomes an added token, training, and clear errors."""

from __future__ import annotations

import json
import threading
import unicodedata
from types import SimpleNamespace

import huggingface_hub
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.text import sentencepiece as sp
from agentr1_jax.text.tokenizer import load_tokenizer

HF_NAMES = ("qwen2.5", "qwen3", "minimind-6400")
NAMES = ("Corvin Hale", "Mirabel Ostrander", "Tavish Quill", "Zephyrine Voss")
YEARS = range(1950, 1970)
TEXTS = [
    f'- {a}: {a} was born in {year}.\nWho is {b}?\n<tool_call>{{"name": "search", "arguments": {{"query": "films of '
    f'{b}"}}}}</tool_call>\n<answer> {a} </answer>'
    for a in NAMES
    for b in NAMES
    for year in YEARS
]


def hostile(tokenizer):
    """Texts assembled of added tokens, fragments of them and noise."""
    added = sorted(tokenizer.added)
    fragments = sorted({s[:n] for s in added for n in (1, 2, len(s) - 1)} | {s[n:] for s in added for n in (1, 2)})
    pieces = st.one_of(st.sampled_from(added), st.sampled_from(fragments), st.text(max_size=5))
    return st.lists(pieces, max_size=8).map("".join)


AWKWARD = ["", "  two  spaces ", "a\u2581b\u2581", "\n\n x\r\n\t\0", "<0x0A><unk><s>", "🦊 é ﬁ"]


@pytest.mark.parametrize("name", (*HF_NAMES, "small"))
@settings(max_examples=50, deadline=None)
@given(text=st.text() | st.sampled_from(AWKWARD))
def test_round_trip_is_exact(load, name, text):
    text = text if name == "small" else unicodedata.normalize("NFC", text)
    tokenizer = load(name)
    assert tokenizer.decode(tokenizer.encode_data(text)) == text


@pytest.mark.parametrize("name", (*HF_NAMES, "small"))
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_data_text_never_becomes_an_added_token(load, name, data):
    tokenizer = load(name)
    text = unicodedata.normalize("NFC", data.draw(hostile(tokenizer)))
    ids = tokenizer.encode_data(text)
    assert not set(ids) & set(tokenizer.added.values())
    assert tokenizer.decode(ids) == text
    template_ids = tokenizer.encode_template(text)
    assert tokenizer.decode(template_ids) == text
    assert bool(set(template_ids) & set(tokenizer.added.values())) == any(s in text for s in tokenizer.added)


@pytest.mark.parametrize("name", (*HF_NAMES, "small"))
def test_ids_lie_below_the_vocabulary_size(load, name):
    tokenizer = load(name)
    assert max(tokenizer.added.values()) < tokenizer.vocab_size
    assert tokenizer.stop_id in tokenizer.added.values()
    assert 0 <= tokenizer.pad_id < tokenizer.vocab_size
    assert all(tokenizer.encode_template(string) == [i] for string, i in tokenizer.added.items())
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.stop_id]) == tokenizer.decode([tokenizer.stop_id])


@pytest.mark.parametrize("name", HF_NAMES)
def test_template_text_is_encoded_as_by_transformers(load, name):
    text = '<|im_start|>assistant\nI look.\n\n<tool_call>\n{"name": "search"}\n</tool_call><|im_end|>\n<|im_start|>'
    assert load(name).encode_template(text) == load(name)._hf.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", HF_NAMES)
def test_text_beside_an_added_token_is_encoded_as_ever(load, name):
    tokenizer = load(name)
    ids = tokenizer.encode_data("The capital city<tool_call>of northern France")
    for words in ("The capital city", "of northern France"):
        part = tokenizer.encode_data(words)
        assert any(ids[i : i + len(part)] == part for i in range(len(ids)))
        assert len(part) < len(words) / 2


def test_lone_surrogates_are_replaced_not_fatal(load, small):
    text = json.loads(r'"a\ud800b"')
    for tokenizer in (load("qwen2.5"), small):
        assert tokenizer.decode(tokenizer.encode_data(text)) == "a?b"


def test_frequent_words_are_one_piece_whatever_follows(small):
    names = [word for name in NAMES for word in name.split()]
    for word in [*names, *map(str, YEARS)]:
        [piece] = small.encode_data(f" {word}")
        for context in (f" {word}.", f' {word}"}}}}', f" {word}?\n", f" {word} </answer>", f" {word}: {word}"):
            assert small.encode_data(context)[0] == piece, (word, context)
    for word in ("system", "user", "assistant"):
        assert len(small.encode_data(word)) == 1
    assert [small.decode([i]) for i in small.encode_data(' Corvin."}}\n')] == [" Corvin", ".", '"}}', "\n"]


def test_syntax_of_a_call_is_short(small):
    call = '<tool_call>{"name": "search", "arguments": {"query": "films of Tavish Quill"}}</tool_call>'
    pieces = [small.decode([i]) for i in small.encode_template(call)]
    assert pieces[:2] == ["<tool_call>", '{"name": "']
    assert pieces[-4:] == [" Tavish", " Quill", '"}}', "</tool_call>"]
    assert len(pieces) <= 12


def test_training_is_deterministic_and_keeps_to_the_size(tmp_path):
    for name in ("a.model", "b.model"):
        sp.train_sentencepiece(iter(TEXTS), tmp_path / "sub" / name, vocab_size=500)
    assert (tmp_path / "sub/a.model").read_bytes() == (tmp_path / "sub/b.model").read_bytes()
    assert load_tokenizer(str(tmp_path / "sub/a.model")).vocab_size <= 500


def test_training_reports_what_cannot_work(tmp_path):
    with pytest.raises(ValueError, match=r"m\.model: a vocab_size of 300 has no room .* \d+ pieces"):
        sp.train_sentencepiece(TEXTS, tmp_path / "m.model", vocab_size=300)
    with pytest.raises(ValueError, match="no texts"):
        sp.train_sentencepiece([], tmp_path / "m.model", vocab_size=500)
    assert not list(tmp_path.iterdir())


def test_missing_files_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.model: no such SentencePiece model"):
        load_tokenizer(str(tmp_path / "nothing.model"))
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such tokenizer; give a folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "noise.model").write_bytes(b"noise")
    with pytest.raises(ValueError, match=r"noise\.model: not a SentencePiece model"):
        load_tokenizer(str(tmp_path / "noise.model"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no Hugging Face tokenizer could be loaded"):
        load_tokenizer(str(tmp_path / "empty"))


@pytest.mark.parametrize("spec", ["{}/qwen", "./qwen", "{}", "/no/such/folder"])
def test_a_mistyped_path_is_not_asked_of_the_hub(monkeypatch, tmp_path, spec):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises((FileNotFoundError, ValueError), match=r"no such tokenizer; give a folder|could be loaded"):
        load_tokenizer(spec.format("here"))


def test_the_hub_is_asked_once_and_named_in_the_error(monkeypatch, data_dir):
    asked = []

    def offline(hub_id, **kwargs):
        asked.append(hub_id)
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"qwn/qwn: no such folder here, and .*no connection\); correct"):
        load_tokenizer("qwn/qwn")
    assert asked == ["qwn/qwn"]
    folder = str(data_dir / "tokenizers/minimind-6400")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **kwargs: folder)
    assert load_tokenizer("owner/name").name == "owner/name"


def test_a_plain_sentencepiece_model_lacks_what_a_chat_needs(data_dir):
    with pytest.raises(ValueError, match=r"tokenizer\.model: this model lacks <\|im_start\|>, <\|im_end\|>.*train one"):
        load_tokenizer(str(data_dir / "tokenizers/sp-c4-32k"))


@pytest.mark.parametrize(("dropped", "named"), [("chat_template", "a chat template"), ("eos_token", "ends a turn")])
def test_an_incomplete_hf_tokenizer_names_what_is_missing(data_dir, tmp_path, dropped, named):
    source = data_dir / "tokenizers/minimind-6400"
    config = json.loads((source / "tokenizer_config.json").read_text())
    del config[dropped]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=f"{tmp_path.name}: this tokenizer lacks [^;]*{named}[^;]*; take"):
        load_tokenizer(str(tmp_path))


def test_a_model_that_knows_an_added_token_as_a_word_spells_it(tmp_path):
    vocabulary = [("<unk>", 0.0), *((c, -2.0) for c in "<>ad b"), ("<ad>", -0.1)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=0))
    backend.add_special_tokens(["<ad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<ad>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode_data("a <ad> b")
    assert tokenizer.added["<ad>"] not in ids
    assert tokenizer.decode(ids).replace(" ", "") == "a<ad>b"


@pytest.mark.parametrize("name", ["qwen2.5", "small"])
def test_other_threads_run_while_a_long_text_is_tokenised(load, name):
    tokenizer, running, ticks = load(name), threading.Event(), []

    def tick():
        while not running.wait(0.001):
            ticks.append(None)

    ticking = threading.Thread(target=tick)
    ticking.start()
    tokenizer.decode(tokenizer.encode_data("Ostra is a city.\n" * 20_000))
    running.set()
    ticking.join()
    assert len(ticks) > 10


def test_sentencepiece_gets_one_text_at_a_time(small, monkeypatch):
    """For a list it starts threads."""
    model, given_ = small._model, []
    monkeypatch.setattr(small, "_model", SimpleNamespace(encode=lambda text: given_.append(text) or model.encode(text)))
    ids = small.encode_data(f"Who is{sp.SPACE}Corvin Hale?")
    monkeypatch.undo()
    assert given_ == ["Who is", "Corvin Hale?"] and ids == small.encode_data(f"Who is{sp.SPACE}Corvin Hale?")

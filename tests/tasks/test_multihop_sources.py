"""Question files of every format: what they become, and what is said of damaged ones."""

from __future__ import annotations

import asyncio
import builtins
import gzip
import json

import hypothesis
import hypothesis.strategies as st
import pytest
from plays import multihop_task
from question_records import PARAGRAPHS, hotpot, musique, wiki

from agentr1_jax.tasks import qa
from agentr1_jax.tasks.multihop.sources import context_passage, read_aliases, read_source
from agentr1_jax.tools import records
from agentr1_jax.tools.search import read_corpus


def verl(i=0, truth="Ohio", extra=None, **changes):
    record = {
        "data_source": "hotpotqa/hotpot_qa",
        "prompt": [
            {"role": "system", "content": "Question: not this one"},
            {"role": "user", "content": f"Think. Question: Where is {i}?\nThe answer MUST BE put in <answer>."},
        ],
        "ability": "multihop_qa",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": i, **(extra or {})},
    }
    return {**record, **changes}


def house(i=0, **changes):
    record = {
        "id": f"q{i}",
        "dataset": "hotpotqa",
        "question": f"Where is {i}?",
        "answer": "Ohio",
        "answer_aliases": ["OH"],
        "type": None,
        "gold_ids": ["b", "a"],
    }
    return {**record, **changes}


def save(path, records, *, array=False, zipped=False):
    text = json.dumps(records, indent=1) if array else "".join(f"{json.dumps(record)}\n" for record in records)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


@pytest.mark.parametrize(("array", "zipped"), [(False, True), (True, False)])
def test_json_and_json_lines_packed_or_not(tmp_path, array, zipped):
    path = save(tmp_path / "questions.any", [house(0), house(1, hops=4, type="bridge")], array=array, zipped=zipped)
    questions = read_source(path).questions
    assert questions[1].row == {
        "id": "q1",
        "dataset": "hotpotqa",
        "kind": "bridge",
        "hops": 4,
        "question": "Where is 1?",
        "answers": ["Ohio", "OH"],
        "gold_ids": ["b", "a"],
    }
    assert (questions[0].row["kind"], questions[0].row["hops"]) == ("unknown", 2)
    assert questions[1].where == f"{path}, {'record' if array else 'line'} 2"


def test_the_original_hotpotqa(tmp_path):
    [question] = read_source(save(tmp_path / "hotpot_train_v1.1.json", [hotpot()], array=True)).questions
    passages = [context_passage(title, " ".join(sentences)) for title, sentences in PARAGRAPHS]
    assert len({p.id for p in passages}) == 3 and passages[0] == context_passage(" Jaws", passages[0].text + " \n")
    assert [(p.title, p.text) for p in question.passages][0] == ("Jaws", "Jaws is a film. Steven directed it.")
    assert list(question.passages) == passages
    row = question.row
    assert (row["id"], row["dataset"], row["kind"], row["hops"]) == ("h0", "hotpotqa", "bridge", 2)
    assert row["gold_ids"] == [passages[1].id, passages[0].id] and row["answers"] == ["Ohio"]
    assert "evidences" not in row


def test_the_original_2wikimultihopqa_with_aliases(tmp_path):
    path = save(tmp_path / "dev.json", [wiki(0, answer_id="Q1397"), wiki(1, answer_id="Q9"), wiki(2)], array=True)
    assert [q.row["answers"] for q in read_source(path).questions] == [["Ohio"]] * 3
    save(tmp_path / "id_aliases.json", [{"Q_id": "Q1397", "aliases": ["State of Ohio", "OH"], "demonyms": ["Ohioan"]}])
    rows = [q.row for q in read_source(path).questions]
    assert [row["answers"] for row in rows] == [["Ohio", "State of Ohio", "OH"], ["Ohio"], ["Ohio"]]
    assert rows[0]["dataset"] == "2wikimultihopqa" and rows[0]["evidences"] == [["Jaws", "director", "Steven"]]
    save(tmp_path / "id_aliases.json", [{"Q_id": "Q1397", "aliases": []}, {"Q_id": "Q9"}])
    with pytest.raises(ValueError, match=r"id_aliases\.json, line 2: not aliases with Q_id and aliases"):
        read_source(path)


def test_the_original_musique(tmp_path):
    records = [musique(), musique(1, answerable=False), musique(2, answerable=False)]
    source = read_source(save(tmp_path / "musique_full_v1.0_train.jsonl", records))
    assert source.counts == {"unanswerable": 2}
    [question] = source.questions
    by_title = {p.title: p.id for p in question.passages}
    # In the order of the reasoning: film, then person.
    assert question.row["gold_ids"] == [by_title["Jaws"], by_title["Steven"]]
    assert question.row["answers"] == ["Ohio", "State of Ohio"]
    assert (question.row["kind"], question.row["hops"], question.row["dataset"]) == ("2hop", 2, "musique")
    with pytest.raises(ValueError, match=r"no question in it \(unanswerable: 1\)"):
        read_source(save(tmp_path / "none.jsonl", [musique(answerable=False)]))


def test_missing_gold_passages_are_counted_not_made_up(tmp_path):
    elsewhere = hotpot(1, supporting_facts=[["Jaws", 0], ["Elsewhere", 0]])
    empty = hotpot(2, context=[["Jaws", []], *PARAGRAPHS[1:]])
    source = read_source(save(tmp_path / "dev.json", [hotpot(0), elsewhere, empty], array=True))
    assert source.counts == {"gold_unknown": 2, "empty_passages": 1}
    assert [len(q.row["gold_ids"]) for q in source.questions] == [2, 0, 0]
    assert [q.row["hops"] for q in source.questions] == [2, 2, 2]
    assert qa.metrics(source.questions[1].row, []) == {"em": 0, "f1": 0, "tool_calls": 0}


@pytest.mark.parametrize(
    ("truth", "extra", "answers"),
    [
        (["Ohio", "OH"], {}, ["Ohio", "OH"]),
        ({"target": ["Ohio", "OH", "Ohio"]}, {}, ["Ohio", "OH"]),
        ("Ohio", {"answers": ["Ohio", "State of Ohio"]}, ["Ohio", "State of Ohio"]),
    ],
)
def test_rows_of_verl(tmp_path, truth, extra, answers):
    [question] = read_source(save(tmp_path / "rows.jsonl", [verl(3, truth, extra)])).questions
    assert question.row == {
        "id": "hotpotqa/hotpot_qa/train/3",
        "dataset": "hotpotqa",
        "kind": "unknown",
        "hops": 0,
        "question": "Where is 3?",
        "answers": answers,
        "gold_ids": [],
    }
    assert question.split == "train"


def test_where_the_question_of_a_verl_row_stands(tmp_path):
    plain = verl(0, prompt=[{"role": "user", "content": " Where is it? "}])
    column = verl(1, question="In its column?")
    told = verl(2, extra={"question": "In extra_info?", "type": "bridge", "question_id": "x1"})
    other = verl(3, data_source="nq", extra={"split": "test"})
    rows = [q.row for q in read_source(save(tmp_path / "rows.jsonl", [plain, column, told, other])).questions]
    assert [row["question"] for row in rows] == ["Where is it?", "In its column?", "In extra_info?", "Where is 3?"]
    assert rows[2]["id"] == "hotpotqa/hotpot_qa/x1" and rows[2]["kind"] == "bridge" and rows[3]["dataset"] == "nq"


def test_parquet_gives_the_same_rows_as_json_lines(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, truth in (("agent", "Ohio"), ("search", {"target": ["Ohio", "OH"]})):
        records = [verl(i, truth, {"gold_ids": ["b", "a"][:i]}) for i in range(3)]
        parquet.write_table(pa.Table.from_pylist(records), tmp_path / f"{name}.parquet")
        read = read_source(tmp_path / f"{name}.parquet")
        assert [q.row for q in read.questions] == [q.row for q in read_source(save(tmp_path / "x", records)).questions]
        assert [q.row["gold_ids"] for q in read.questions] == [[], ["b"], ["b", "a"]]
        assert read.counts == {"gold_unknown": 1} and read.questions[2].where.endswith(f"{name}.parquet, row 3")


def test_damaged_parquet(tmp_path, monkeypatch):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([verl(0), verl(1, truth="")]), path)
    with pytest.raises(ValueError, match=r"rows\.parquet, row 2: not a question"):
        read_source(path)
    parquet.write_table(pa.Table.from_pylist([{"text": "x"}]), path)
    with pytest.raises(ValueError, match="it has the columns text, not those of verl: data_source, prompt"):
        read_source(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"rows\.parquet, row 1: not readable"):
        read_source(path)
    plain_import = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ValueError, match=r"needs pyarrow; pip install 'agentr1_jax\[parquet\]'"):
        read_source(path)


DAMAGES = {
    "no answer": hotpot(1, answer=""),
    "a test file": {key: value for key, value in hotpot(1).items() if key != "answer"},
    "no answer of musique": musique(answer=None),
    "a context of numbers": hotpot(1, context=[["a", [1]]]),
    "a title of numbers": hotpot(1, context=[[1, ["a"]]]),
    "a question of numbers": hotpot(1, question=3),
    "an empty question": house(1, question=" "),
    "an alias of numbers": house(1, answer_aliases=[1]),
    "gold ids of numbers": house(1, gold_ids=[1]),
    "gold ids in a string": house(1, gold_ids="ab"),
    "half a surrogate": house(1, answer="\ud800"),
    "no prompt": {key: value for key, value in verl(1).items() if key != "prompt"},
    "a prompt of nobody": verl(1, prompt=[]),
    "no truth": verl(1, truth=None),
    "no id": verl(1, extra={"index": None}),
    "a source of numbers": verl(1, data_source=1),
    "null": None,
    "a list": [],
    "twice the same": house(0),
    "evidences of two": hotpot(1, evidences=[["a", "b"]]),
    "evidences of numbers": hotpot(1, evidences=[["a", "b", 3]]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_named(tmp_path, damage):
    path = save(tmp_path / "questions.json", [house(0), damage])
    with pytest.raises(ValueError, match=r"questions\.json, line 2: not a question \(\w+Error: "):
        read_source(path)


@pytest.mark.parametrize("cut", [b'{"id": 1', b"\xff\xfe", b"{}{}", b"nonsense"])
def test_a_damaged_line_is_named(tmp_path, cut):
    path = save(tmp_path / "questions.jsonl", [house(0), house(1)])
    path.write_bytes(path.read_bytes() + cut)
    with pytest.raises(ValueError, match=r"questions\.jsonl, line 3: not a question"):
        read_source(path)


def test_a_truncated_gzip_is_named(tmp_path):
    path = save(tmp_path / "questions.jsonl.gz", [house(i) for i in range(300)], zipped=True)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"questions\.jsonl\.gz, line \d+: not a question \(EOFError"):
        read_source(path)


def test_a_cut_array_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_CHUNK", 64)
    path = save(tmp_path / "questions.json", [hotpot(i) for i in range(3)], array=True)
    assert [q.row["id"] for q in read_source(path).questions] == ["h0", "h1", "h2"]
    whole = path.read_bytes()
    for length in (len(whole) - 2, len(whole) * 2 // 3 + 20):
        path.write_bytes(whole[:length])
        with pytest.raises(
            ValueError, match=rf"questions\.json, record {4 if length > 0.9 * len(whole) else 3}: not a"
        ):
            read_source(path)
    monkeypatch.setattr(records, "_MOST_OF_A_RECORD", 200)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"questions\.json, record 1: not a question"):
        read_source(path)


@pytest.mark.parametrize(
    ("array", "record"),
    [
        ("[{0}][{1}]", 2),
        ("[{0}] garbage {{", 2),
        ("[{0} {1},,,]", 2),
        ("[{0},,{1}]", 2),
        ("[{0},]", 2),
        ("[,{0}]", 1),
        ("[{0};{1}]", 2),
        ("[{0}", 2),
        ("[", 1),
        ("[{0}]\xff", 1),
    ],
)
def test_a_damaged_array_is_named(tmp_path, monkeypatch, array, record):
    monkeypatch.setattr(records, "_CHUNK", 1)
    path = tmp_path / "questions.json"
    path.write_bytes(array.format(json.dumps(house(0)), json.dumps(house(1))).encode("latin-1"))
    with pytest.raises(ValueError, match=rf"questions\.json, record {record}: not a question \("):
        read_source(path)


@pytest.mark.parametrize(
    "form", ["{0}\n{1}\n", "\n{0}\r\n\n{1}\n\n", " [ {0}\t,\r\n{1} ] \n ", "[{0},{1}]", "\ufeff{0}\n{1}"]
)
def test_every_file_of_records_is_read_alike(tmp_path, form):
    """Questions, passages and aliases: blank lines, a byte order mark, an array."""
    path = tmp_path / "records.json"
    for make, ids in (
        (house, lambda: [question.row["id"] for question in read_source(path).questions]),
        (lambda i: {"id": f"q{i}", "title": "", "text": "x"}, lambda: [passage.id for passage in read_corpus(path)]),
        (lambda i: {"Q_id": f"q{i}", "aliases": []}, lambda: list(read_aliases(path))),
    ):
        path.write_bytes(form.format(json.dumps(make(0)), json.dumps(make(1))).encode())
        assert ids() == ["q0", "q1"]


@pytest.mark.parametrize(
    "damage", ["[" * 100_000, '{"a": ' * 100_000, '{"id": "\\ud800", "title": "", "text": "x"}', "\x00"]
)
def test_every_reader_names_a_damaged_line(tmp_path, damage):
    path = tmp_path / "lines.json"
    path.write_text(f"\n{damage}\n")
    for read in (read_source, read_corpus, read_aliases):
        with pytest.raises(ValueError, match=r"lines\.json, (line 2|record 1): not "):
            read(path)


def test_passages_of_equal_title_and_text_have_one_id(tmp_path):
    lines = [{"id": i, "title": "Steven", "text": text} for i, text in (("c1", "Born in  Ohio."), ("c2", "Died."))]
    first = save(tmp_path / "first.jsonl", lines)
    twin = save(tmp_path / "twin.jsonl", [{"id": "d1", "title": "Steven", "text": "Born in Ohio."}])
    train = save(tmp_path / "train.jsonl", [house(0, gold_ids=["d1", "c2"]), house(1, gold_ids=["d1", "c1"])])
    dev = save(tmp_path / "dev.jsonl", [house(5, gold_ids=["c1"])])
    task = multihop_task("", files={"train": [train], "eval": [dev], "corpus": [first, twin]})
    assert [p.id for p in task.corpus] == ["c1", "c2", "c1"]
    rows = {task.row("train", i)["id"]: task.row("train", i)["gold_ids"] for i in range(2)}
    assert rows == {"q0": ["c1", "c2"], "q1": ["c1"]} and task.row("eval", 0)["gold_ids"] == ["c1"]
    assert asyncio.run(task.search.execute({"query": "born ohio"})).data["ids"] == ["c1", "c1"]


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl: no such question file"):
        read_source(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="empty: no question in it; choose another file"):
        read_source(save(tmp_path / "empty", []))


@hypothesis.given(st.binary(max_size=60), st.integers(0, 200))
def test_whatever_the_bytes_are_the_place_is_named(tmp_path_factory, noise, where):
    folder = tmp_path_factory.getbasetemp() / "noise"
    folder.mkdir(exist_ok=True)
    path = save(folder / "q.jsonl", [house(0), house(1)])
    data = path.read_bytes()
    path.write_bytes(data[:where] + noise + data[where:])
    try:
        assert read_source(path).questions
    except ValueError as error:
        assert str(error).startswith(str(path))


def test_a_task_of_original_files(tmp_path):
    train = save(tmp_path / "hotpot_train_v1.1.json", [hotpot(i) for i in range(4)], array=True)
    dev = save(tmp_path / "musique_ans_v1.0_dev.jsonl", [musique(i) for i in range(5, 8)])
    task = multihop_task(tmp_path / "none", files={"train": [train], "eval": [dev]}, held_out=1)
    assert (task.size("train"), task.size("held_out"), task.size("eval/musique")) == (3, 1, 3)
    # Two paragraphs are the same in both files; `Jaws` is longer in HotpotQA.
    assert sorted(p.title for p in task.corpus) == ["Jaws", "Jaws", "Rex", "Steven"]
    titles = sorted(text[2:].split(":")[0] for text in task.texts(9) if text.startswith("- "))
    assert titles == ["Jaws", "Rex", "Steven"]
    assert {task.row("train", i)["id"] for i in range(3)} < {f"h{i}" for i in range(4)}
    with pytest.raises(ValueError, match=r"musique_ans_v1\.0_dev\.jsonl, line 1: a question of MuSiQue's dev"):
        multihop_task("", files={"train": [dev], "eval": [train]})
    latest = save(tmp_path / "latest_musique.jsonl", [musique(i) for i in range(3)])
    assert multihop_task("", files={"train": [latest], "eval": [dev]}).size("train") == 3


def test_passages_that_a_named_corpus_has_take_its_ids(tmp_path):
    lines = [{"id": "c1", "title": "Steven", "text": "He was born in Ohio."}, {"id": "c2", "title": "x", "text": "y"}]
    corpus = save(tmp_path / "corpus.jsonl", lines)
    assert len(read_corpus(corpus)) == 2
    train = save(tmp_path / "train.json", [hotpot(i) for i in range(2)], array=True)
    dev = save(tmp_path / "dev.json", [wiki(7)], array=True)
    task = multihop_task("", files={"train": [train], "eval": [dev], "corpus": [corpus]})
    assert [p.id for p in task.corpus][:2] == ["c1", "c2"] and len(task.corpus) == 4
    assert task.row("train", 0)["gold_ids"][0] == "c1" and task.row("eval", 0)["gold_ids"][0] == "c1"
    other = save(tmp_path / "other.jsonl", [{"id": "c1", "title": "Another", "text": "z"}])
    with pytest.raises(ValueError, match="the id 'c1' stands for two passages, 'Steven' and 'Another'"):
        multihop_task("", files={"train": [train], "eval": [dev], "corpus": [corpus, other]})


def test_rows_without_passages_take_the_named_corpus(tmp_path):
    train = save(tmp_path / "train.jsonl", [verl(i) for i in range(3)])
    dev = save(tmp_path / "dev.jsonl", [verl(i, extra={"split": "dev", "gold_ids": ["c1"]}) for i in range(5, 7)])
    corpus = save(tmp_path / "corpus.jsonl", [{"id": "c1", "title": "a", "text": "b"}])
    task = multihop_task("", files={"train": [train], "eval": [dev], "corpus": [corpus]})
    assert task.counts["train"]["gold_unknown"] == 3 and [p.id for p in task.corpus] == ["c1"]
    with pytest.raises(ValueError, match=r"no train questions in .*train\.jsonl"):
        multihop_task("", files={"train": [train], "eval": [train], "corpus": [corpus]})

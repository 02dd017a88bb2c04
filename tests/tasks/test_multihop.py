"""The task of real questions: rows, splits, order, its keys, and the expert, which searches what it has read of."""

from __future__ import annotations

import asyncio
import collections
import gzip
import json

import numpy as np
import pytest
from changes import changed
from configured import configured_task
from plays import multihop_task, play

from agentr1_jax.envs import datasets
from agentr1_jax.errors import UserError
from agentr1_jax.tasks import qa
from agentr1_jax.tasks.multihop.task import MOST_SEARCHES, find_mention, make_expert, order_titles
from agentr1_jax.text.tool_calls import extract_answer, parse_tool_calls
from agentr1_jax.tools.search import BM25
from configs import multihop_tiny


def question(i, dataset="hotpotqa", **changes):
    record = {
        "id": f"{dataset}{i}",
        "dataset": dataset,
        "question": f"Who directed film {i}{'' if dataset == 'hotpotqa' else f' of {dataset}'}?",
        "answer": f"Person {i}",
        "answer_aliases": [f"P. {i}"],
        "type": "bridge",
        "gold_ids": [f"{dataset}-film{i}", f"{dataset}-person{i}"],
    }
    return {**record, **changes}


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(f"{json.dumps(record)}\n" for record in records)


@pytest.fixture
def folder(tmp_path):
    """Tiny data in the shape of the real ones: 5 training and 3 dev questions of two data sets."""
    for dataset in ("hotpotqa", "2wikimultihopqa"):
        questions = [question(i, dataset) for i in range(8)]
        write(tmp_path / f"multihop/questions_{dataset}_train.jsonl.gz", questions[:5])
        write(tmp_path / f"multihop/questions_{dataset}_dev.jsonl.gz", questions[5:])
        passages = [
            {"id": f"{dataset}-{kind}{i}", "title": f"{kind} {i} of {dataset}", "text": f"This is {kind} number {i}."}
            for i in range(8)
            for kind in ("film", "person")
        ]
        write(tmp_path / f"multihop/corpus_{dataset}.jsonl.gz", passages)
    return tmp_path


def test_rows_hold_what_the_contract_asks(folder):
    task = multihop_task(folder)
    assert task.size("train") == 10 and task.size("eval") == 6
    row = next(r for r in (task.row("eval", i) for i in range(6)) if r["id"] == "hotpotqa7")
    assert row == {
        "id": "hotpotqa7",
        "dataset": "hotpotqa",
        "kind": "bridge",
        "hops": 2,
        "question": "Who directed film 7?",
        "answers": ["Person 7", "P. 7"],
        "gold_ids": ["hotpotqa-film7", "hotpotqa-person7"],
    }
    json.dumps(row)


def test_each_pass_holds_every_row_once_in_an_order_of_its_own(folder):
    task = multihop_task(folder)
    orders = [[task.row("train", epoch * 10 + i)["id"] for i in range(10)] for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 1 and len(set(orders[0])) == 10
    assert orders[0] == [multihop_task(folder).row("train", i)["id"] for i in range(10)]
    assert orders[0] != [multihop_task(folder, seed=1).row("train", i)["id"] for i in range(10)]


def test_unknown_rows_are_refused(folder):
    for split in ("test", "held_out", "eval/musique"):
        with pytest.raises(ValueError, match=f"no row '{split}' 0; splits are train, eval, eval/hotpotqa"):
            multihop_task(folder).row(split, 0)


def test_data_sets_can_differ_between_training_and_evaluation(folder):
    task = multihop_task(folder, datasets=["hotpotqa"], eval_datasets=["2wikimultihopqa"])
    assert {task.row("train", i)["dataset"] for i in range(5)} == {"hotpotqa"}
    assert {task.row("eval", i)["dataset"] for i in range(3)} == {"2wikimultihopqa"}
    assert len(task.search.retriever.corpus) == 32


def test_missing_data_say_how_to_set_them(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTR1_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere: no such data folder; .*prepare_data FOLDER"):
        multihop_task("")
    with pytest.raises(FileNotFoundError, match=r"questions_musique_train\.jsonl\.gz: no such question file"):
        multihop_task(folder, datasets=["musique"])
    monkeypatch.setenv("AGENTR1_DATA", str(folder))
    assert multihop_task("").size("train") == 10


def test_the_folder_beside_the_project_is_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("AGENTR1_DATA", raising=False)
    (tmp_path / "shared/data").mkdir(parents=True)
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "project/agentr1_jax/envs/datasets.py"))
    assert datasets.data_folder() == tmp_path / "shared/data"


def test_evaluation_visits_each_row_once_whatever_the_seed(folder):
    both = ["hotpotqa", "2wikimultihopqa"]
    task, other = multihop_task(folder), multihop_task(folder, datasets=both[::-1], seed=7)
    order = [task.row("eval", i)["id"] for i in range(6)]
    assert len(set(order)) == 6 and order == [task.row("eval", 6 + i)["id"] for i in range(6)]
    assert order == [other.row("eval", i)["id"] for i in range(6)]
    assert [order.index(task.row("eval/hotpotqa", i)["id"]) for i in range(3)] == sorted(
        i for i, name in enumerate(order) if name.startswith("hotpotqa")
    )
    assert task.size("eval/hotpotqa") == task.size("eval/2wikimultihopqa") == 3


def test_held_out_questions_depend_on_their_ids_alone(folder):
    def held(**changes):
        task = multihop_task(folder, **{"held_out": 2, **changes})
        ids = {split: {task.row(split, i)["id"] for i in range(task.size(split))} for split in ("train", "held_out")}
        assert not ids["train"] & ids["held_out"] and task.size("train") == len(ids["train"])
        return task, ids["held_out"]

    task, chosen = held()
    assert len(chosen) == 4 and task.size("train") == 6
    path = folder / "multihop/questions_hotpotqa_train.jsonl.gz"
    write(path, [question(i) for i in (3, 1, 4, 0, 2)])
    assert held(seed=5)[1] == chosen
    one, of_one = held(held_out_datasets=("hotpotqa",))
    assert of_one == {name for name in chosen if name.startswith("hotpotqa")} and one.size("train") == 8
    # More of them hold the same, and others.
    assert held(held_out=3)[1] > chosen
    others, of_others = held(held_out_after=2)
    assert of_others == held(held_out=4)[1] - chosen and others.size("train") == 6


def test_questions_of_evaluation_are_kept_out_of_training(folder):
    path = folder / "multihop/questions_hotpotqa_train.jsonl.gz"
    same_text = question(90, question="who directed THE film 6", gold_ids=[])
    twins = [question(i, question=text, gold_ids=[]) for i, text in ((91, "Why?"), (92, "why"))]
    write(path, [*(question(i) for i in range(3)), same_text, {**question(1), "id": "hotpotqa7"}, *twins])
    task = multihop_task(folder, datasets=("hotpotqa",))
    ids = {task.row("train", i)["id"] for i in range(task.size("train"))}
    assert ids == {"hotpotqa0", "hotpotqa1", "hotpotqa2", "hotpotqa91", "hotpotqa92"}
    assert task.counts["train"]["same_as_evaluation"] == 2
    # One of the twins is held out sooner or later; the other one must not stay.
    for count in range(1, 5):
        task = multihop_task(folder, datasets=("hotpotqa",), held_out=count)
        held = {task.row("held_out", i)["id"] for i in range(count)}
        ids = {task.row("train", i)["id"] for i in range(task.size("train"))}
        assert len(held & {"hotpotqa91", "hotpotqa92"}) != 1 or not ids & {"hotpotqa91", "hotpotqa92"}
        assert task.size("train") + count + task.counts["train"]["same_as_evaluation"] == 7


def test_the_mixture_holds_over_each_stretch(folder):
    task = multihop_task(folder, mixture=("2wikimultihopqa(weight=2)", "hotpotqa(weight=1)"))
    rows = [task.row("train", i) for i in range(90)]
    wiki = np.array([row["dataset"] == "2wikimultihopqa" for row in rows])
    for start in range(80):
        for length in (3, 6, 9):
            assert abs(wiki[start : start + length].sum() - length * 2 / 3) < 2
    # Passes of its own: 30 draws of hotpotqa are 6 passes over its 5 rows.
    own = [row["id"] for row in rows if row["dataset"] == "hotpotqa"]
    passes = [own[i : i + 5] for i in range(0, 30, 5)]
    assert all(len(set(one)) == 5 for one in passes) and len({tuple(one) for one in passes}) > 1
    assert (
        multihop_task(folder, mixture=("2wikimultihopqa(weight=2)", "hotpotqa(weight=1)")).row("train", 77) == rows[77]
    )
    only = multihop_task(folder, mixture=("hotpotqa(weight=0.5)", "2wikimultihopqa(weight=0)"))
    assert {only.row("train", i)["dataset"] for i in range(20)} == {"hotpotqa"}


def test_texts_are_of_the_training_data_sets(folder):
    task = multihop_task(folder, datasets=("hotpotqa",), eval_datasets=("hotpotqa", "2wikimultihopqa"))
    texts = task.texts(1000)
    passages = [text for text in texts if text.startswith("- ")]
    assert len(passages) == 10 and len(task.corpus) == 32  # Of the six dev passages none.
    assert not any("film 6" in text for text in texts)
    assert all(text.split(": ")[0].endswith("of hotpotqa") for text in passages)
    assert "- film 3 of hotpotqa: This is film number 3." in passages and task.texts(5) == texts[:5]
    assert {row["question"] for row in task._splits["train"]} == set(texts) - set(passages)
    path = folder / "multihop/corpus_hotpotqa.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        corpus = [json.loads(line) for line in lines]
    write(path, [*corpus, {**corpus[12], "id": "twin"}])  # Of film 6: it has one id in the task.
    assert multihop_task(folder, datasets=("hotpotqa",)).texts(1000) == texts


def test_instruction_passages_and_retriever_are_given_on(folder):
    made = []

    def factory(settings, corpus, top_k, dispatch):
        made.append(corpus)
        return BM25(corpus)

    task = multihop_task(folder, instruction="Be quick.", passage_characters=12, top_k=2, make_retriever=factory)
    row = task.row("train", 0)
    assert not made
    [message] = asyncio.run(task.env().reset(row, 0)).messages
    assert message["content"] == f"Question: {row['question']}\n\nBe quick."
    _, found = play(task, row, ['<tool_call>{"name": "search", "arguments": {"query": "film number"}}</tool_call>'])
    lines = found.observation.text.split("\n")
    assert len(lines) == 2 and all(line.endswith(" ...") for line in lines)
    assert [len(corpus) for corpus in made] == [32]
    with pytest.raises(ValueError, match="passage_characters is 3"):
        multihop_task(folder, passage_characters=3)


def test_dev_questions_of_musique_are_never_trained_on(folder):
    for name, split in (("train", "dev"), ("dev", "dev")):
        questions = [question(i, "musique", orig_split=split, gold_ids=[]) for i in range(3)]
        write(folder / f"multihop/questions_musique_{name}.jsonl.gz", questions)
    write(folder / "multihop/corpus_musique.jsonl.gz", [{"id": "m1", "title": "t", "text": "x"}])
    with pytest.raises(ValueError, match=r"musique_train\.jsonl\.gz, line 1: a question of MuSiQue's dev or test set"):
        multihop_task(folder, datasets=("musique",), eval_datasets=("hotpotqa",))
    task = multihop_task(folder, eval_datasets=("musique",))
    assert task.size("eval/musique") == 3 and "eval/hotpotqa" not in task.counts
    # Nobody knows the gold passages: no figure of them is made up.
    _, answer = play(task, task.row("eval", 0), ["<answer> x </answer>"])
    assert "gold_recall" not in answer.metrics and "gold_passage" not in answer.raw_reward_parts
    assert task.counts["eval"]["gold_unknown"] == 3


def test_a_gold_passage_that_is_nowhere_is_named(folder):
    path = folder / "multihop/questions_hotpotqa_dev.jsonl.gz"
    write(path, [question(5), question(6, gold_ids=["hotpotqa-film6", "elsewhere"])])
    with pytest.raises(ValueError, match=r"dev\.jsonl\.gz, line 2: the gold passage 'elsewhere' of question 'h"):
        multihop_task(folder)


def test_figures_of_the_whole_data(data_dir):
    everything = ("hotpotqa", "2wikimultihopqa", "musique")
    task = multihop_task(data_dir, eval_datasets=everything, held_out=400, held_out_datasets=("2wikimultihopqa",))
    splits = ["train", "held_out", "eval", *(f"eval/{name}" for name in everything)]
    assert [task.size(split) for split in splits] == [2562 + 1278, 400, 1347, 224, 203, 920]
    assert task.counts == {"train": {"same_as_evaluation": 0}, "eval": {}}
    kinds = collections.Counter(task.row("held_out", i)["kind"] for i in range(400))
    assert len(task.corpus) == 32_130 + 10_899 + 9_247 and len(kinds) > 2
    # Without what is gold for questions of evaluation alone.
    assert sum(text.startswith("- ") for text in task.texts(10**6)) == 32_130 + 10_899 - 1_687


def configured(folder, **changes):
    """The task of a config over the folder."""
    keys = {"task__data_dir": str(folder), **{f"task__multihop__{key}": value for key, value in changes.items()}}
    return configured_task(changed(multihop_tiny, **keys))


@pytest.fixture
def files(folder):
    """Keys that name the folder's files one by one."""
    names = ("hotpotqa", "2wikimultihopqa")
    return {
        "files__train": tuple(f"{{data}}/multihop/questions_{name}_train.jsonl.gz" for name in names),
        "files__eval": ("{data}/multihop/questions_hotpotqa_dev.jsonl.gz",),
        "files__corpus": tuple(f"{{data}}/multihop/corpus_{name}.jsonl.gz" for name in names),
    }


def test_every_key_reaches_the_task(folder, files):
    task = configured(
        folder,
        **files,
        mixture=("hotpotqa(weight=1)", "2wikimultihopqa(weight=0)"),
        held_out=1,
        held_out_datasets=("2wikimultihopqa",),
        passage_characters=9,
        top_k=2,
        rewards__f1=0.5,
    )
    assert [task.size(split) for split in ("train", "held_out", "eval", "eval/hotpotqa")] == [9, 1, 3, 3]
    assert {task.row("train", i)["dataset"] for i in range(12)} == {"hotpotqa"}
    assert (task.search.top_k, task.search.passage_characters) == (2, 9)
    assert isinstance(task.retriever, BM25) and len(task.corpus) == 32
    assert set(task.reward_parts) == {"answer", "f1", "format", "gold_passage", "repeated_query"}
    assert configured(folder, reward="agentr1_v1").reward_parts == ["v1_start", "v1_format", "v1_answer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": "agentr1_v1", "rewards__answer": 2.0}, r"fixed weights; leave out rewards\.answer"),
        ({"reward_functions": ("f",)}, "'f' is not 'module:function=weight'"),
        ({"datasets": ("hotpot",)}, "unknown data set 'hotpot'; did you mean 'hotpotqa'"),
        ({"eval_datasets": ("nq",)}, "unknown data set 'nq'. Known are hotpotqa, 2wikimultihopqa, musique"),
        ({"mixture": ("hotpotqa(weight=1)",)}, "task.multihop.mixture has no weight of '2wikimultihopqa'"),
        ({"mixture": ("hotpot(weight=1)",)}, "data set of task.multihop.mixture 'hotpot'; did you mean 'hotpotqa'"),
        ({"held_out": 5}, r"held_out is 5, and 'hotpotqa' has 5 training questions"),
        ({"held_out_after": 5}, "held_out_after is 5, and held_out is 0"),
        ({"held_out": 1, "held_out_datasets": ("nq",)}, "data set of task.multihop.held_out_datasets 'nq'"),
        ({"passage_characters": 2}, "passage_characters is 2"),
        ({"files__corpus": ("{data}",)}, "no such corpus"),
        ({"files__train": ("{data}/nowhere.json",)}, r"nowhere\.json: no such question file"),
        ({"files__train": ("x",), "datasets": ("hotpotqa",)}, r"files\.train names the files .* is \('hotpotqa',\)"),
        ({"files__corpus": ()}, r"bring no passages, and task\.multihop\.retriever\.kind 'bm25'"),
    ],
)
def test_wrong_keys_are_refused(folder, files, changes, message):
    named = files if "files__corpus" in changes else {}
    with pytest.raises(UserError, match=message):
        configured(folder, **{**named, **changes})


def test_a_server_needs_no_passages_here_but_the_expert_does(folder, files):
    files["files__corpus"] = ()
    task = configured(folder, **files, retriever__kind="http", retriever__url="http://localhost:1/x")
    # Its passages have ids of its own: nobody can say which are gold, and no figure of them is made up.
    row = task.row("train", 0)
    assert not task.corpus and row["gold_ids"] == [] and task.counts["train"]["gold_unknown"] == 10
    assert "gold_recall" not in qa.metrics(row, []) and qa.gold_passage_part(row, []) is None
    with pytest.raises(ValueError, match="has to know the passages; name them in task.multihop.files.corpus"):
        task.expert(row, 0)


TITLES = {"f": "Madame la Presidente (film)", "d": "Frank Lloyd", "x": "Secret: Part 2"}


def asked(*gold, question="When did the director of film Madame La Presidente die?", **more):
    return {"question": question, "answers": ["10 August 1960"], "gold_ids": list(gold), **more}


def query(text):
    (call,) = parse_tool_calls(text)
    return call.arguments["query"]


def test_the_expert_follows_names_as_they_are_written():
    respond = make_expert(asked("d", "f"), TITLES)
    assert query(respond(None)) == " Madame La Presidente"
    assert query(respond("- Madame la Presidente (film): It was directed by Frank Lloyd.")) == " Frank Lloyd"
    assert extract_answer(respond("- Frank Lloyd: He died on 10 August 1960.")) == "10 August 1960"
    respond = make_expert(asked("d", "f"), TITLES)
    respond(None)
    both = "- Madame la Presidente (film): It was directed by Frank Lloyd.\n- Frank Lloyd: He died."
    assert extract_answer(respond(both)) == "10 August 1960"


def test_the_expert_asks_the_question_once_where_no_name_is_known():
    for told in ("No results.", "- Secret: Part 2: Nobody mentions it."):
        respond = make_expert(asked("x", question="What is it that nobody mentions?"), TITLES)
        assert query(respond(None)) == " What is it that nobody mentions?"
        assert extract_answer(respond(told)) == "10 August 1960"


def test_evidences_tell_the_expert_the_order_of_the_hops():
    """Both names stand in the question: the film is searched first, whose director the other one is."""
    row = asked("d", "f", question="Did Frank Lloyd, who directed Madame la Presidente, die?")
    assert query(make_expert(row, TITLES)(None)) == " Frank Lloyd"
    evidences = [["Madame la Presidente", "director", "Frank Lloyd"], ["Frank Lloyd", "died", "1960"]]
    assert query(make_expert({**row, "evidences": evidences}, TITLES)(None)) == " Madame la Presidente"


@pytest.mark.parametrize(
    ("titles", "evidences", "ordered"),
    [
        ("c b a", [], "c b a"),
        ("c b a", ["ab", "bc"], "a b c"),
        ("c b a", ["bc", "ab"], "a b c"),
        ("c a d b", ["ac", "bd"], "a c b d"),
        ("b a", ["xb"], "b a"),
        ("b a", ["ab", "ba", "aa"], "b a"),
    ],
)
def test_objects_come_behind_their_subjects_and_all_else_stays(titles, evidences, ordered):
    names = {letter: f"Title {letter}" for letter in "abcdx"}
    triples = [[names[subject], "leads to", names[object].upper()] for subject, object in evidences]
    assert order_titles([names[c] for c in titles.split()], triples) == [names[c] for c in ordered.split()]


@pytest.mark.parametrize(
    ("text", "title", "written"),
    [
        ("Karl, Prince Of Leiningen's father", "Karl, Prince of Leiningen", "Karl, Prince Of Leiningen"),
        ("who made Escape From L.A.?", "Escape from L.A.", "Escape From L.A"),
        ("the Unbreakables", "Unbreakable (film)", None),
        ("anything", "(film)", None),
        ("about a(b)", "a(b (film)", "a(b"),
    ],
)
def test_mentions(text, title, written):
    assert find_mention(text, title) == written


def test_on_real_questions_every_query_was_read_before(data_dir):
    everything = ("hotpotqa", "2wikimultihopqa", "musique")
    task = multihop_task(data_dir, corpus="mini", top_k=2, eval_datasets=everything)
    assert task.size("train") + task.size("eval") == 160 and task.size("eval/musique") == 40
    found = []
    for row in [task.row(split, i) for split in ("train", "eval") for i in range(task.size(split))]:
        respond, read, observation, queries = task.expert(row, 0), row["question"], None, []
        while (answer := extract_answer(text := respond(observation))) is None:
            queries.append(query(text).strip())
            assert queries[-1] in read
            result = asyncio.run(task.search.execute({"query": queries[-1]}))
            observation = result.content
            found.append(bool(set(result.data["ids"]) & set(row["gold_ids"])))
            read += f"\n{observation}"
        assert answer == row["answers"][0]
        assert 0 < len(queries) == len(set(queries)) <= MOST_SEARCHES
    assert np.mean(found) > 0.7

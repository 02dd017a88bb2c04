"""The real-data task: rows, order, episodes of the expert, and clear errors."""

from __future__ import annotations

import asyncio
import collections
import gzip
import json

import numpy as np
import pytest
from plays import multihop_task, play_expert

from agentr1_jax.envs import datasets
from agentr1_jax.envs.base import Action
from agentr1_jax.tasks import multihop
from agentr1_jax.tools.search import BM25
from agentr1_jax.trajectory import Outcome


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


def play(task, row, texts):
    """Transitions of one episode of given responses."""

    async def run():
        env = task.env()
        await env.reset(row, 0)
        return [await env.step(Action(np.zeros(0, np.int32), text)) for text in texts]

    return asyncio.run(run())


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


def test_splits_share_no_question(folder):
    task = multihop_task(folder)
    ids = [{task.row(split, i)["id"] for i in range(task.size(split))} for split in ("train", "eval")]
    assert not ids[0] & ids[1]


def test_data_sets_can_differ_between_training_and_evaluation(folder):
    task = multihop_task(folder, datasets=["hotpotqa"], eval_datasets=["2wikimultihopqa"])
    assert {task.row("train", i)["dataset"] for i in range(5)} == {"hotpotqa"}
    assert {task.row("eval", i)["dataset"] for i in range(3)} == {"2wikimultihopqa"}
    assert len(task.search.retriever.corpus) == 32


def test_the_expert_is_right(folder):
    task = multihop_task(folder)
    transitions = play_expert(task, task.row("train", 0))
    assert transitions[-1].outcome is Outcome.ANSWERED and transitions[-1].metrics["em"] == 1.0
    assert transitions[-1].reward == 1.0


def test_rewards_and_aliases(folder):
    task = multihop_task(folder, rewards={"answer": 2.0, "format": 0.5})
    row = task.row("train", 0)
    [right] = play(task, row, [f"<answer> {row['answers'][1]} </answer>"])
    [wrong] = play(task, row, ["<answer> somebody else </answer>"])
    [bad_call] = play(task, row, ["<tool_call>{}</tool_call>"])
    assert (right.reward, wrong.reward, bad_call.reward) == (2.0, 0.0, -0.5)
    assert bad_call.observation is not None and "name" in bad_call.observation.text


def test_the_prompt_holds_the_question_then_the_instructions(folder):
    task = multihop_task(folder)
    row = task.row("train", 0)
    observation = asyncio.run(task.env().reset(row, 0))
    [message] = observation.messages
    assert message["role"] == "user"
    before, after = message["content"].split(row["question"])
    assert "<think>" in after and "<answer>" in after and "<think>" not in before
    assert [tool["function"]["name"] for tool in observation.tools] == ["search"]


def test_texts_are_of_training_questions_and_passages(folder):
    texts = multihop_task(folder).texts(4)
    assert len(texts) == 4
    assert texts[0] == "Who directed film 0?" and texts[1].startswith("- film 0 of")
    assert not any("film 7?" in text for text in multihop_task(folder).texts(1000))


def test_missing_data_say_how_to_set_them(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTR1_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere: no such data folder; set the environment variable AGENTR1"):
        multihop_task("")
    with pytest.raises(FileNotFoundError, match=r"questions_musique_train\.jsonl\.gz: no such question file"):
        multihop_task(folder, datasets=["musique"])
    monkeypatch.setenv("AGENTR1_DATA", str(folder))
    assert multihop_task("").size("train") == 10


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", json.dumps({"id": 1}), json.dumps(question(3, answer="")), json.dumps(question(3, gold_ids=None))],
)
def test_a_damaged_line_is_named(folder, damage):
    path = folder / "multihop/questions_hotpotqa_dev.jsonl.gz"
    with gzip.open(path, "at", encoding="utf-8") as out:
        out.write(f"{damage}\n")
    with pytest.raises(ValueError, match=r"questions_hotpotqa_dev\.jsonl\.gz, line 4: not a question"):
        multihop_task(folder)


def test_a_truncated_file_is_named(folder):
    path = folder / "multihop/questions_hotpotqa_dev.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"questions_hotpotqa_dev\.jsonl\.gz, line \d+: not a question"):
        multihop_task(folder)


def test_wrong_arguments_are_refused(folder):
    with pytest.raises(ValueError, match="unknown data set 'hotpot'; did you mean 'hotpotqa'"):
        multihop_task(folder, datasets=["hotpot"])
    with pytest.raises(ValueError, match="no row 'test' 0; splits are train, eval, eval/hotpotqa"):
        multihop_task(folder).row("test", 0)


def test_the_real_files(data_dir):
    task = multihop_task(data_dir)
    assert task.size("train") == 2562 + 1678 and task.size("eval") == 224 + 203
    kinds = collections.Counter(task.row("train", i)["kind"] for i in range(task.size("train")))
    assert kinds["bridge"] == 1956 and kinds["unknown"] == 101


def test_experts_on_real_passages(data_dir):
    task = multihop_task(data_dir, eval_datasets=["hotpotqa", "2wikimultihopqa", "musique"], corpus="mini")
    assert task.size("train") + task.size("eval") == 160
    assert all(task.row("train", i)["dataset"] != "musique" for i in range(task.size("train")))
    ends = [play_expert(task, task.row("eval", i))[-1] for i in range(task.size("eval"))]
    assert all(end.metrics["em"] == 1.0 for end in ends)
    assert np.mean([end.metrics["gold_recall"] for end in ends]) > 0.7


def test_the_folder_beside_the_project_is_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("AGENTR1_DATA", raising=False)
    (tmp_path / "shared/data").mkdir(parents=True)
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "project/agentr1_jax/envs/datasets.py"))
    assert multihop.data_folder() == tmp_path / "shared/data"


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
    with pytest.raises(ValueError, match="no row 'eval/musique' 0; splits are train, eval, eval/hotpotqa"):
        task.row("eval/musique", 0)


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


def test_wrong_held_outs_are_refused(folder):
    with pytest.raises(ValueError, match=r"no row 'held_out' 0; .*\(held_out where task.multihop.held_out is set\)"):
        multihop_task(folder).row("held_out", 0)
    with pytest.raises(ValueError, match="held_out is 5, and 'hotpotqa' has 5 training questions"):
        multihop_task(folder, held_out=5)
    with pytest.raises(
        ValueError, match="unknown data set of task.multihop.held_out_datasets 'musique'. Known are hotpotqa, 2"
    ):
        multihop_task(folder, held_out=1, held_out_datasets=("musique",))


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


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        (("hotpotqa(weight=1)",), "no weight of '2wikimultihopqa'"),
        (("hotpotqa(weight=0)", "2wikimultihopqa(weight=0)"), "are all 0"),
        (("hotpot(weight=1)", "2wikimultihopqa(weight=1)"), "'hotpot'; did you mean 'hotpotqa'"),
    ],
)
def test_wrong_mixtures_are_refused(folder, mixture, message):
    with pytest.raises(ValueError, match=message):
        multihop_task(folder, mixture=mixture)


def test_texts_are_of_the_training_data_sets(folder):
    task = multihop_task(folder, datasets=("hotpotqa",), eval_datasets=("hotpotqa", "2wikimultihopqa"))
    texts = task.texts(1000)
    passages = [text for text in texts if text.startswith("- ")]
    assert len(passages) == 16 and len(task.corpus) == 32
    assert all(text.split(": ")[0].endswith("of hotpotqa") for text in passages)
    assert "- film 3 of hotpotqa: This is film number 3." in passages and task.texts(5) == texts[:5]
    assert {row["question"] for row in task._splits["train"]} == set(texts) - set(passages)


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
    [found] = play(task, row, ['<tool_call>{"name": "search", "arguments": {"query": "film number"}}</tool_call>'])
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
    [answer] = play(task, task.row("eval", 0), ["<answer> x </answer>"])
    assert "gold_recall" not in answer.metrics and "gold_passage" not in answer.raw_reward_parts
    assert task.counts["eval"]["gold_unknown"] == 3


def test_a_gold_passage_that_is_nowhere_is_named(folder):
    path = folder / "multihop/questions_hotpotqa_dev.jsonl.gz"
    write(path, [question(5), question(6, gold_ids=["hotpotqa-film6", "elsewhere"])])
    with pytest.raises(ValueError, match=r"dev\.jsonl\.gz, line 2: the gold passage 'elsewhere' of question 'h"):
        multihop_task(folder)


def test_an_id_that_two_questions_have_is_refused(folder):
    write(folder / "multihop/questions_hotpotqa_dev.jsonl.gz", [question(5), question(6), question(5)])
    with pytest.raises(ValueError, match=r"line 3: not a question \(ValueError: the id 'hotpotqa5' occurs twice"):
        multihop_task(folder)


def test_figures_of_the_whole_data(data_dir):
    everything = ("hotpotqa", "2wikimultihopqa", "musique")
    task = multihop_task(data_dir, eval_datasets=everything, held_out=400, held_out_datasets=("2wikimultihopqa",))
    splits = ["train", "held_out", "eval", *(f"eval/{name}" for name in everything)]
    assert [task.size(split) for split in splits] == [2562 + 1278, 400, 1347, 224, 203, 920]
    assert task.counts == {"train": {"same_as_evaluation": 0}, "eval": {}}
    assert len(task.corpus) == 32_130 + 10_899 + 9_247
    assert sum(text.startswith("- ") for text in task.texts(10**6)) == 32_130 + 10_899

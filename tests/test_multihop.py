"""The real-data task: rows, order, episodes of the expert, and clear errors."""

from __future__ import annotations

import asyncio
import collections
import gzip
import json

import numpy as np
import pytest

from agentr1_jax.envs import multihop
from agentr1_jax.envs.base import Action
from agentr1_jax.envs.multihop import MultihopTask
from agentr1_jax.trajectory import Outcome


def question(i, dataset="hotpotqa", **changes):
    record = {
        "id": f"{dataset}{i}",
        "dataset": dataset,
        "question": f"Who directed film {i}?",
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


def play_expert(task, row, limit=6):
    async def run():
        env, expert, observation, transitions = task.env(), task.expert(row, 0), None, []
        await env.reset(row, 0)
        for _ in range(limit):
            transitions.append(await env.step(Action(np.zeros(0, np.int32), expert(observation))))
            if transitions[-1].terminated:
                break
            observation = transitions[-1].observation.text
        return transitions

    return asyncio.run(run())


def test_rows_hold_what_the_contract_asks(folder):
    task = MultihopTask(folder)
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
    task = MultihopTask(folder)
    orders = [[task.row("train", epoch * 10 + i)["id"] for i in range(10)] for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 1 and len(set(orders[0])) == 10
    assert orders[0] == [MultihopTask(folder).row("train", i)["id"] for i in range(10)]
    assert orders[0] != [MultihopTask(folder, seed=1).row("train", i)["id"] for i in range(10)]


def test_splits_share_no_question(folder):
    task = MultihopTask(folder)
    ids = [{task.row(split, i)["id"] for i in range(task.size(split))} for split in ("train", "eval")]
    assert not ids[0] & ids[1]


def test_data_sets_can_differ_between_training_and_evaluation(folder):
    task = MultihopTask(folder, datasets=["hotpotqa"], eval_datasets=["2wikimultihopqa"])
    assert {task.row("train", i)["dataset"] for i in range(5)} == {"hotpotqa"}
    assert {task.row("eval", i)["dataset"] for i in range(3)} == {"2wikimultihopqa"}
    assert len(task.search.corpus) == 32


def test_the_expert_finds_all_gold_passages_and_is_right(folder):
    task = MultihopTask(folder)
    transitions = play_expert(task, task.row("train", 0))
    assert [t.outcome for t in transitions] == [None, None, Outcome.ANSWERED]
    assert transitions[-1].metrics["em"] == transitions[-1].metrics["gold_recall"] == 1.0
    assert transitions[-1].reward == 1.0


def test_rewards_and_aliases(folder):
    task = MultihopTask(folder, reward_weights={"answer": 2.0, "format": 0.5})
    row = task.row("train", 0)
    [right] = play(task, row, [f"<answer> {row['answers'][1]} </answer>"])
    [wrong] = play(task, row, ["<answer> somebody else </answer>"])
    [bad_call] = play(task, row, ["<tool_call>{}</tool_call>"])
    assert (right.reward, wrong.reward, bad_call.reward) == (2.0, 0.0, -0.5)
    assert bad_call.observation is not None and "name" in bad_call.observation.text


def test_the_prompt_holds_the_question_then_the_instructions(folder):
    task = MultihopTask(folder)
    row = task.row("train", 0)
    observation = asyncio.run(task.env().reset(row, 0))
    [message] = observation.messages
    assert message["role"] == "user"
    before, after = message["content"].split(row["question"])
    assert "<think>" in after and "<answer>" in after and "<think>" not in before
    assert [tool["function"]["name"] for tool in observation.tools] == ["search"]


def test_texts_are_of_training_questions_and_passages(folder):
    texts = MultihopTask(folder).texts(4)
    assert len(texts) == 4
    assert texts[0] == "Who directed film 0?" and texts[1].startswith("- film 0 of")
    assert not any("film 7?" in text for text in MultihopTask(folder).texts(1000))


def test_missing_data_say_how_to_set_them(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTR1_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere: no such data folder; set the environment variable AGENTR1"):
        MultihopTask()
    with pytest.raises(FileNotFoundError, match=r"questions_musique_train\.jsonl\.gz: no such question file"):
        MultihopTask(folder, datasets=["musique"])
    monkeypatch.setenv("AGENTR1_DATA", str(folder))
    assert MultihopTask().size("train") == 10


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", json.dumps({"id": 1}), json.dumps(question(3, answer="")), json.dumps(question(3, gold_ids=None))],
)
def test_a_damaged_line_is_named(folder, damage):
    path = folder / "multihop/questions_hotpotqa_dev.jsonl.gz"
    with gzip.open(path, "at", encoding="utf-8") as out:
        out.write(f"{damage}\n")
    with pytest.raises(ValueError, match=r"questions_hotpotqa_dev\.jsonl\.gz, line 4: not a question"):
        MultihopTask(folder)


def test_a_truncated_file_is_named(folder):
    path = folder / "multihop/questions_hotpotqa_dev.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"questions_hotpotqa_dev\.jsonl\.gz, line \d+: not a question"):
        MultihopTask(folder)


def test_wrong_arguments_are_refused(folder):
    with pytest.raises(ValueError, match="unknown data set 'hotpot'; known are hotpotqa"):
        MultihopTask(folder, datasets=["hotpot"])
    with pytest.raises(ValueError, match="corpus is 'tiny'; choose"):
        MultihopTask(folder, corpus="tiny")
    with pytest.raises(ValueError, match="no row 'test' 0; splits are train and eval"):
        MultihopTask(folder).row("test", 0)


def test_the_real_files(data_dir):
    task = MultihopTask(data_dir)
    assert task.size("train") == 2562 + 1678 and task.size("eval") == 224 + 203
    kinds = collections.Counter(task.row("train", i)["kind"] for i in range(task.size("train")))
    assert kinds["bridge"] == 1956 and kinds["unknown"] == 101


def test_experts_on_real_passages(data_dir):
    task = MultihopTask(data_dir, eval_datasets=["hotpotqa", "2wikimultihopqa", "musique"], corpus="mini")
    assert task.size("train") + task.size("eval") == 160
    assert all(task.row("train", i)["dataset"] != "musique" for i in range(task.size("train")))
    ends = [play_expert(task, task.row("eval", i))[-1] for i in range(task.size("eval"))]
    assert all(end.metrics["em"] == 1.0 for end in ends)
    assert np.mean([end.metrics["gold_recall"] for end in ends]) > 0.9


def test_the_folder_beside_the_project_is_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("AGENTR1_DATA", raising=False)
    (tmp_path / "shared/data").mkdir(parents=True)
    monkeypatch.setattr(multihop, "__file__", str(tmp_path / "project/agentr1_jax/envs/multihop.py"))
    assert multihop.data_folder() == tmp_path / "shared/data"

"""From config to the task of real questions: what keys do, and what is refused before a run starts."""

from __future__ import annotations

import asyncio
import json

import pytest
from changes import changed
from configured import configured_task

from agentr1_jax.errors import UserError
from agentr1_jax.tasks import qa
from agentr1_jax.tools.search import BM25
from configs import multihop_tiny


def question(i, dataset="hotpotqa"):
    return {
        **{"id": f"{dataset}{i}", "dataset": dataset, "question": f"Where is {dataset} {i}?", "answer": f"Town {i}"},
        **{"answer_aliases": [], "type": "bridge", "gold_ids": [f"p{i}"]},
    }


@pytest.fixture
def files(tmp_path):
    """Keys of files of one's own: 6 training questions of two data sets, 3 of evaluation, their passages."""
    passages = [{"id": f"p{i}", "title": f"Place {i}", "text": f"It is in Town {i}."} for i in range(9)]
    train = [question(i, ("hotpotqa", "2wikimultihopqa")[i % 2]) for i in range(6)]
    for name, records in (("train", train), ("eval", [question(i) for i in range(6, 9)]), ("corpus", passages)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return {f"task__multihop__files__{name}": (f"{{data}}/{name}.jsonl",) for name in ("train", "eval", "corpus")} | {
        "task__data_dir": str(tmp_path)
    }


def make(files, **changes):
    return configured_task(changed(multihop_tiny, **(files | changes)))


def test_every_key_reaches_the_task(files):
    task = make(
        files,
        task__multihop__mixture=("hotpotqa(weight=1)", "2wikimultihopqa(weight=0)"),
        task__multihop__held_out=1,
        task__multihop__held_out_datasets=("2wikimultihopqa",),
        task__multihop__instruction="Be quick.",
        task__multihop__passage_characters=9,
        task__multihop__top_k=2,
        task__multihop__rewards__f1=0.5,
    )
    assert [task.size(split) for split in ("train", "held_out", "eval", "eval/hotpotqa")] == [5, 1, 3, 3]
    assert {task.row("train", i)["dataset"] for i in range(12)} == {"hotpotqa"}
    assert asyncio.run(task.env().reset(task.row("eval", 0), 0)).messages[0]["content"].endswith("\n\nBe quick.")
    assert (task.search.top_k, task.search.passage_characters) == (2, 9)
    assert isinstance(task.retriever, BM25) and len(task.corpus) == 9
    assert set(task.reward_parts) == {"answer", "f1", "format", "gold_passage", "repeated_query"}
    assert make(files, task__multihop__reward="agentr1_v1").reward_parts == ["v1_start", "v1_format", "v1_answer"]


def test_evaluation_may_have_data_sets_of_its_own(data_dir):
    config = {
        "task__multihop__corpus": "mini",
        "task__data_dir": str(data_dir),
        "task__multihop__datasets": ("hotpotqa",),
    }
    config["task__multihop__eval_datasets"] = ("hotpotqa", "musique")
    task = configured_task(changed(multihop_tiny, **config))
    assert {task.row("train", i)["dataset"] for i in range(60)} == {"hotpotqa"} and task.size("eval/musique") == 40
    configured_task(changed(multihop_tiny, **config, eval__split="eval/musique"))
    with pytest.raises(UserError, match=r"eval\.split: multihop has no row 'held_out' 0; splits are train, eval"):
        configured_task(changed(multihop_tiny, **config, eval__split="held_out"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task__multihop__reward": "v1"}, "task.multihop.reward is 'v1'; it must be 'weighted' or 'agentr1_v1'"),
        (
            {"task__multihop__reward": "agentr1_v1", "task__multihop__rewards__answer": 2.0},
            r"weights; leave out rewards\.answer",
        ),
        (
            {"task__multihop__reward_functions": ("nothing:f=1",)},
            "reward_functions: 'nothing:f=1': cannot import 'nothing'",
        ),
        ({"task__multihop__reward_functions": ("f",)}, "'f' is not 'module:function=weight'"),
        ({"task__multihop__mixture": ("hotpotqa(weight=1)",)}, "no weight of '2wikimultihopqa'"),
        ({"task__multihop__held_out": 3}, r"held_out is 3, and 'hotpotqa' has 3 training questions"),
        (
            {"task__multihop__held_out": 1, "task__multihop__held_out_datasets": ("nq",)},
            "unknown data set of task.multihop.held_out_datasets 'nq'",
        ),
        ({"task__multihop__top_k": 0}, "top_k is 0; it must be greater than or equal to 1"),
        ({"task__multihop__rewards__answer": float("nan")}, "answer is nan; it must be a finite number"),
        ({"task__multihop__files__corpus": ("{data}",)}, "no such corpus"),
        ({"task__multihop__files__train": ("{data}",)}, "no such question file"),
        ({"task__multihop__passage_characters": 2}, "passage_characters is 2"),
        (
            {"task__multihop__datasets": ("hotpotqa",)},
            r"files\.train names the files .* datasets is \('hotpotqa',\)",
        ),
        ({"task__multihop__eval_datasets": ("hotpotqa",)}, r"task\.multihop: files\.eval names the files"),
        ({"task__multihop__files__train": ("{data}/nowhere.json",)}, r"nowhere\.json: no such question file"),
        ({"task__multihop__files__corpus": ()}, r"bring no passages, and task\.multihop\.retriever\.kind 'bm25'"),
        ({"task__multihop__retriever__kind": "bm52"}, "task.multihop.retriever.kind is 'bm52'"),
        ({"warm_start__practice": 0.1}, "multihop has no split 'practice'; set warm_start.practice=0"),
    ],
)
def test_wrong_keys_are_refused(files, changes, message):
    with pytest.raises(UserError, match=message):
        make(files, **changes)


def test_a_server_needs_no_passages_here_but_the_expert_does(files):
    task = make(
        files,
        task__multihop__files__corpus=(),
        task__multihop__retriever__kind="http",
        task__multihop__retriever__url="http://localhost:1/x",
    )
    # Its passages have ids of its own: nobody can say which are gold, and no figure of them is made up.
    row = task.row("train", 0)
    assert not task.corpus and row["gold_ids"] == [] and task.counts["train"]["gold_unknown"] == 6
    assert "gold_recall" not in qa.metrics(row, []) and qa.gold_passage_part(row, []) is None
    with pytest.raises(ValueError, match="has to know the passages; name them in task.multihop.files.corpus"):
        task.expert(task.row("train", 0), 0)


def test_unknown_data_sets_are_refused(data_dir):
    for key in ("datasets", "eval_datasets"):
        with pytest.raises(UserError, match="unknown data set 'hotpot'; did you mean 'hotpotqa'"):
            make({"task__data_dir": str(data_dir)}, **{f"task__multihop__{key}": ("hotpot",)})

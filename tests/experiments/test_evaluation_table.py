"""Evaluations joined into one table, with the gain over one of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from programs import program

from agentr1_jax.errors import UserError
from agentr1_jax.report.figures import Score, write_scores
from agentr1_jax.report.statistics import paired_difference, two_stage_interval

table = program("evaluation.table")
REQUEST = {"samples": 1, "temperature": 0.0, "config": {"task": {"name": "t", "top_k": 3}, "policy": {"weights": "a"}}}


def scores(values, mode="agent", dataset="two", failed=()):
    """Scores with em of the given values and half of it as recall; questions in `failed` were not measured."""
    measured = [{} if i in failed else {"em": v, "f1": v, "recall": v / 2} for i, v in enumerate(values)]
    return [Score(mode, "eval", dataset, "k", f"q{i:03}", 0, "answered", m) for i, m in enumerate(measured)]


def folder(path, *parts, **request):
    path.mkdir()
    write_scores(str(path / "scores.jsonl.gz"), [score for part in parts for score in part])
    (path / "request.json").write_text(json.dumps({**REQUEST, **request}))
    return str(path)


def test_rows_are_modes_of_folders(tmp_path):
    warm = folder(tmp_path / "ws", scores([0.0, 1.0], "agent"), scores([0.0, 0.0], "rag"))
    grpo = folder(tmp_path / "a=b:c", scores([1.0, 1.0]))
    rows, folders = table.read_rows([f"Naive RAG={warm}:rag", f"warm start={warm}", f"GRPO={grpo}"])
    assert list(rows) == ["Naive RAG", "warm start", "GRPO"] and folders == [warm, warm, grpo]
    assert [score.mode for score in rows["Naive RAG"][0]] == ["rag", "rag"]
    assert list(table.read_rows([warm])[0]) == [f"{warm} agent", f"{warm} rag"]
    assert list(table.read_rows([f"{warm}:rag"])[0]) == [f"{warm} rag"]
    with pytest.raises(UserError, match="has no mode 'react'; it has agent, rag"):
        table.read_rows([f"{warm}:react"])
    with pytest.raises(UserError, match="no finished evaluation"):
        table.read_rows([str(tmp_path / "none")])


def test_figures_and_gains_are_those_of_the_library():
    rng = np.random.default_rng(0)
    before, after = rng.integers(0, 2, (2, 40)).astype(float)
    rows = {"ws": [scores(before, failed=(3,))], "grpo": [scores(after, failed=(5, 6))]}
    ws, grpo = table.join(rows, "ws")
    assert ws["figures"]["em"]["n"] == 39 and ws["gains"] == {} and grpo["figures"]["em"]["n"] == 38
    kept = np.delete(after, (5, 6))
    assert grpo["figures"]["em"] == {**two_stage_interval([kept], same_questions=True)._asdict(), "n": 38}
    both = [np.delete(x, (3, 5, 6)) for x in (after, before)]
    expected = paired_difference([both[0]], [both[1]], same_questions=True)
    assert grpo["gains"]["em"] == {**expected._asdict(), "n": 37}
    assert grpo["gains"]["recall"]["mean"] == pytest.approx(expected.mean / 2)


def test_folders_of_one_name_are_seeds(tmp_path):
    rng = np.random.default_rng(1)
    values = rng.random((3, 30))
    rows = {"ws": [scores(v) for v in values[:1]], "grpo": [scores(v) for v in values[1:]]}
    _, record = table.join(rows, "ws")
    assert record["seeds"] == 2
    expected = paired_difference(list(values[1:]), [values[0], values[0]], same_questions=True)
    assert record["gains"]["em"] == {**expected._asdict(), "n": 30}
    with pytest.raises(UserError, match="x has 3 seeds and grpo 2; they do not pair up"):
        table.join({"grpo": rows["grpo"], "x": [scores(v) for v in values]}, "grpo")


def test_the_table_says_what_is_not_alike(tmp_path):
    one = folder(tmp_path / "one", scores([0.0, 1.0]))
    other = {"task": {"name": "t", "top_k": 5}, "policy": {"weights": "b"}}
    two = folder(tmp_path / "two", scores([1.0, 1.0]), scores([1.0], dataset="hop"), config=other)
    rows, folders = table.read_rows([f"a={one}", f"b={two}"])
    page = table.markdown(table.join(rows, "a"), "a", table.remarks(folders))
    assert "**The evaluations differ in task.top_k.**" in page and "### two, eval" in page and "### hop, eval" in page
    assert "| b | 1 | 2 | 0.500 [0.500, 0.500] | 1.000 [1.000, 1.000] |" in page and "gain in EM" in page
    assert "| a | - |" not in page.split("### hop, eval")[1]
    greedy = folder(tmp_path / "three", scores([1.0]), temperature=1.0)
    with pytest.raises(UserError, match="the evaluations have temperature 0.0, 1.0"):
        table.remarks([one, greedy])

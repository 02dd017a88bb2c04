"""Real multi-hop questions (HotpotQA, 2WikiMultihopQA, MuSiQue) with BM25 search over their real passages."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agentr1_jax.envs import qa
from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.rewards import Reward
from agentr1_jax.envs.tool_env import OnParseFailure, ToolEnv
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.search import Passage, SearchTool, read_corpus

DATASETS = ("hotpotqa", "2wikimultihopqa", "musique")
INSTRUCTION = (
    "Answer the question with the help of the search tool. Before each action, reason inside <think> and </think>. "
    "Search as often as you need. When you know the answer, give it inside <answer> and </answer>, as short as "
    "possible, for example <answer> Paris </answer>."
)
MINI_EVAL_EVERY = 5
DEFAULT_WEIGHTS: Mapping[str, float] = {"answer": 1.0, "format": 0.1}


class MultihopTask:
    """The Task of answering real multi-hop questions by search.

    Args:
      data_dir: folder that holds `multihop/`; see `data_folder`.
      datasets: where training and, by default, evaluation questions come from.
      eval_datasets: where evaluation questions come from, e.g. with `musique` for a test out of domain.
      corpus: `full`, the merged passages of all data sets named; or `mini`, 160 questions over 1,890 passages. Its
        MuSiQue questions and every fifth of the others are for evaluation.
      top_k: passages per search.
      reward_weights: weights of `envs.qa.PARTS`.
      seed: seed of the order of rows.
      on_parse_failure: see `ToolEnv`.
      wrap: applied to the search tool that environments offer (e.g. limits of time and size).

    Raises:
      FileNotFoundError: the data are not there.
      ValueError: an unknown data set, a split without questions, or a damaged file (the message names the line).
    """

    name = "multihop"

    def __init__(
        self,
        data_dir: str | os.PathLike[str] = "",
        datasets: Sequence[str] = ("hotpotqa", "2wikimultihopqa"),
        eval_datasets: Sequence[str] | None = None,
        corpus: Literal["full", "mini"] = "full",
        top_k: int = 5,
        reward_weights: Mapping[str, float] = DEFAULT_WEIGHTS,
        seed: int = 0,
        on_parse_failure: OnParseFailure = "observe",
        wrap: Callable[[Tool], Tool] = lambda tool: tool,
    ) -> None:
        if corpus not in ("full", "mini"):
            raise ValueError(f"corpus is {corpus!r}; choose 'full' or 'mini'")
        named = {"train": tuple(datasets), "eval": tuple(datasets if eval_datasets is None else eval_datasets)}
        for dataset in itertools.chain(*named.values()):
            if dataset not in DATASETS:
                raise ValueError(f"unknown data set {dataset!r}; known are {', '.join(DATASETS)}")
        self._folder = data_folder(data_dir) / "multihop"
        self._named = named
        self._mini = corpus == "mini"
        self._top_k = top_k
        self._reward = Reward(qa.PARTS, reward_weights)
        self._seed = seed
        self._on_parse_failure = on_parse_failure
        self._wrap = wrap
        self._rows = {split: self._read_rows(split) for split in named}
        for split, rows in self._rows.items():
            if not rows:
                raise ValueError(f"{self._folder}: no {split} questions of {named[split]} in the {corpus} data")

    @property
    def reward_parts(self) -> Sequence[str]:
        """The parts that have a weight."""
        return list(self._reward.weights)

    def row(self, split: str, index: int) -> Row:
        """Row `index` of `train` or `eval`, shuffled anew for each pass. Raises ValueError if there can be none."""
        if split not in self._rows or index < 0:
            raise ValueError(f"multihop has no row {split!r} {index}; splits are train and eval, rows start at 0")
        rows = self._rows[split]
        epoch, place = divmod(index, len(rows))
        order = np.random.default_rng([self._seed, split == "train", epoch]).permutation(len(rows))
        return rows[order[place]]

    def size(self, split: str) -> int:
        """Number of questions of a split."""
        return len(self._rows[split])

    def env(self) -> ToolEnv:
        """A fresh environment; all share one search index."""
        return ToolEnv(
            tools=[self._tool],
            opening=opening,
            reward=self._reward,
            metrics=qa.metrics,
            state_key=qa.state_key,
            on_parse_failure=self._on_parse_failure,
        )

    def expert(self, row: Row, seed: int) -> Expert:
        """Searches the title of each gold passage in turn, then answers. It has no flaws, so `seed` is not used."""
        titles = [self._passages[i].title for i in row["gold_ids"]]
        queries = iter(titles)

        def respond(observation: str | None) -> str:
            title = next(queries, None)
            if title is None:
                return f"<think>Now I know the answer.</think>\n{render_answer(row['answers'][0])}"
            return f"<think>I look up {title}.</think>\n{render_call('search', {'query': title})}"

        return respond

    def texts(self, count: int) -> list[str]:
        """Training questions and passages in turn, at most `count`."""
        questions = (row["question"] for row in self._rows["train"])
        passages = (passage.line for passage in self._passages.values())
        both = itertools.chain.from_iterable(itertools.zip_longest(questions, passages))
        return list(itertools.islice((text for text in both if text is not None), count))

    @functools.cached_property
    def search(self) -> SearchTool:
        """The search tool, built where first needed: indexing 43,000 passages takes 3 s."""
        return SearchTool(list(self._passages.values()), self._top_k)

    @functools.cached_property
    def _tool(self) -> Tool:
        return self._wrap(self.search)

    @functools.cached_property
    def _passages(self) -> Mapping[str, Passage]:
        files = sorted({f"corpus_{dataset}.jsonl.gz" for dataset in itertools.chain(*self._named.values())})
        corpora = [read_corpus(self._folder / file) for file in (["mini_corpus.jsonl.gz"] if self._mini else files)]
        return {passage.id: passage for passage in itertools.chain(*corpora)}

    def _read_rows(self, split: str) -> list[Row]:
        datasets = self._named[split]
        if self._mini:
            rows = read_questions(self._folder / "mini_questions.jsonl.gz")
            held_out = [row["dataset"] == "musique" or i % MINI_EVAL_EVERY == 0 for i, row in enumerate(rows)]
            kept = [row for row, out in zip(rows, held_out, strict=True) if out == (split == "eval")]
            return [row for row in kept if row["dataset"] in datasets]
        suffix = "train" if split == "train" else "dev"
        files = [self._folder / f"questions_{dataset}_{suffix}.jsonl.gz" for dataset in datasets]
        return [row for file in files for row in read_questions(file)]


def data_folder(data_dir: str | os.PathLike[str] = "") -> Path:
    """The folder of real data: `data_dir`, else AGENTR1_DATA, else `../shared/data` beside the project.

    Raises:
      FileNotFoundError: there is no such folder; the message says how to name one.
    """
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(data_dir or os.environ.get("AGENTR1_DATA") or beside)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such data folder; set the environment variable AGENTR1_DATA (or data_dir in the config) to "
            "the folder that holds multihop/"
        )
    return folder


def opening(row: Row) -> list[dict[str, str]]:
    """The question, then the instructions. The tool's schema is added by the tokenizer's chat template."""
    return [{"role": "user", "content": f"Question: {row['question']}\n\n{INSTRUCTION}"}]


def read_questions(path: str | os.PathLike[str]) -> list[Row]:
    """Reads questions from gzipped JSONL as rows: `id, dataset, kind, hops, question, answers, gold_ids`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not a question; the message names file and line.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such question file; set AGENTR1_DATA to the folder that holds the data")
    rows: list[Row] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                rows.append(_row(json.loads(line)))
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}, line {len(rows) + 1}: not a question ({type(error).__name__}: {error}); "
            "repair or download the file again"
        ) from error
    return rows


def _row(record: Mapping[str, Any]) -> Row:
    row = {
        "id": str(record["id"]),
        "dataset": record["dataset"],
        "kind": record["type"] or "unknown",
        "hops": int(record.get("hops") or len(record["gold_ids"])),
        "question": record["question"],
        "answers": [record["answer"], *record["answer_aliases"]],
        "gold_ids": list(record["gold_ids"]),
    }
    if not all(isinstance(x, str) and x for x in (row["question"], *row["answers"])):
        raise ValueError("question and answers must be non-empty strings")
    return row

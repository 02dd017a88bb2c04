"""Real multi-hop questions (HotpotQA, 2WikiMultihopQA, MuSiQue) with search over their real passages, as a Task."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from absl import logging

from agentr1_jax.envs import qa
from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.data_folder import data_folder
from agentr1_jax.envs.multihop import reading, splits
from agentr1_jax.envs.multihop.expert import expert
from agentr1_jax.envs.multihop.reading import Files
from agentr1_jax.envs.multihop.rows import DATASETS, known
from agentr1_jax.envs.passes import in_passes
from agentr1_jax.envs.shares import draw, offsets_of, parse_weights, shares_of
from agentr1_jax.envs.tool_env import OnParseFailure, ToolEnv
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.search import BM25, Corpus, Passage, Retriever, SearchTool
from agentr1_jax.tools.search.tool import check_shown

INSTRUCTION = (
    "Answer the question with the help of the search tool. Before each action, reason inside <think> and </think>. "
    "Search as often as you need. When you know the answer, give it inside <answer> and </answer>, as short as "
    "possible, for example <answer> Paris </answer>."
)
DEFAULT_WEIGHTS: Mapping[str, float] = {"answer": 1.0, "format": 0.1}
NO_FILES = Files()
MIXTURE = "task.multihop.mixture"


class MultihopTask:
    """The Task of answering real multi-hop questions by search.

    Splits: `train`; `eval`, all dev questions chosen; `eval/<data set>`, those of one; `held_out`, training questions
    kept for testing. Training questions that equal one of `eval` or `held_out`, in id or (after SQuAD's normalisation)
    in text, are kept out of training.

    Args:
      data_dir: folder that holds `multihop/`; see `data_folder`.
      datasets: where training and, by default, evaluation questions come from.
      eval_datasets: where evaluation questions come from, e.g. with `musique` for a test out of domain.
      corpus: `full`, the merged passages of all data sets named; or `mini`, 160 questions over 1,890 passages.
      files: read in place of the data folder's questions (whatever their data sets are), and further passages.
      mixture: weights of the data sets among the training rows, e.g. `("hotpotqa=1", "2wikimultihopqa=2")`; empty for
        weights by size. See `shares.draw`.
      held_out: questions of each data set in `held_out_datasets` that are the split `held_out`.
      held_out_datasets: empty for all training data sets.
      instruction: what follows the question in the prompt; "" for `INSTRUCTION`.
      top_k: passages per search.
      passage_characters: longest text of a passage in a result; 0 for no limit.
      retriever_factory: makes the retriever of the search corpus, when it is first needed.
      reward_weights: weights of `envs.qa.PARTS`; None for the defaults.
      reward: `weighted` or `agentr1_v1`, whose weights are fixed; see `qa.make_reward`.
      reward_functions: functions of the user that are paid too; see `envs.reward_functions`.
      seed: of the order of training rows.
      on_parse_failure: see `ToolEnv`.
      wrap: applied to the search tool that environments offer (e.g. limits of time and size).

    Attributes:
      corpus: the passages that are searched; those of equal title and text have one id.
      counts: for `train` and `eval`, what was left out or missing, and how often; see docs/data.md.

    Raises:
      FileNotFoundError: the data are not there.
      ValueError: an unknown data set, part or key, a split without questions, or a damaged file (the message names the
        line).
    """

    name = "multihop"

    def __init__(
        self,
        data_dir: str | os.PathLike[str] = "",
        datasets: Sequence[str] = ("hotpotqa", "2wikimultihopqa"),
        eval_datasets: Sequence[str] | None = None,
        corpus: Literal["full", "mini"] = "full",
        files: Files = NO_FILES,
        mixture: Sequence[str] = (),
        held_out: int = 0,
        held_out_datasets: Sequence[str] = (),
        instruction: str = "",
        top_k: int = 5,
        passage_characters: int = 0,
        retriever_factory: Callable[[Corpus], Retriever] = BM25,
        reward_weights: Mapping[str, float] | None = None,
        reward: qa.Scheme = "weighted",
        reward_functions: Sequence[str] = (),
        seed: int = 0,
        on_parse_failure: OnParseFailure = "observe",
        wrap: Callable[[Tool], Tool] = lambda tool: tool,
    ) -> None:
        if corpus not in ("full", "mini"):
            raise ValueError(f"corpus is {corpus!r}; choose 'full' or 'mini'")
        check_shown(top_k, passage_characters)  # Before much is read; the search tool is made later.
        named = {"train": tuple(datasets), "eval": tuple(datasets if eval_datasets is None else eval_datasets)}
        for dataset in itertools.chain(*named.values()):
            known(dataset, DATASETS, "data set")
        weights = DEFAULT_WEIGHTS if reward_weights is None and reward == "weighted" else reward_weights
        self._reward = qa.make_reward(weights or {}, reward, reward_functions)
        found = reading.load(lambda: data_folder(data_dir) / "multihop", named, corpus == "mini", files)
        splits.check(found.questions, found.corpus)
        self._splits, kept_out = splits.divide(found.questions, held_out, held_out_datasets)
        for split in named:
            if not self._splits[split]:
                raise ValueError(f"no {split} questions {reading.origin(split, named, files, corpus)}")
        self.corpus = found.corpus
        self.counts = {**found.counts, "train": {**found.counts["train"], splits.KEPT_OUT: kept_out}}
        self._documents = found.documents
        self._train = splits.by_dataset(self._splits["train"])
        self._shares = shares_of(_weights(mixture, {name: len(rows) for name, rows in self._train.items()}), MIXTURE)
        self._offsets = offsets_of(len(self._shares), seed)
        self._opening = functools.partial(opening, instruction=instruction or INSTRUCTION)
        self._retriever_factory = retriever_factory
        self._top_k, self._passage_characters = top_k, passage_characters
        self._seed = seed
        self._on_parse_failure = on_parse_failure
        self._wrap = wrap
        self._log()

    @property
    def reward_parts(self) -> Sequence[str]:
        """The parts that have a weight."""
        return list(self._reward.weights)

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split.

        Training rows are drawn by the mixture, those of each data set in passes of their own, shuffled anew for each
        pass. Those of other splits come in one order that depends on nothing but their ids, again and again.

        Raises:
          ValueError: there is no such row; the message lists the splits.
        """
        if split not in self._splits or index < 0:
            raise ValueError(
                f"multihop has no row {split!r} {index}; splits are {', '.join(self._splits)} (held_out where "
                "task.multihop.held_out is set), rows start at 0"
            )
        if split != "train":
            return self._splits[split][index % len(self._splits[split])]
        k, number = draw(list(self._shares.values()), self._offsets, index)
        rows = self._train[list(self._shares)[k]]
        return in_passes(rows, number, self._seed, 2, k)

    def size(self, split: str) -> int:
        """Number of questions of a split."""
        return len(self._splits[split])

    def env(self) -> ToolEnv:
        """A fresh environment; all share one search index."""
        return ToolEnv(
            tools=[self._tool],
            opening=self._opening,
            reward=self._reward,
            metrics=qa.metrics,
            state_key=qa.state_key,
            on_parse_failure=self._on_parse_failure,
        )

    def expert(self, row: Row, seed: int) -> Expert:
        """The expert of `multihop.expert` on `row`; `seed` is not used. Raises ValueError where nobody has passages."""
        if not self.corpus:
            raise ValueError("the expert of multihop has to know the passages; name them in task.multihop.files.corpus")
        return expert(row, self._passages)

    def texts(self, count: int) -> list[str]:
        """Training questions and passages of the training data sets in turn, at most `count`."""
        questions = (row["question"] for row in self._splits["train"])
        passages = (passage.line for passage in self._documents)
        both = itertools.chain.from_iterable(itertools.zip_longest(questions, passages))
        return list(itertools.islice((text for text in both if text is not None), count))

    @functools.cached_property
    def retriever(self) -> Retriever:
        """The retriever, built where first needed: indexing 43,000 passages takes 3 s."""
        return self._retriever_factory(self.corpus)

    @functools.cached_property
    def search(self) -> SearchTool:
        """The search tool without its wrappers."""
        return SearchTool(self.retriever, self._top_k, self._passage_characters)

    @functools.cached_property
    def _tool(self) -> Tool:
        return self._wrap(self.search)

    @functools.cached_property
    def _passages(self) -> Mapping[str, Passage]:
        return {passage.id: passage for passage in self.corpus}

    def _log(self) -> None:
        logging.info("multihop: %s; %d passages", {s: len(rows) for s, rows in self._splits.items()}, len(self.corpus))
        for split, counts in self.counts.items():
            for what, count in counts.items():
                if count:
                    logging.warning("multihop: %s: %s %d (see docs/data.md)", split, what, count)
        without = sum(not row["gold_ids"] for row in self._splits["train"])
        if without and self._reward.weights.get("gold_passage"):
            logging.warning(
                "multihop: %d training rows know no gold passages and earn nothing of gold_passage", without
            )


def opening(row: Row, instruction: str = INSTRUCTION) -> list[dict[str, str]]:
    """The question, then the instructions. The tool's schema is added by the tokenizer's chat template."""
    return [{"role": "user", "content": f"Question: {row['question']}\n\n{instruction}"}]


def _weights(mixture: Sequence[str], sizes: Mapping[str, int]) -> dict[str, float]:
    """Weights of the data sets: as given, one for each; by size where none is.

    Raises:
      ValueError: a weight cannot be read, names no data set or is missing.
    """
    if not mixture:
        return {name: float(size) for name, size in sizes.items()}
    given = parse_weights(mixture, MIXTURE)
    for name in given:
        known(name, sizes, f"data set of {MIXTURE}")
    for name in sizes:
        if name not in given:
            raise ValueError(f"{MIXTURE} has no weight of {name!r}; give one, 0 to leave the data set out")
    return {name: given[name] for name in sizes}

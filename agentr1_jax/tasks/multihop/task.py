"""Real multi-hop questions (HotpotQA, 2WikiMultihopQA, MuSiQue) with search over their real passages, as a Task."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

from absl import logging
from annotated_types import Ge
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.datasets import data_folder, shuffled_row
from agentr1_jax.envs.mixture import draw, draw_offsets, normalise_weights, parse_weights
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.tasks import qa
from agentr1_jax.tasks.multihop.expert import expert
from agentr1_jax.tasks.multihop.reading import (
    SAME_AS_EVALUATION,
    Files,
    by_dataset,
    check_questions,
    divide,
    load,
    origin,
)
from agentr1_jax.tasks.multihop.rows import DATASETS, check_name
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.search import BM25, Passage, Retriever, SearchTool
from agentr1_jax.tools.search.tool import check_display
from agentr1_jax.validation import STRICT, Count, Positive, Whole

INSTRUCTION = (
    "Answer the question with the help of the search tool. Before each action, reason inside <think> and </think>. "
    "Search as often as you need. When you know the answer, give it inside <answer> and </answer>, as short as "
    "possible, for example <answer> Paris </answer>."
)
MIXTURE = "task.multihop.mixture"
RETRIEVER_KEYS = {
    "bm25": ("index",),
    "dense": ("encoder", "index", "pooling", "normalised", "query_prefix", "passage_prefix", "tokens", "dtype"),
    "http": ("url", "seconds", "cache"),
}
"""Keys that each kind of retriever reads."""


@dataclass(frozen=True, config=STRICT)
class RetrieverConfig:
    """What finds passages; see docs/tasks.md."""

    kind: Literal["bm25", "dense", "http"] = "bm25"
    """bm25: words in common; dense: nearest vectors; http: a server"""
    index: str = ""
    """bm25, dense: folder that keeps the index between runs; "" for none"""
    encoder: str = ""
    """dense: folder or hub id of a BERT, RoBERTa or XLM-RoBERTa checkpoint"""
    pooling: Literal["mean", "cls"] = "mean"
    """dense: which of a text's hidden states make its vector"""
    normalised: bool = True
    """dense: vectors have length 1 (E5, BGE); False for Contriever"""
    query_prefix: str = ""
    """dense: stands before a query; "query: " for E5"""
    passage_prefix: str = ""
    """dense: stands before a passage; "passage: " for E5"""
    tokens: Annotated[int, Ge(16)] = 512
    """dense: tokens of a text; the rest is left out"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dense: dtype of activations, and of vectors on devices"""
    url: str = ""
    """http: URL of the server's search, e.g. http://localhost:8000/retrieve"""
    seconds: Positive = 10.0
    """http: time limit of a request, in seconds"""
    cache: Whole = 10_000
    """http: answers kept in memory; 0 for none"""

    def __post_init__(self) -> None:
        needed = {"dense": "encoder", "http": "url"}.get(self.kind)
        if needed and not getattr(self, needed):
            raise ValueError(f"kind is {self.kind!r}, which needs {needed}; set it")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "kind" and field.name not in RETRIEVER_KEYS[self.kind] and value != field.default:
                kinds = " or ".join(repr(kind) for kind, keys in RETRIEVER_KEYS.items() if field.name in keys)
                raise ValueError(
                    f"{field.name} is {value!r}, which only kind {kinds} reads; kind is {self.kind!r}: change one"
                )


@dataclass(frozen=True, config=STRICT)
class MultihopConfig:
    """Keys of `task.multihop`."""

    datasets: tuple[str, ...] = ("hotpotqa", "2wikimultihopqa")
    """data sets whose questions and passages are used"""
    eval_datasets: tuple[str, ...] = ()
    """data sets whose questions evaluate; () for those of `datasets`"""
    corpus: Literal["full", "mini"] = "full"
    """full: all passages of the data sets; mini: 1,890 passages and 160 questions"""
    files: Files = Files()
    """files read in place of the data folder's; see docs/tasks.md"""
    mixture: tuple[str, ...] = ()
    """weights of the data sets in training, e.g. ("hotpotqa(weight=1)", ...); () for weights by size"""
    held_out: Whole = 0
    """training questions of each data set below that are the split held_out instead"""
    held_out_datasets: tuple[str, ...] = ()
    """data sets of the split held_out; () for all training data sets"""
    instruction: str = ""
    """what follows the question in the prompt; "" for the default"""
    top_k: Count = 3
    """passages that a search returns"""
    passage_characters: Whole = 0
    """longest text of a passage in a search result; 0 for no limit"""
    reward: qa.Scheme = "weighted"
    """weighted: the parts by `rewards`; agentr1_v1: fixed weights, see docs/tasks.md"""
    rewards: qa.QaRewards = qa.QaRewards()
    """weights of the reward parts"""
    reward_functions: tuple[str, ...] = ()
    """functions of the user that are paid too, e.g. ("my_rewards:brevity=0.2",)"""
    retriever: RetrieverConfig = RetrieverConfig()
    """what finds passages; see docs/tasks.md"""

    def __post_init__(self) -> None:
        for split, key in (("train", "datasets"), ("eval", "eval_datasets")):
            default = type(self).__dataclass_fields__[key].default
            if getattr(self.files, split) and getattr(self, key) != default:
                raise ValueError(
                    f"files.{split} names the files that are read, whatever their data sets are, and {key} is "
                    f"{getattr(self, key)}; leave one of them out"
                )
        if self.reward != "weighted":
            given, default = dataclasses.asdict(self.rewards), dataclasses.asdict(qa.QaRewards())
            changed = [name for name, weight in given.items() if weight not in (0, default[name])]
            if changed:
                raise ValueError(f"reward {self.reward!r} has fixed weights; leave out rewards.{changed[0]}")


@register("multihop", MultihopConfig)
def make_multihop(config: MultihopConfig, run: TaskContext) -> MultihopTask:
    """Make the task of real questions. Raises UserError, or what `MultihopTask` raises."""
    task = MultihopTask(config, run)
    if not task.corpus and config.retriever.kind != "http":
        raise ValueError(
            f"the question files bring no passages, and task.multihop.retriever.kind {config.retriever.kind!r} has to "
            "search some; name a corpus in task.multihop.files.corpus"
        )
    return task


def _paths(paths: Iterable[str | os.PathLike[str]], data_dir: str) -> Iterator[str]:
    """Paths with `~` and `{data}` replaced."""
    for path in paths:
        text = os.path.expanduser(os.fspath(path))
        yield text.replace("{data}", os.fspath(data_folder(data_dir))) if "{data}" in text else text


class MultihopTask:
    """The Task of answering real multi-hop questions by search.

    Splits: `train`; `eval`, all dev questions chosen; `eval/<data set>`, those of one; `held_out`, training questions
    for testing. Training questions that equal one of `eval` or `held_out`, in id or (after SQuAD's normalisation) in
    text, are left out of training.

    Args:
      config: its keys.
      run: what the run gives it.

    Attributes:
      corpus: passages that are searched; those of equal title and text have one id.
      counts: for `train` and `eval`, what was left out or missing, and how often; see docs/tasks.md.

    Raises:
      FileNotFoundError: the data are not there.
      ValueError: an unknown data set, a split without questions, or a damaged file (the message names the line).
    """

    name = "multihop"

    def __init__(self, config: MultihopConfig, run: TaskContext) -> None:
        check_display(config.top_k, config.passage_characters)  # Before much is read; the search tool is made later.
        named = {"train": config.datasets, "eval": config.eval_datasets or config.datasets}
        for dataset in itertools.chain(*named.values()):
            check_name(dataset, DATASETS, "data set")
        paid = dataclasses.asdict(config.rewards) if config.reward == "weighted" else {}
        self._reward = qa.make_reward(paid, config.reward, config.reward_functions)
        files = Files(*(tuple(_paths(paths, run.data_dir)) for paths in dataclasses.astuple(config.files)))
        found = load(lambda: data_folder(run.data_dir) / "multihop", named, config.corpus == "mini", files)
        check_questions(found.questions, found.corpus)
        self._splits, left_out = divide(found.questions, config.held_out, config.held_out_datasets)
        for split in named:
            if not self._splits[split]:
                raise ValueError(f"no {split} questions {origin(split, named, files, config.corpus)}")
        self.corpus = found.corpus
        self.counts = {**found.counts, "train": {**found.counts["train"], SAME_AS_EVALUATION: left_out}}
        self._documents = found.documents
        self._train = by_dataset(self._splits["train"])
        weights = _weights(config.mixture, {name: len(rows) for name, rows in self._train.items()})
        self._shares = normalise_weights(weights, MIXTURE)
        self._offsets = draw_offsets(len(self._shares), run.seed)
        self._config, self._run = config, run
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
        return shuffled_row(rows, number, self._run.seed, 2, k)

    def size(self, split: str) -> int:
        """Number of questions of a split."""
        return len(self._splits[split])

    def env(self) -> ToolEnv:
        """A fresh environment; all share one search index."""
        return ToolEnv(
            tools=[self._tool],
            opening=functools.partial(opening, instruction=self._config.instruction or INSTRUCTION),
            reward=self._reward,
            metrics=qa.metrics,
            state_key=qa.state_key,
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
        if self._run.make_retriever is None:
            return BM25(self.corpus)
        config = self._config
        return self._run.make_retriever(config.retriever, self.corpus, config.top_k, self._run.dispatch)

    @functools.cached_property
    def search(self) -> SearchTool:
        """The search tool without its wrappers."""
        return SearchTool(self.retriever, self._config.top_k, self._config.passage_characters)

    @functools.cached_property
    def _tool(self) -> Tool:
        return self._run.wrap(self.search)

    @functools.cached_property
    def _passages(self) -> Mapping[str, Passage]:
        return {passage.id: passage for passage in self.corpus}

    def _log(self) -> None:
        logging.info("multihop: %s; %d passages", {s: len(rows) for s, rows in self._splits.items()}, len(self.corpus))
        for split, counts in self.counts.items():
            for what, count in counts.items():
                if count:
                    logging.warning("multihop: %s: %s %d (see docs/tasks.md)", split, what, count)
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
        check_name(name, sizes, f"data set of {MIXTURE}")
    for name in sizes:
        if name not in given:
            raise ValueError(f"{MIXTURE} has no weight of {name!r}; give one, 0 to leave the data set out")
    return {name: given[name] for name in sizes}

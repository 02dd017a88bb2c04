"""Real multi-hop questions (HotpotQA, 2WikiMultihopQA, MuSiQue) with search over their real passages, as a Task."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from absl import logging
from annotated_types import Ge
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.datasets import check_row, data_folder, shuffled_row
from agentr1_jax.envs.mixture import draw, draw_offsets, normalise_weights, parse_weights
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.rewards import normalise
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.tasks import qa
from agentr1_jax.tasks.multihop.reading import Files, by_dataset, divide, load
from agentr1_jax.tasks.multihop.sources import DATASETS, check_name
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.search import BM25, Retriever, SearchTool
from agentr1_jax.tools.search.tool import check_display
from agentr1_jax.validation import STRICT, Count, Positive, Whole

INSTRUCTION = (
    "Answer the question with the help of the search tool. Before each action, reason inside <think> and </think>. "
    "Search as often as you need. When you know the answer, give it inside <answer> and </answer>, as short as "
    "possible, for example <answer> Paris </answer>."
)
MIXTURE = "task.multihop.mixture"
MOST_SEARCHES = 4
_IN_PARENTHESES = re.compile(r"\s*\([^()]*\)$")
_WORD = re.compile(r"\w+")
RETRIEVER_KEYS = {
    "bm25": ("index",),
    "dense": ("encoder", "index", "pooling", "normalised", "query_prefix", "passage_prefix", "tokens", "dtype"),
    "http": ("url", "seconds", "cache"),
}
"""Keys that each kind of retriever reads."""


@dataclass(frozen=True, config=STRICT)
class RetrieverConfig:
    """What finds passages; see docs/search.md."""

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
    """files read in place of the data folder's; see docs/questions.md"""
    mixture: tuple[str, ...] = ()
    """weights of the data sets in training, e.g. ("hotpotqa(weight=1)", ...); () for weights by size"""
    held_out: Whole = 0
    """training questions of each data set below that are the split held_out instead"""
    held_out_after: Whole = 0
    """questions of lower hash that stay in training: another held_out, on which no choice was evaluated"""
    held_out_datasets: tuple[str, ...] = ()
    """data sets of the split held_out; () for all training data sets"""
    instruction: str = ""
    """what follows the question in the prompt; "" for the default"""
    top_k: Count = 3
    """passages that a search returns"""
    passage_characters: Whole = 0
    """longest text of a passage in a search result; 0 for no limit"""
    reward: qa.Scheme = "weighted"
    """weighted: the parts by `rewards`; agentr1_v1: fixed weights, see docs/rewards.md"""
    rewards: qa.QaRewards = qa.QaRewards()
    """weights of the reward parts"""
    reward_functions: tuple[str, ...] = ()
    """functions of the user that are paid too, e.g. ("my_rewards:brevity=0.2",)"""
    retriever: RetrieverConfig = RetrieverConfig()
    """what finds passages; see docs/search.md"""

    def __post_init__(self) -> None:
        if self.held_out_after and not self.held_out:
            raise ValueError(f"held_out_after is {self.held_out_after}, and held_out is 0; set how many are held out")
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
class MultihopTask:
    """The Task of answering real multi-hop questions by search.

    Splits: `train`; `eval`, all dev questions chosen; `eval/<data set>`, those of one; `held_out`, training questions
    for testing. Training questions that equal one of `eval` or `held_out`, in id or (after SQuAD's normalisation) in
    text, are left out of training.

    Attributes:
      corpus: passages that are searched; those of equal title and text have one id.
      counts: for `train` and `eval`, what was left out or missing, and how often; see docs/questions.md.

    Raises:
      FileNotFoundError: the data are not there.
      ValueError: an unknown data set, a split without questions, no passages to search, or a damaged file (the message
        names the line).
    """

    name = "multihop"

    def __init__(self, config: MultihopConfig, run: TaskContext) -> None:
        check_display(config.top_k, config.passage_characters)  # Before much is read; the search tool is made later.
        named = {"train": config.datasets, "eval": config.eval_datasets or config.datasets}
        for dataset in itertools.chain(*named.values()):
            check_name(dataset, DATASETS, "data set")
        self._reward = qa.make_reward(dataclasses.asdict(config.rewards), config.reward, config.reward_functions)
        files = _expand(config.files, run.data_dir)
        data = load(lambda: data_folder(run.data_dir) / "multihop", named, config.corpus == "mini", files)
        if not data.corpus and config.retriever.kind != "http":
            raise ValueError(
                f"the question files bring no passages, and task.multihop.retriever.kind {config.retriever.kind!r} has "
                "to search some; name a corpus in task.multihop.files.corpus"
            )
        self._splits, same = divide(data.questions, config.held_out, config.held_out_datasets, config.held_out_after)
        for split, datasets in named.items():
            if not self._splits[split]:
                raise ValueError(f"no {split} questions in {', '.join(map(str, getattr(files, split) or datasets))}")
        self.corpus, self._documents = data.corpus, data.documents
        self.counts = {**data.counts, "train": {**data.counts["train"], "same_as_evaluation": same}}
        self._train = by_dataset(self._splits["train"])
        shares = normalise_weights(_weights(config.mixture, self._train), MIXTURE)
        self._names, self._shares = list(shares), list(shares.values())
        self._offsets = draw_offsets(len(shares), run.seed)
        self._config, self._run = config, run
        logging.info("multihop: %s; %d passages", {s: len(rows) for s, rows in self._splits.items()}, len(self.corpus))
        for split, counts in self.counts.items():
            for what, count in counts.items():
                if count:
                    logging.warning("multihop: %s: %s %d (see docs/questions.md)", split, what, count)

    @property
    def reward_parts(self) -> Sequence[str]:
        """The parts that have a weight."""
        return list(self._reward.weights)

    def row(self, split: str, index: int) -> Row:
        """Return row `index` of a split. Raises ValueError where there is no such row.

        Training rows are drawn by the mixture, those of each data set in passes of their own, shuffled anew for each
        pass. Those of other splits come in one order that depends on nothing but their ids, again and again.
        """
        check_row(self.name, self._splits, split, index)
        if split != "train":
            return self._splits[split][index % len(self._splits[split])]
        k, number = draw(self._shares, self._offsets, index)
        return shuffled_row(self._train[self._names[k]], number, self._run.seed, 2, k)

    def size(self, split: str) -> int:
        """Return the number of questions of a split."""
        return len(self._splits[split])

    def env(self) -> ToolEnv:
        """Return a fresh environment; all share one search index."""
        instruction = self._config.instruction or INSTRUCTION
        return ToolEnv([self._tool], functools.partial(_opening, instruction), self._reward, qa.metrics, qa.state_key)

    def expert(self, row: Row, seed: int) -> Expert:
        """Return the expert on a row; `seed` is not used. Raises ValueError where nobody has passages."""
        if not self.corpus:
            raise ValueError("the expert of multihop has to know the passages; name them in task.multihop.files.corpus")
        return make_expert(row, self._titles)

    def texts(self, count: int) -> list[str]:
        """Return training questions and passages of the training data sets in turn, at most `count`.

        Left out are passages that are gold for a question of another split, and for none of training: a policy that
        was pretrained on them would have read what it is tested on.
        """
        gold = {split: {i for row in rows for i in row["gold_ids"]} for split, rows in self._splits.items()}
        unread = set[str]().union(*(ids for split, ids in gold.items() if split != "train")) - gold["train"]
        lines = {passage.line for passage in self.corpus if passage.id in unread}  # `_documents` may have other ids.
        questions = (row["question"] for row in self._splits["train"])
        passages = (passage.line for passage in self._documents if passage.line not in lines)
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
    def _titles(self) -> Mapping[str, str]:
        return {passage.id: passage.title for passage in self.corpus}


def _opening(instruction: str, row: Row) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question: {row['question']}\n\n{instruction}"}]


def _expand(files: Files, data_dir: str) -> Files:
    """The files with `~` and `{data}` replaced in their paths."""

    def expand(path: str | Path) -> str:
        text = os.path.expanduser(os.fspath(path))
        return text.replace("{data}", os.fspath(data_folder(data_dir))) if "{data}" in text else text

    return Files(*(tuple(map(expand, paths)) for paths in dataclasses.astuple(files)))


def _weights(mixture: Sequence[str], rows: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Weights of the data sets: as given, one for each; by size where none is."""
    if not mixture:
        return {name: float(len(own)) for name, own in rows.items()}
    given = parse_weights(mixture, MIXTURE)
    for name in given:
        check_name(name, rows, f"data set of {MIXTURE}")
    for name in rows:
        if name not in given:
            raise ValueError(f"{MIXTURE} has no weight of {name!r}; give one, 0 to leave the data set out")
    return {name: given[name] for name in rows}


def make_expert(row: Row, titles: Mapping[str, str]) -> Expert:
    """Return an expert that knows the gold passages, and searches for one only when it has read its title.

    Each step searches for the first gold passage (see `order_titles`) that no result has shown and whose title stands
    in the question or in a result, by the title as it is written there. Where there is none, it searches for the
    question itself, once. Then it answers. So its queries could be written from what was read, in the results as they
    came back: the policy reads them truncated to `budget.observation_tokens`, and may have missed a name behind.

    Args:
      row: of a multi-hop task, with gold passages and answers.
      titles: passage id -> title; at least of the row's gold passages.
    """
    missing = order_titles([titles[i] for i in row["gold_ids"]], row.get("evidences", ()))
    read = row["question"]
    asked: list[str] = []

    def respond(observation: str | None) -> str:
        nonlocal read
        if observation:
            read = f"{read}\n{observation}"
            lines = observation.split("\n")
            missing[:] = [title for title in missing if not any(line.startswith(f"- {title}: ") for line in lines)]
        written = (find_mention(read, title) for title in missing)
        queries = [*(name for name in written if name), *([row["question"]] if missing else [])]
        query = next((query for query in queries if query not in asked), None)
        if query is None or len(asked) == MOST_SEARCHES:
            return render_answer(row["answers"][0])
        asked.append(query)
        # Behind a space, so that its first word is tokenised as where it was read.
        return render_call("search", {"query": f" {query}"})

    return respond


def order_titles(titles: Sequence[str], evidences: Sequence[Sequence[str]]) -> list[str]:
    """Return titles in the order of the hops: the object of a triple (subject, relation, object) behind its subject.

    All that this leaves open stays as it is.
    """

    def name(title: str) -> str:
        return normalise(_IN_PARENTHESES.sub("", title))

    triples = [(name(subject), name(object)) for subject, _, object in evidences]
    left, out = list(titles), []
    while left:
        names = {name(title) for title in left}
        later = {object for subject, object in triples if subject in names and subject != object}
        out.append(next((title for title in left if name(title) not in later), left[0]))
        left.remove(out[-1])
    return out


def find_mention(text: str, title: str) -> str | None:
    """Return the title as `text` writes it, without what it has in parentheses behind it; None where it does not.

    Case and punctuation may differ.
    """
    words = _WORD.findall(_IN_PARENTHESES.sub("", title))
    pattern = r"\W+".join(map(re.escape, words))
    found = re.search(rf"\b{pattern}\b", text, re.IGNORECASE) if words else None
    return found[0] if found else None

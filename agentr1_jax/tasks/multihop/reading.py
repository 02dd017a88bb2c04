"""Everything a task is made of, read: questions of both splits, the corpus to search, passages to train on."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pydantic.dataclasses import dataclass

from agentr1_jax.tasks.multihop.originals import GOLD_UNKNOWN
from agentr1_jax.tasks.multihop.rows import Question
from agentr1_jax.tasks.multihop.sources import Source, read_source
from agentr1_jax.tools.search import Corpus, Passage, read_corpus
from agentr1_jax.tools.search.corpus import content_hash, ids_by_content
from agentr1_jax.validation import STRICT

MINI_EVAL_EVERY = 5
_PREFIXES = {"h": "hotpotqa", "w": "2wikimultihopqa", "m": "musique"}  # of ids in the data folder's corpora


@dataclass(frozen=True, config=STRICT)
class Files:
    """Files to read in place of the data folder's; an empty tuple keeps those. See docs/data.md."""

    train: tuple[str | Path, ...] = ()
    """questions to train on; ~ and {data}, the data folder, are replaced in paths"""
    eval: tuple[str | Path, ...] = ()
    """questions to evaluate on"""
    corpus: tuple[str | Path, ...] = ()
    """further passages to search"""


@dataclasses.dataclass(frozen=True)
class Found:
    """What was read: questions and counts by split (`train`, `eval`), the search corpus, the training passages."""

    questions: Mapping[str, Sequence[Question]]
    counts: Mapping[str, Mapping[str, int]]
    corpus: Corpus
    documents: Corpus


def load(folder: Callable[[], Path], named: Mapping[str, Sequence[str]], mini: bool, files: Files) -> Found:
    """Reads all there is to read.

    Args:
      folder: finds the data folder's `multihop/`; called only where something of it is needed.
      named: data sets of each split, as far as the data folder's are read.
      mini: reads the small data there.
      files: read instead, for the splits that they name; their corpora are added.
    """
    ours = {split: datasets for split, datasets in named.items() if not getattr(files, split)}
    found = Found({}, {}, [], [])
    if ours:
        found = read_mini(folder(), ours) if mini else read_folder(folder(), ours)
    return unify_ids(add_files(found, files))


def read_folder(folder: Path, named: Mapping[str, Sequence[str]]) -> Found:
    """The data folder's questions of the data sets named for each split, and the corpora of all of them."""
    suffix = {"train": "train", "eval": "dev"}
    sources = {
        split: [read_source(folder / f"questions_{dataset}_{suffix[split]}.jsonl.gz") for dataset in datasets]
        for split, datasets in named.items()
    }
    corpora = {d: read_corpus(folder / f"corpus_{d}.jsonl.gz") for d in sorted(set(itertools.chain(*named.values())))}
    return Found(
        questions={split: [q for source in of for q in source.questions] for split, of in sources.items()},
        counts={split: _total(of) for split, of in sources.items()},
        corpus=list(itertools.chain(*corpora.values())),
        documents=[passage for d, corpus in corpora.items() if d in named.get("train", ()) for passage in corpus],
    )


def read_mini(folder: Path, named: Mapping[str, Sequence[str]]) -> Found:
    """The 160 questions for quick tests: MuSiQue's and every fifth of the others are for evaluation."""
    source = read_source(folder / "mini_questions.jsonl.gz")
    corpus = read_corpus(folder / "mini_corpus.jsonl.gz")
    questions: dict[str, list[Question]] = {split: [] for split in named}
    for i, question in enumerate(source.questions):
        dataset = question.row["dataset"]
        split = "eval" if dataset == "musique" or i % MINI_EVAL_EVERY == 0 else "train"
        if dataset in named.get(split, ()):
            questions[split].append(question)
    trained = [p for p in corpus if _PREFIXES.get(p.id[:1], "") in (*named.get("train", ()), "")]
    return Found(questions, {split: {} for split in named}, corpus, trained)


def add_files(found: Found, files: Files) -> Found:
    """Adds the named corpora, and the questions of named files with the passages of their contexts.

    A passage of a context that the corpus has already, by title and text, takes the corpus's id.
    """
    if files == Files():
        return found
    corpus = merge_corpora(found.corpus, *(read_corpus(path) for path in files.corpus))
    names = ids_by_content(corpus)
    questions, counts, documents = dict(found.questions), dict(found.counts), list(found.documents)
    for split, paths in (("train", files.train), ("eval", files.eval)):
        if not paths:
            continue
        sources = [read_source(path) for path in paths]
        contexts = {p.id: p for source in sources for q in source.questions for p in q.passages}
        ids = {p.id: names.setdefault(content_hash(p), p.id) for p in contexts.values()}
        corpus = merge_corpora(corpus, [p for p in contexts.values() if ids[p.id] == p.id])
        questions[split] = [_rename_gold(q, ids) for source in sources for q in source.questions]
        counts[split] = _total(sources)
        if split == "train":
            documents = list(contexts.values()) or corpus
    return Found(questions, counts, corpus, documents)


def unify_ids(found: Found) -> Found:
    """The same with one id, the first, for passages of equal title and text: whichever is found counts as gold.

    Where there are no passages, a server has them under ids of its own. No gold passage could be told from others then,
    so questions have none, which is counted.
    """
    if not found.corpus:
        questions, counts = {}, {}
        for split, of_split in found.questions.items():
            lost = sum(bool(q.row["gold_ids"]) for q in of_split)
            questions[split] = [dataclasses.replace(q, row={**q.row, "gold_ids": []}) for q in of_split]
            counts[split] = dict(found.counts[split], **{GOLD_UNKNOWN: found.counts[split].get(GOLD_UNKNOWN, 0) + lost})
        return dataclasses.replace(found, questions=questions, counts=counts)
    first: dict[bytes, str] = {}
    twins = {p.id: name for p in found.corpus if (name := first.setdefault(content_hash(p), p.id)) != p.id}
    return dataclasses.replace(
        found,
        questions={split: [_rename_gold(q, twins) for q in of_split] for split, of_split in found.questions.items()},
        corpus=[dataclasses.replace(p, id=twins[p.id]) if p.id in twins else p for p in found.corpus],
    )


def origin(split: str, named: Mapping[str, Sequence[str]], files: Files, corpus: str) -> str:
    """Where the questions of a split were looked for."""
    paths = getattr(files, split)
    return f"in {', '.join(map(str, paths))}" if paths else f"of {named[split]} in the {corpus} data"


def merge_corpora(*corpora: Corpus) -> list[Passage]:
    """The passages of all corpora, those of equal ids once.

    Raises:
      ValueError: an id stands for two passages.
    """
    found: dict[str, Passage] = {}
    for passage in itertools.chain(*corpora):
        first = found.setdefault(passage.id, passage)
        if first != passage:
            raise ValueError(
                f"the id {passage.id!r} stands for two passages, {first.title!r} and {passage.title!r}; give the "
                "corpora of task.multihop.files.corpus ids of their own"
            )
    return list(found.values())


def _rename_gold(question: Question, ids: Mapping[str, str]) -> Question:
    gold = list(dict.fromkeys(ids.get(i, i) for i in question.row["gold_ids"]))
    return dataclasses.replace(question, row={**question.row, "gold_ids": gold}, passages=())


def _total(sources: Iterable[Source]) -> dict[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for source in sources:
        total.update(source.counts)
    return dict(total)

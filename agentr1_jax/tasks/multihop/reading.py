"""The parts of the task: questions of every split, the corpus to search, passages to train on."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.rewards import normalise
from agentr1_jax.tasks.multihop.sources import DATASETS, GOLD_UNKNOWN, Question, Source, check_name, read_source
from agentr1_jax.tools.search import Corpus, Passage, read_corpus
from agentr1_jax.tools.search.corpus import content_hash, ids_by_content
from agentr1_jax.validation import STRICT

_PREFIXES = {"h": "hotpotqa", "w": "2wikimultihopqa", "m": "musique"}  # of ids in the data folder's corpora


@dataclass(frozen=True, config=STRICT)
class Files:
    """Files to read in place of the data folder's; an empty tuple keeps those. See docs/questions.md."""

    train: tuple[str | Path, ...] = ()
    """questions to train on; ~ and {data}, the data folder, are replaced in paths"""
    eval: tuple[str | Path, ...] = ()
    """questions to evaluate on"""
    corpus: tuple[str | Path, ...] = ()
    """further passages to search"""


@dataclasses.dataclass(frozen=True)
class MultihopData:
    """What was read: questions and counts by split (`train`, `eval`), the search corpus, the training passages."""

    questions: Mapping[str, Sequence[Question]]
    counts: Mapping[str, Mapping[str, int]]
    corpus: Corpus
    documents: Corpus


def load(folder: Callable[[], Path], named: Mapping[str, Sequence[str]], mini: bool, files: Files) -> MultihopData:
    """Read questions and passages, and check them.

    Args:
      folder: finds the data folder's `multihop/`; called only where something of it is needed.
      named: data sets of `train` and `eval`, as far as the data folder's are read.
      mini: reads the small data there.
      files: read instead, for the splits that they name; their corpora are added.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or its questions cannot be used; the message names file, line and id.
    """
    ours = {split: datasets for split, datasets in named.items() if not getattr(files, split)}
    data = MultihopData({}, {}, [], [])
    if ours:
        data = _read_mini(folder(), ours) if mini else _read_folder(folder(), ours)
    if files != Files():
        data = _add_files(data, files)
    data = _unify_ids(data) if data.corpus else _drop_gold(data)
    _check_questions(data)
    return data


def _read_folder(folder: Path, named: Mapping[str, Sequence[str]]) -> MultihopData:
    """The data folder's questions of the data sets named for each split, and the corpora of all of them."""
    suffix = {"train": "train", "eval": "dev"}
    sources = {
        split: [read_source(folder / f"questions_{dataset}_{suffix[split]}.jsonl.gz") for dataset in datasets]
        for split, datasets in named.items()
    }
    corpora = {d: read_corpus(folder / f"corpus_{d}.jsonl.gz") for d in sorted(set(itertools.chain(*named.values())))}
    return MultihopData(
        questions={split: [q for source in of for q in source.questions] for split, of in sources.items()},
        counts={split: _total(of) for split, of in sources.items()},
        corpus=list(itertools.chain(*corpora.values())),
        documents=[passage for d, corpus in corpora.items() if d in named.get("train", ()) for passage in corpus],
    )


def _read_mini(folder: Path, named: Mapping[str, Sequence[str]]) -> MultihopData:
    """The 160 questions for quick tests: MuSiQue's and every fifth of the others are for evaluation."""
    source = read_source(folder / "mini_questions.jsonl.gz")
    corpus = read_corpus(folder / "mini_corpus.jsonl.gz")
    questions: dict[str, list[Question]] = {split: [] for split in named}
    for i, question in enumerate(source.questions):
        dataset = question.row["dataset"]
        split = "eval" if dataset == "musique" or i % 5 == 0 else "train"
        if dataset in named.get(split, ()):
            questions[split].append(question)
    documents = [p for p in corpus if _PREFIXES[p.id[:1]] in named.get("train", ())]
    return MultihopData(questions, {split: {} for split in named}, corpus, documents)


def _add_files(data: MultihopData, files: Files) -> MultihopData:
    """Add the named corpora, and the questions of named files with the passages of their contexts.

    A passage of a context that the corpus has already, by title and text, takes the corpus's id.
    """
    corpus = _merge_corpora(data.corpus, *(read_corpus(path) for path in files.corpus))
    known = ids_by_content(corpus)
    questions, counts, documents = dict(data.questions), dict(data.counts), data.documents
    for split, paths in (("train", files.train), ("eval", files.eval)):
        if not paths:
            continue
        sources = [read_source(path) for path in paths]
        contexts = {p.id: p for source in sources for q in source.questions for p in q.passages}
        ids = {p.id: known.setdefault(content_hash(p), p.id) for p in contexts.values()}
        corpus = _merge_corpora(corpus, [p for p in contexts.values() if ids[p.id] == p.id])
        questions[split] = [_rename_gold(q, ids) for source in sources for q in source.questions]
        counts[split] = _total(sources)
        if split == "train":
            documents = list(contexts.values()) or corpus
    return MultihopData(questions, counts, corpus, documents)


def _merge_corpora(*corpora: Corpus) -> list[Passage]:
    """The passages of all corpora, those of equal ids once."""
    merged: dict[str, Passage] = {}
    for passage in itertools.chain(*corpora):
        first = merged.setdefault(passage.id, passage)
        if first != passage:
            raise ValueError(
                f"the id {passage.id!r} stands for two passages, {first.title!r} and {passage.title!r}; give the "
                "corpora of task.multihop.files.corpus ids of their own"
            )
    return list(merged.values())


def _unify_ids(data: MultihopData) -> MultihopData:
    """The same with one id, the first, for passages of equal title and text: whichever is found counts as gold."""
    first: dict[bytes, str] = {}
    twins = {p.id: name for p in data.corpus if (name := first.setdefault(content_hash(p), p.id)) != p.id}
    return dataclasses.replace(
        data,
        questions={split: [_rename_gold(q, twins) for q in of_split] for split, of_split in data.questions.items()},
        corpus=[dataclasses.replace(p, id=twins[p.id]) if p.id in twins else p for p in data.corpus],
    )


def _rename_gold(question: Question, ids: Mapping[str, str]) -> Question:
    gold = list(dict.fromkeys(ids.get(i, i) for i in question.row["gold_ids"]))
    return dataclasses.replace(question, row={**question.row, "gold_ids": gold}, passages=())


def _drop_gold(data: MultihopData) -> MultihopData:
    """The same without gold passages: a server has ids of its own, by which none could be told from others."""
    questions, counts = {}, {}
    for split, of_split in data.questions.items():
        lost = sum(bool(q.row["gold_ids"]) for q in of_split)
        questions[split] = [dataclasses.replace(q, row={**q.row, "gold_ids": []}) for q in of_split]
        counts[split] = {**data.counts[split], GOLD_UNKNOWN: data.counts[split].get(GOLD_UNKNOWN, 0) + lost}
    return dataclasses.replace(data, questions=questions, counts=counts)


def _total(sources: Iterable[Source]) -> dict[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for source in sources:
        total.update(source.counts)
    return dict(total)


def _check_questions(data: MultihopData) -> None:
    """Refuse MuSiQue's test questions in training, an id of two questions, and gold passages that are nowhere."""
    for question in data.questions["train"]:
        if question.row["dataset"] == "musique" and question.is_test:
            raise ValueError(
                f"{question.where}: a question of MuSiQue's dev or test set, which is for evaluation only; train on "
                "musique_ans_v1.0_train.jsonl, or name another file in task.multihop.files.train"
            )
    passages = {passage.id for passage in data.corpus}
    for split, questions in data.questions.items():
        seen: dict[str, str] = {}
        for question in questions:
            name = question.row["id"]
            if name in seen:
                raise ValueError(f"{question.where}: the id {name!r} occurs twice in {split}, first in {seen[name]}")
            seen[name] = question.where
            for gold in question.row["gold_ids"]:
                if gold not in passages:
                    raise ValueError(
                        f"{question.where}: the gold passage {gold!r} of question {name!r} is not in the corpus; name "
                        "the corpus that has it in task.multihop.files.corpus"
                    )


def divide(
    questions: Mapping[str, Sequence[Question]], count: int, datasets: Sequence[str], after: int = 0
) -> tuple[dict[str, list[Row]], int]:
    """Return rows of every split, and how many training questions were dropped as they equal one of another split.

    All splits but `train` are ordered by hash, so that the first n rows are a fair sample whatever the order of files.

    Args:
      questions: of `train` and `eval`.
      count: number of questions of each data set that are held out of training: those of the lowest hashes.
      datasets: data sets of which questions are held out; empty for all training data sets.
      after: number of questions of still lower hashes that are trained on.

    Raises:
      ValueError: a data set has too few questions, or no training questions at all.
    """
    new = _drop_duplicates(questions["train"], questions["eval"])
    own = by_dataset(q.row for q in new)
    for dataset in datasets:
        check_name(dataset, own, "data set of task.multihop.held_out_datasets")
    held_ids = set()
    for dataset in (datasets or own) if count else ():
        if len(own[dataset]) <= count + after:
            raise ValueError(
                f"task.multihop.held_out is {count}{f' after {after}' * (after > 0)}, and {dataset!r} has "
                f"{len(own[dataset])} training questions: none would be left; lower task.multihop.held_out, or name "
                "other data sets in task.multihop.held_out_datasets"
            )
        held_ids |= {row["id"] for row in sorted(own[dataset], key=_hash)[after : after + count]}
    held = [q for q in new if q.row["id"] in held_ids]
    train = [q.row for q in _drop_duplicates([q for q in new if q.row["id"] not in held_ids], held)]
    evaluation = sorted((q.row for q in questions["eval"]), key=_hash)
    rows = {"train": train, "eval": evaluation}
    rows |= {f"eval/{name}": own_rows for name, own_rows in by_dataset(evaluation).items()}
    if held:
        rows["held_out"] = sorted((q.row for q in held), key=_hash)
    return rows, len(questions["train"]) - len(held) - len(train)


def _drop_duplicates(questions: Sequence[Question], others: Iterable[Question]) -> list[Question]:
    """The questions that no other one equals, in id or (after SQuAD's normalisation) in text."""
    ids, texts = set(), set()
    for other in others:
        ids.add(other.row["id"])
        texts.add(normalise(other.row["question"]))
    return [q for q in questions if q.row["id"] not in ids and normalise(q.row["question"]) not in texts]


def _hash(row: Row) -> str:
    return hashlib.sha256(f"{row['dataset']}/{row['id']}".encode()).hexdigest()


def by_dataset(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each data set, the known ones first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["dataset"], []).append(row)
    order = {name: i for i, name in enumerate(DATASETS)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))

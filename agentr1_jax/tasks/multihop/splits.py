"""Which questions are for training, which for testing, and which must not be either."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from agentr1_jax.envs.base import Row
from agentr1_jax.envs.rewards import normalise
from agentr1_jax.tasks.multihop.rows import DATASETS, Question, check_known
from agentr1_jax.tools.search import Corpus

SAME_AS_EVALUATION = "same_as_evaluation"


def divide(
    questions: Mapping[str, Sequence[Question]], count: int, datasets: Sequence[str]
) -> tuple[dict[str, list[Row]], int]:
    """Rows of every split, and how many training questions were kept out because they equal one of another split.

    Args:
      questions: of `train` and `eval`.
      count: of questions of each data set that are held out of training.
      datasets: of which questions are held out; empty for all training data sets.

    Raises:
      ValueError: a data set has too few questions, or no training questions at all.
    """
    if count < 0:
        raise ValueError(f"task.multihop.held_out is {count}; it must be 0 or more")
    new = drop_duplicates(questions["train"], questions["eval"])
    have = by_dataset(q.row for q in new)
    for dataset in datasets:
        check_known(dataset, have, "data set of task.multihop.held_out_datasets")
    held = choose_held_out(new, datasets or list(have), count)
    names = {q.row["id"] for q in held}
    train = drop_duplicates([q for q in new if q.row["id"] not in names], held)
    # By hash, so that the first n rows are a fair sample whatever the order of files is.
    of_eval = by_dataset(sorted((q.row for q in questions["eval"]), key=place))
    rows = {
        "train": [q.row for q in train],
        "eval": sorted((q.row for q in questions["eval"]), key=place),
        **{f"eval/{name}": own for name, own in of_eval.items()},
    }
    if held:
        rows["held_out"] = sorted((q.row for q in held), key=place)
    return rows, len(questions["train"]) - len(held) - len(train)


def choose_held_out(questions: Sequence[Question], datasets: Sequence[str], count: int) -> list[Question]:
    """The `count` questions of each data set whose ids have the lowest hash: whatever the order of files is.

    Raises:
      ValueError: a data set has fewer than `count` + 1 questions.
    """
    chosen = []
    for dataset in datasets if count else ():
        own = sorted((q for q in questions if q.row["dataset"] == dataset), key=lambda q: place(q.row))
        if len(own) <= count:
            raise ValueError(
                f"task.multihop.held_out is {count}, and {dataset!r} has {len(own)} training questions: none would be "
                "left; lower task.multihop.held_out, or name other data sets in task.multihop.held_out_datasets"
            )
        chosen += own[:count]
    return chosen


def drop_duplicates(questions: Sequence[Question], others: Iterable[Question]) -> list[Question]:
    """The questions that no other one equals, in id or (after SQuAD's normalisation) in text."""
    ids, texts = set(), set()
    for other in others:
        ids.add(other.row["id"])
        texts.add(normalise(other.row["question"]))
    return [q for q in questions if q.row["id"] not in ids and normalise(q.row["question"]) not in texts]


def place(row: Row) -> str:
    """Where a row comes in an order that depends on nothing but the ids."""
    return hashlib.sha256(f"{row['dataset']}/{row['id']}".encode()).hexdigest()


def check(questions: Mapping[str, Sequence[Question]], corpus: Corpus) -> None:
    """Refuses MuSiQue's test questions in training, an id that two questions have, and gold passages that are nowhere.

    Raises:
      ValueError: the message names file, line and id.
    """
    for question in questions.get("train", ()):
        if question.row["dataset"] == "musique" and question.is_test:
            raise ValueError(
                f"{question.where}: a question of MuSiQue's dev or test set, which is for evaluation only; train on "
                "musique_ans_v1.0_train.jsonl, or name another file in task.multihop.files.train"
            )
    passages = {passage.id for passage in corpus}
    for split, of_split in questions.items():
        seen: dict[str, str] = {}
        for question in of_split:
            name = question.row["id"]
            if name in seen:
                raise ValueError(f"{question.where}: the id {name!r} occurs twice in {split}, first in {seen[name]}")
            seen[name] = question.where
            for gold in question.row["gold_ids"]:
                if passages and gold not in passages:  # A remote retriever has its own.
                    raise ValueError(
                        f"{question.where}: the gold passage {gold!r} of question {name!r} is not in the corpus; name "
                        "the corpus that has it in task.multihop.files.corpus"
                    )


def by_dataset(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each data set, the known ones first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["dataset"], []).append(row)
    order = {name: i for i, name in enumerate(DATASETS)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))

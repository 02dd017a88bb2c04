"""BM25 over the real passages reproduces the figures that the data's README states for the whole dev files."""

from __future__ import annotations

import gzip
import json

import pytest

FIGURES = {"hotpotqa": (0.51, 0.945), "2wikimultihopqa": (0.335, 0.925), "musique": (0.09, 0.515)}


@pytest.mark.parametrize("dataset", FIGURES)
def test_one_search_rarely_does_and_one_search_per_gold_title_does(full_bm25, data_dir, dataset):
    with gzip.open(data_dir / "multihop" / f"questions_{dataset}_dev.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    titles = {passage.id: passage.title for passage in full_bm25.corpus}

    def found(query, top_k):
        (hits,) = full_bm25.search([query], top_k)
        return {hit.passage.id for hit in hits}

    by_question = sum(set(row["gold_ids"]) <= found(row["question"], 5) for row in rows) / len(rows)
    by_titles = sum(all(gold in found(titles[gold], 3) for gold in row["gold_ids"]) for row in rows) / len(rows)
    assert (by_question, by_titles) == pytest.approx(FIGURES[dataset], abs=0.02)

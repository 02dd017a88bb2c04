"""Compares retrievers over the real passages in one run: BM25 in memory, BM25 over mapped files, BM25 behind HTTP.

    python -m experiments.bench_search [--queries=300 --batch=32 --retrievers=memory,mapped,http --json=FILE]

Queries are questions of the dev files. Rounds of all retrievers alternate, so that they share whatever else the machine
does, and the fastest of each counts; ratios tell more than times. Memory is that of a fresh process each, beyond what
it holds before the retriever is made: private memory is its own, mapped files are shared by all processes that use the
index. Batches pay where a call costs something by itself, as over HTTP; BM25 answers one query after the other.
"""

from __future__ import annotations

import concurrent.futures
import http.server
import json
import multiprocessing
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.table import Table

from agentr1_jax.envs.multihop import DATASETS, data_folder, read_source
from agentr1_jax.tools.search import BM25, Corpus, Passage, RemoteRetriever, Retriever, read_corpus

QUERIES = flags.DEFINE_integer("queries", 300, "in a round", lower_bound=1)
BATCH = flags.DEFINE_integer("batch", 32, "queries of a batched call", lower_bound=1)
TOP_K = flags.DEFINE_integer("top_k", 5, "passages of a result", lower_bound=1)
ROUNDS = flags.DEFINE_integer("rounds", 3, "the fastest of so many counts", lower_bound=1)
DATA_DIR = flags.DEFINE_string("data_dir", "", "folder of the data; by default AGENTR1_DATA, then ../shared/data")
SEED = flags.DEFINE_integer("seed", 0, "of the choice of queries")
JSON = flags.DEFINE_string("json", "", "file for the figures")

Figures = dict[str, float]


def in_memory(corpus: Corpus, folder: Path) -> BM25:
    """BM25 whose index is built here."""
    del folder
    return BM25(corpus)


def mapped(corpus: Corpus, folder: Path) -> BM25:
    """BM25 over the saved index."""
    return BM25.load(folder, corpus)


def behind_http(corpus: Corpus, folder: Path) -> RemoteRetriever:
    """The same behind a server of this process, which speaks the protocol of `RemoteRetriever`; nothing is cached."""
    bm25 = BM25.load(folder, corpus)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = bm25.search(asked["queries"], asked["topk"])
            documents = [[({"id": h.passage.id, "contents": h.passage.text}, h.score) for h in hits] for hits in found]
            result = [[{"document": document, "score": score} for document, score in hits] for hits in documents]
            answer = json.dumps({"result": result}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return RemoteRetriever(f"http://127.0.0.1:{server.server_port}/retrieve", cache=0)


MAKERS: Mapping[str, Callable[[Corpus, Path], Retriever]] = {
    "memory": in_memory,
    "mapped": mapped,
    "http": behind_http,
}
"""What can be compared: from the passages and the folder of the saved BM25 index to a retriever, `search` not async."""

RETRIEVERS = flags.DEFINE_list("retrievers", list(MAKERS), "those to compare, of " + ", ".join(MAKERS))


def read(data_dir: str) -> list[Passage]:
    """The merged passages of all data sets."""
    folder = data_folder(data_dir) / "multihop"
    return [passage for name in DATASETS for passage in read_corpus(folder / f"corpus_{name}.jsonl.gz")]


def questions(count: int) -> list[str]:
    """`count` questions of the dev files, again from the first where there are fewer."""
    folder = data_folder(DATA_DIR.value) / "multihop"
    sources = [read_source(folder / f"questions_{name}_dev.jsonl.gz") for name in DATASETS]
    texts = [question.row["question"] for source in sources for question in source.questions]
    chosen = random.Random(SEED.value).sample(texts, min(count, len(texts)))
    return [chosen[i % len(chosen)] for i in range(count)]


def resident() -> Figures:
    """MiB of this process that are its own and that are mapped files; none where the system does not tell."""
    status = Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    return {name: int(kib) / 1024 for name, kib in re.findall(r"Rss(Anon|File):\s+(\d+) kB", text)}


def memory(name: str, data_dir: str, folder: Path, queries: Sequence[str], top_k: int) -> Figures:
    """What a retriever adds to a process, in MiB, once it has answered; to be called in a fresh one."""
    corpus = read(data_dir)
    BM25(corpus[:1])  # Imports the library.
    before = resident()
    retriever = MAKERS[name](corpus, folder)
    retriever.search(queries, top_k)
    after = resident()
    return {f"{kind.lower()}_mib": after[kind] - before[kind] for kind in after}


def seconds_per_query(retriever: Retriever, queries: Sequence[str], batch: int, top_k: int) -> float:
    """Wall time of a query, asked in calls of `batch`."""
    begin = time.perf_counter()
    for start in range(0, len(queries), batch):
        retriever.search(queries[start : start + batch], top_k)
    return (time.perf_counter() - begin) / len(queries)


def measured(names: Sequence[str], queries: Sequence[str], folder: Path) -> dict[str, Figures]:
    """The figures of each retriever; see the columns of `table`. `folder` gets the saved index."""
    corpus = read(DATA_DIR.value)
    BM25(corpus).save(folder)
    retrievers: dict[str, Retriever] = {}
    figures: dict[str, Figures] = {}
    for name in names:
        begin = time.perf_counter()
        retrievers[name] = MAKERS[name](corpus, folder)
        figures[name] = {"ready_seconds": time.perf_counter() - begin}
    for _ in range(ROUNDS.value):
        for name, retriever in retrievers.items():
            for key, batch in (("query_ms", 1), ("batched_ms", BATCH.value)):
                spent = 1000 * seconds_per_query(retriever, queries, batch, TOP_K.value)
                figures[name][key] = min(spent, figures[name].get(key, spent))
    for name in names:
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            figures[name] |= fresh.submit(memory, name, DATA_DIR.value, folder, queries, TOP_K.value).result()
    return figures


def table(figures: Mapping[str, Figures]) -> Table:
    """A row for each retriever; each figure with its ratio to that of the first row."""
    out = Table(title=f"{QUERIES.value} queries, top {TOP_K.value}; in brackets: times the first row")
    columns = {
        "ready_seconds": "ready after s",
        "query_ms": "ms a query",
        "batched_ms": f"in batches of {BATCH.value}",
        "anon_mib": "private MiB",
        "file_mib": "mapped MiB",
    }
    out.add_column("retriever")
    for title in [*columns.values(), "alone / batched"]:
        out.add_column(title, justify="right")
    first = next(iter(figures.values()))
    for name, own in figures.items():
        cells = [
            f"{own[key]:.3g} ({own[key] / first[key]:.2f})" if own.get(key) and first.get(key) else "-"
            for key in columns
        ]
        out.add_row(name, *cells, f"{own['query_ms'] / own['batched_ms']:.2f}")
    return out


def main(argv: Sequence[str]) -> None:
    """The table, and the figures as JSON."""
    del argv
    unknown = [name for name in RETRIEVERS.value if name not in MAKERS]
    if unknown or not RETRIEVERS.value:
        raise app.UsageError(f"--retrievers={','.join(RETRIEVERS.value)}: choose of {', '.join(MAKERS)}")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            figures = measured(RETRIEVERS.value, questions(QUERIES.value), Path(scratch) / "bm25")
    except (FileNotFoundError, ValueError) as error:
        raise app.UsageError(str(error)) from error
    Console().print(table(figures))
    if JSON.value:
        with open(os.path.expanduser(JSON.value), "w", encoding="utf-8") as out:
            json.dump(figures, out, indent=2)


if __name__ == "__main__":
    app.run(main)

"""Serve a corpus over HTTP to runs with `task.multihop.retriever.kind=http`, by the protocol of docs/search.md.

    python -m experiments.serve_retriever CORPUS... [--retriever=bm25] [--port=8000]
    python -m experiments.serve_retriever CORPUS... --retriever="dense(encoder=FOLDER, query_prefix='query: ')"
    python -m experiments.train ... --config.task.multihop.retriever.kind=http \\
      --config.task.multihop.retriever.url=http://localhost:8000/retrieve

CORPUS is a file of passages `{"id", "title", "text"}`, such as `FOLDER/multihop/corpus_hotpotqa.jsonl.gz`; several
serve as one. The arguments of `--retriever` are the keys of `task.multihop.retriever`. `GET /health` tells what is
served.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

from absl import flags, logging

from agentr1_jax.errors import UserError, user_error
from agentr1_jax.http import Refusal, make_server, serve
from agentr1_jax.registry import parse_call
from agentr1_jax.runtime import config as configs
from agentr1_jax.tasks.multihop.task import RetrieverConfig
from agentr1_jax.tools.search import Hit, Passage, Retriever, read_corpus
from agentr1_jax.tools.search.tool import Hits
from agentr1_jax.validation import from_section
from experiments.setup import make_retriever

RETRIEVER = flags.DEFINE_string("retriever", "bm25", "what finds passages: bm25 or dense(encoder=...)")
HOST = flags.DEFINE_string("host", "127.0.0.1", "address to listen at; whoever reaches it can search")
PORT = flags.DEFINE_integer("port", 8000, "port to listen at")
MOST_QUERIES, MOST_PASSAGES = 4096, 1000
"""Queries of a request, and passages for each of them."""


def main(argv: Sequence[str]) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    server = make_retriever_server(argv[1:], RETRIEVER.value, HOST.value, PORT.value)
    logging.info("serving at http://%s:%d/retrieve", *server.server_address[:2])
    serve(server)


def make_retriever_server(paths: Sequence[str], retriever: str, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server of the corpora at `paths`, searched by what the flag `retriever` says; see `http.make_server`."""
    with user_error():
        call, corpus = parse_call(retriever, "--retriever"), read_corpora(paths)
    config = from_section(RetrieverConfig, "--retriever", {"kind": call.name, **call.named})
    if config.kind == "http" or call.values:
        raise UserError(f"--retriever is {retriever!r}; write bm25, bm25(index=FOLDER) or dense(encoder=...)")
    return make_server(make_routes(make_retriever(config, corpus, 3), len(corpus), config.kind), host, port)


def read_corpora(paths: Sequence[str]) -> list[Passage]:
    """Read several corpora as one; those of equal ids once. Raises ValueError where an id stands for two passages."""
    corpus: dict[str, Passage] = {}
    for path in paths:
        for passage in read_corpus(path):
            if corpus.setdefault(passage.id, passage) != passage:
                raise ValueError(
                    f"{path}: the id {passage.id!r} is another passage's, too; give each id to one passage"
                )
    return list(corpus.values())


def make_routes(retriever: Retriever, passages: int, kind: str) -> Mapping[str, Callable[..., Mapping[str, Any]]]:
    """Return what a server of a retriever answers; see `http.make_server`."""
    lock = threading.Lock()

    def retrieve(queries: Any, topk: Any = 3, return_scores: bool = True) -> Mapping[str, Any]:
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise Refusal(400, "queries must be a list of texts")
        if len(queries) > MOST_QUERIES or not isinstance(topk, int) or not 1 <= topk <= MOST_PASSAGES:
            raise Refusal(400, f"at most {MOST_QUERIES} queries, and topk from 1 to {MOST_PASSAGES}")
        found = retriever.search(queries, topk)
        if inspect.isawaitable(found):
            with lock:  # Programs of several devices must be started by one thread at a time; see DenseRetriever.
                found = asyncio.run(_value(found))
        return {"result": [[_item(hit, return_scores) for hit in hits] for hits in found]}

    return {"POST /retrieve": retrieve, "GET /health": lambda: {"retriever": kind, "passages": passages}}


async def _value(waiting: Awaitable[Sequence[Hits]]) -> Sequence[Hits]:
    return await waiting


def _item(hit: Hit, with_score: bool) -> Mapping[str, Any]:
    passage = hit.passage
    document = {**vars(passage), "contents": f'"{passage.title}"\n{passage.text}'}
    return {"document": document, "score": float(hit.score)} if with_score else document


if __name__ == "__main__":
    configs.run_main(main, ["CORPUS", "[CORPUS...]"])

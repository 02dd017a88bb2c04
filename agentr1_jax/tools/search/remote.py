"""A retriever behind HTTP, in the protocol of the retrieval servers of Search-R1, verl and SkyRL.

`POST {"queries": [...], "topk": k, "return_scores": true}` is answered by
`{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, one list per query, where `contents` has the
title in quotes on its first line; `title` and `text` may stand beside it or in its place.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.errors import hide_credentials
from agentr1_jax.http import HttpError, is_http_url, quote, request, with_credentials
from agentr1_jax.text.tokenizer import replace_surrogates
from agentr1_jax.tools.search.corpus import content_hash, ids_by_content
from agentr1_jax.tools.search.tool import Corpus, Hit, Passage, RetrieverError


class RemoteRetriever:
    """A Retriever that asks a server: many queries in one request, and none that was asked before.

    A failed request is not repeated here: `wrappers.Retried` repeats the call. Errors are of the kinds of
    `http.HttpError`, or `bad_answer`.

    Args:
      url: address of the server's search, e.g. `http://localhost:8000/retrieve`; see `http.with_credentials` for
        credentials. Proxies are not used, and redirects not followed.
      seconds: time limit of a request, from connecting to the last byte of the answer.
      cache: number of answers in memory, those used last; 0 for none. One answer belongs to one query and `top_k`.
      corpus: passages of the task; a hit that is among them, by title and text, takes the id that it has there. Others
        keep the id of the server.

    Raises:
      ValueError: `url` is none, or a variable that it names is not set.
    """

    blocking = True
    batches = True

    def __init__(self, url: str, seconds: float = 10.0, *, cache: int = 10_000, corpus: Corpus = ()) -> None:
        if not is_http_url(url):
            raise ValueError(f"url is {hide_credentials(url)!r}; it must be like http://localhost:8000/retrieve")
        with_credentials(url)
        self.url = url
        self.seconds = seconds
        self._ids = ids_by_content(corpus)
        self._most = cache
        self._cache: collections.OrderedDict[tuple[str, int], list[Hit]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return at most `top_k` hits for each query, best first. May be called from several threads.

        Raises:
          RetrieverError: see the class.
        """
        known = self._from_cache(queries, top_k)
        unknown = [query for query in dict.fromkeys(queries) if query not in known]
        if unknown:
            asked = dict(zip(unknown, self._ask(unknown, top_k), strict=True))
            self._store(asked, top_k)
            known |= asked
        return [known[query] for query in queries]

    def _from_cache(self, queries: Sequence[str], top_k: int) -> dict[str, list[Hit]]:
        with self._lock:
            known = {query: self._cache[query, top_k] for query in queries if (query, top_k) in self._cache}
            for query in known:
                self._cache.move_to_end((query, top_k))
        return known

    def _store(self, asked: Mapping[str, list[Hit]], top_k: int) -> None:
        with self._lock:
            for query, hits in asked.items():
                self._cache[query, top_k] = hits
                self._cache.move_to_end((query, top_k))
            while len(self._cache) > self._most:
                self._cache.popitem(last=False)

    def _ask(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        body = json.dumps({"queries": list(queries), "topk": top_k, "return_scores": True}).encode()
        try:
            answer = request("POST", self.url, body, self.seconds)
        except HttpError as error:
            raise RetrieverError(error.kind, str(error)) from error
        found = _parse(answer, len(queries), top_k, hide_credentials(self.url))
        return [[self._with_corpus_id(hit) for hit in hits] for hits in found]

    def _with_corpus_id(self, hit: Hit) -> Hit:
        name = self._ids.get(content_hash(hit.passage), hit.passage.id)
        return dataclasses.replace(hit, passage=dataclasses.replace(hit.passage, id=name))


def _parse(answer: bytes, count: int, top_k: int, url: str) -> list[list[Hit]]:
    """Return the hits of an answer to `count` queries. Raises RetrieverError where it is none."""
    try:
        result = json.loads(answer)["result"]
        if not isinstance(result, list) or not all(isinstance(found, list) for found in result):
            raise TypeError("its result is no list of lists")
        if len(result) != count:
            raise ValueError(f"it has results of {len(result)} queries for {count}")
        return [[_hit(item) for item in found[:top_k]] for found in result]
    except Exception as error:  # It can be wrong in more ways than could be listed.
        why = f"{type(error).__name__}: {error}"
        raise RetrieverError("bad_answer", f"{url}: not what a retriever answers ({why}): {quote(answer)}") from error


def _hit(item: Any) -> Hit:
    """Return a hit from `{"document", "score"}`; from a document alone it has the score 0."""
    score = float(item.get("score") or 0.0)
    if not math.isfinite(score):
        raise ValueError(f"the score {score} is not finite")
    return Hit(_passage(item.get("document", item)), score)


def _passage(document: Any) -> Passage:
    """Return the passage of a document; one without id gets a hash of its text."""
    if isinstance(document, str):
        document = {"contents": document}
    title, text = document.get("title"), document.get("text")
    if text is None:
        text = document["contents"]
        first, _, rest = text.partition("\n")
        if rest and title in (None, first, _unquote(first)):
            title, text = _unquote(first), rest
    title, text = replace_surrogates(title or ""), replace_surrogates(text)
    key = document.get("id")
    if key is None:
        key = hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()
    return Passage(replace_surrogates(str(key)), title, text)


def _unquote(title: str) -> str:
    return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title

"""The HTTP retriever against a real server on the loopback, and from config to each kind of retriever."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import http.server
import json
import logging
import re
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax import http as requests
from agentr1_jax.errors import UserError, hide_credentials
from agentr1_jax.tasks.multihop.task import RETRIEVER_KEYS, RetrieverConfig
from agentr1_jax.tools import base
from agentr1_jax.tools.search import BM25, Hit, Passage, RemoteRetriever, RetrieverError, SearchTool, remote
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.validation import from_section
from experiments.setup import make_retriever

FOREVER = 60.0


def found(query, count):
    return [
        {"document": {"id": f"{query}{n}", "contents": f'"About {query}"\ntext {n}'}, "score": 1 / (n + 1)}
        for n in range(count)
    ]


def answer(request):
    return {"result": [found(query, request["topk"]) for query in request["queries"]]}


class Server(http.server.ThreadingHTTPServer):
    """Answers as the functions of `plan` say, one a request; when they run out, as a retrieval server does."""

    daemon_threads, block_on_close = True, False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan, self.requests, self.release = [], [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/retrieve"

    def handle_error(self, request, client_address):
        """A client that gave up is no error."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, request))
        (self.server.plan.pop(0) if self.server.plan else says(answer(request)))(self)

    def log_message(self, *args):
        """Silent."""


def says(body, status=200):
    """A whole answer, of JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def act(handler):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return act


def hangs(handler):
    handler.server.release.wait(FOREVER)


def trickles(head, packet=b" "):
    """A packet now and then: each is in time, the answer never is."""

    def act(handler):
        handler.close_connection = True
        handler.wfile.write(head)
        while not handler.server.release.wait(0.02):
            handler.wfile.write(packet)

    return act


def drops(handler):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def speaks_no_http(handler):
    handler.wfile.write(b"220 mail.example ESMTP\r\n")
    handler.close_connection = True


@pytest.fixture(scope="module")
def shared_server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(shared_server):
    shared_server.plan, shared_server.requests = [], []
    shared_server.release.clear()
    yield shared_server
    shared_server.release.set()


def asked(server):
    return [request["queries"] for _, request in server.requests]


def kind_of(retriever, queries=("x",)):
    with pytest.raises(RetrieverError) as raised:
        retriever.search(queries, 2)
    assert str(raised.value) == raised.value.message and retriever.url in raised.value.message
    return raised.value.kind


def test_the_protocol_is_that_of_search_r1(server):
    hits = RemoteRetriever(f"{server.url}?index=wiki").search(["a", "b\ud800"], 2)
    body = {"queries": ["a", "b\ud800"], "topk": 2, "return_scores": True}
    assert server.requests == [("/retrieve?index=wiki", body)]
    assert [[hit.passage.id for hit in found] for found in hits] == [["a0", "a1"], ["b?0", "b?1"]]
    assert hits[0][1].passage == Passage("a1", "About a", "text 1") and hits[0][1].score == 0.5


@pytest.mark.parametrize(
    ("item", "passage", "score"),
    [
        ({"document": {"id": 7, "title": "T", "text": "x\ny"}, "score": "0.5"}, Passage("7", "T", "x\ny"), 0.5),
        ({"document": {"id": "a", "title": "T", "contents": "T\nx"}}, Passage("a", "T", "x"), 0.0),
        ({"document": {"id": "a", "title": "T", "contents": "x\ny"}, "score": 2}, Passage("a", "T", "x\ny"), 2.0),
        ({"id": "a", "contents": "T\nx"}, Passage("a", "T", "x"), 0.0),
        ({"document": '"T"\nx'}, Passage("1a197d7466b716e7", "T", "x"), 0.0),
        ({"document": {"id": "a", "contents": "no title"}, "score": None}, Passage("a", "", "no title"), 0.0),
        ({"document": {"id": "a", "title": None, "text": "\ud800"}}, Passage("a", "", "?"), 0.0),
    ],
)
def test_its_variants_are_understood(server, item, passage, score):
    server.plan = [says({"result": [[item] * 5, []]})]
    hits, none = RemoteRetriever(server.url).search(["x", "y"], 3)
    assert hits == [Hit(passage, score)] * 3 and none == []


def test_what_was_asked_before_is_not_asked_again(server):
    retriever = RemoteRetriever(server.url)
    first = retriever.search(["a", "b", "a"], 2)
    assert first[0] == first[2] and asked(server) == [["a", "b"]]
    assert retriever.search(["b", "c"], 2)[0] == first[1] and asked(server) == [["a", "b"], ["c"]]
    assert len(retriever.search(["a"], 3)[0]) == 3 and asked(server)[2:] == [["a"]]  # Another top_k.
    assert retriever.search(["a", "b", "c"], 2)[:2] == first[:2] and len(server.requests) == 3


def test_the_cache_keeps_what_was_used_last(server):
    retriever = RemoteRetriever(server.url, cache=2)
    for query in "abac":  # c drives out b.
        retriever.search([query], 1)
    server.requests.clear()
    retriever.search(["a", "c"], 1)
    assert asked(server) == []
    retriever.search(["b"], 1)
    assert asked(server) == [["b"]] and len(retriever._cache) == 2
    none = RemoteRetriever(server.url, cache=0)
    assert none.search(["a"], 1) == none.search(["a"], 1) and len(asked(server)) == 3


@pytest.mark.parametrize(
    "act",
    [
        hangs,
        trickles(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"),
        trickles(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"),
        trickles(b"HTTP/1.0 200 OK\r\n\r\n"),
        trickles(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        trickles(b"HTTP/1.0 500 Error\r\n\r\n"),
        trickles(b"HTTP/1.1 200 OK\r\nX: "),
        trickles(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_a_slow_answer_is_given_up(server, act):
    server.plan = [act]
    start = time.monotonic()
    assert kind_of(RemoteRetriever(server.url, seconds=0.2)) == "timeout"
    assert time.monotonic() - start < FOREVER / 4


def test_passages_that_the_task_has_take_its_ids(server):
    corpus = [Passage("p7", "About a", "text\n 0"), Passage("twin", " About a", "text 0"), Passage("a1", "Other", "x")]
    retriever = RemoteRetriever(server.url, corpus=corpus)
    for _ in range(2):  # From the server, then from the cache.
        (hits,) = retriever.search(["a"], 3)
        assert [hit.passage.id for hit in hits] == ["p7", "a1", "a2"]
    assert hits[0].passage == Passage("p7", "About a", "text 0")


@pytest.mark.parametrize("act", [drops, speaks_no_http])
def test_a_broken_connection_is_told(server, act):
    server.plan = [act]
    retriever = RemoteRetriever(server.url)
    assert kind_of(retriever) == "unreachable"
    assert retriever.search(["x"], 2)  # Failures are not cached.


def test_where_nobody_listens_that_is_told():
    assert kind_of(RemoteRetriever("http://127.0.0.1:9")) == "unreachable"


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (says({}, 404), "http_error"),
        (says(b"", 307), "http_error"),
        (says({}, 429), "http_429"),
        (says({}, 503), "http_5xx"),
    ],
)
def test_a_status_is_told(server, act, kind):
    server.plan = [act]
    assert kind_of(RemoteRetriever(server.url)) == kind and len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe\x00",
        b"null",
        b'{"result": {}}',
        b'{"result": []}',
        b'{"result": [[], []]}',
        b'{"result": [[3]]}',
        b"[" * 100_000,
    ]
    + [b'{"result": [[{"document": {"contents": "x"}, "score": NaN}]]}']
    + [b'{"result": [[{"document": {"text": "x"}, "score": 1' + b"0" * 400 + b"}]]}"],
)
def test_garbage_is_told(server, body):
    server.plan = [says(body)]
    assert kind_of(RemoteRetriever(server.url)) == "bad_answer"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["document", "contents", "text", "title", "id", "score"]), inner, max_size=3)
    ),
)


@given(JSON | JSON.map(lambda item: {"document": item, "score": 1}), st.integers(1, 3))
def test_no_answer_gets_anything_but_hits_or_an_error_out_of_the_parser(item, count):
    body = json.dumps({"result": [[item]] * count}).encode()
    try:
        hits = remote._parse(body, 1, 2, "here")
    except RetrieverError as error:
        assert error.kind == "bad_answer"
    else:
        assert count == 1 and [type(hit.passage.text) for (hit,) in hits] == [str]
        json.dumps([hit.passage.line for (hit,) in hits], allow_nan=False).encode()


@pytest.mark.parametrize("written", ["p%40ss", "$RETRIEVER_PASSWORD", "${RETRIEVER_PASSWORD}"])
def test_credentials_reach_the_server_and_no_message_or_log(server, monkeypatch, caplog, written):
    monkeypatch.setenv("RETRIEVER_PASSWORD", "p@ss")
    caplog.set_level(logging.INFO)
    asked = []

    def refuse(handler):
        asked.append((handler.path, base64.b64decode(handler.headers["Authorization"].split()[1])))
        says({}, 403)(handler)

    server.plan = [refuse, says({})]
    retriever = RemoteRetriever(server.url.replace("//", f"//user:{written}@") + f"?shard=3&api_key={written}")
    for kind in ("http_error", "bad_answer"):
        with pytest.raises(RetrieverError, match=r"@127\.0\.0\.1:.*shard=3") as caught:
            retriever.search(["a"], 1)
        assert caught.value.kind == kind and "p%40ss" not in f"{caught.value}{caplog.text}"
    assert asked == [("/retrieve?shard=3&api_key=p%40ss", b"user:p@ss")]


def test_credentials_that_are_not_there_are_told_at_the_start(monkeypatch):
    monkeypatch.delenv("RETRIEVER_PASSWORD", raising=False)
    with pytest.raises(ValueError, match="environment variable RETRIEVER_PASSWORD is not set"):
        RemoteRetriever("http://user:$RETRIEVER_PASSWORD@localhost:8000")
    with pytest.raises(ValueError, match=r"\*\*\*@localhost.*credentials are stored in no file"):
        RemoteRetriever(hide_credentials("http://user:secret@localhost:8000"))
    with pytest.raises(ValueError) as caught:
        RemoteRetriever("ftp://user:secret@localhost:8000")
    assert "secret" not in str(caught.value)


def floods(handler):
    """An answer without length or end."""
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
    while not handler.server.release.is_set():
        handler.wfile.write(b" " * 500)


@pytest.mark.parametrize("act", [says(b" " * 1001), floods])
def test_a_huge_answer_is_not_read(server, monkeypatch, act):
    monkeypatch.setattr(requests, "MAX_BYTES", 1000)
    server.plan = [act]
    assert kind_of(RemoteRetriever(server.url)) == "huge_answer"
    assert RemoteRetriever(server.url).search(["a"], 1)


def test_an_error_quotes_but_little_of_the_answer(server):
    server.plan = [says(b"x" * 100_000, 500)]
    with pytest.raises(RetrieverError, match=r"status 500: 'x{200}'$"):
        RemoteRetriever(server.url).search(["a"], 1)


def test_calls_of_many_trajectories_are_one_request(server):
    meter = ToolMetrics()
    tool = wrap_tool(
        SearchTool(RemoteRetriever(server.url), 2), ToolsConfig(batch_milliseconds=50, backoff_seconds=0), meter
    )
    server.plan = [says({}, 502)]

    async def main():
        return await asyncio.gather(*(base.call(tool, {"query": query}) for query in "abcab"))

    results = asyncio.run(main())
    assert [result.data["ids"] for result in results] == [[f"{query}0", f"{query}1"] for query in "abcab"]
    assert asked(server)[0] == ["a", "b", "c"] and meter.metrics()["tools/error/http_5xx"] == 5
    assert meter.metrics()["tools/failures"] == 0


CORPUS = [Passage(f"p{i}", f"Title {i}", f"text {word} number {i}") for i, word in enumerate("red green blue".split())]


def config_of(**keys):
    return from_section(RetrieverConfig, "task.multihop.retriever", keys)


def test_every_key_belongs_to_a_kind():
    names = {field.name for field in dataclasses.fields(RetrieverConfig)}
    assert names == {"kind", *(key for keys in RETRIEVER_KEYS.values() for key in keys)}


def test_bm25_is_the_default_and_keeps_its_index(tmp_path):
    assert isinstance(make_retriever(RetrieverConfig(), CORPUS, 2), BM25)
    config = config_of(index=str(tmp_path))
    for _ in range(2):
        ((hit,),) = make_retriever(config, CORPUS, 2).search(["green"], 2)
        assert hit.passage.id == "p1"
    assert len(list((tmp_path / "bm25").iterdir())) == 1


def test_http(tmp_path):
    retriever = make_retriever(config_of(kind="http", url="http://localhost:9/retrieve", seconds=3.0), CORPUS, 2)
    assert isinstance(retriever, RemoteRetriever)
    assert (retriever.url, retriever.seconds) == ("http://localhost:9/retrieve", 3.0)
    assert set(retriever._ids.values()) == {"p0", "p1", "p2"}  # What it finds takes these ids.
    for url in ("localhost", "ftp://a/b", "http://", "http://a:b", "http://[a"):
        with pytest.raises(UserError, match=f"task.multihop.retriever: url is {re.escape(repr(url))}; it must be like"):
            make_retriever(config_of(kind="http", url=url), CORPUS, 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "sparse"}, "task.multihop.retriever.kind is 'sparse'; it must be 'bm25', 'dense' or 'http'"),
        ({"kind": "http"}, "task.multihop.retriever: kind is 'http', which needs url; set it"),
        ({"encoder": "x"}, "retriever: encoder is 'x', which only kind 'dense' reads; .*kind is 'bm25': change"),
        ({"kind": "http", "url": "http://x", "index": "y"}, "index is 'y', which only kind 'bm25' or 'dense' reads"),
        ({"kind": "dense", "encoder": "x", "seconds": 1.0}, "seconds is 1.0, which only kind 'http' reads"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        config_of(**keys)

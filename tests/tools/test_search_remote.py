"""The HTTP retriever against a real server on the loopback: good answers, slow ones, garbage, broken connections."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import socket
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax import http as requests
from agentr1_jax.tools import base
from agentr1_jax.tools.search import Passage, RemoteRetriever, RetrieverError, SearchTool, remote
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool

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


def trickles(handler):
    """A packet now and then: each is in time, the answer never is."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.server.release.wait(0.02):
        handler.wfile.write(b" ")


def trickles_headers(handler):
    while not handler.server.release.wait(0.02):
        handler.wfile.write(b"H")


def trickles_in_http_1_0(handler):
    """Only the end of the connection would end the answer."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n")
    handler.close_connection = True
    while not handler.server.release.wait(0.02):
        handler.wfile.write(b" ")


def ends_in_http_1_0(handler):
    body = json.dumps({"result": [found("a", 1)]}).encode()
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n" + body)
    handler.close_connection = True


def drops(handler):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def resets(handler):
    """Half an answer, then a reset in place of an orderly end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result"')
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True


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
        ({"document": {"id": "a", "contents": "no title"}, "score": None}, Passage("a", "", "no title"), 0.0),
        ({"document": {"id": "a", "title": None, "text": "\ud800"}}, Passage("a", "", "?"), 0.0),
    ],
)
def test_its_variants_are_understood(server, item, passage, score):
    server.plan = [says({"result": [[item]]})]
    ((hit,),) = RemoteRetriever(server.url).search(["x"], 3)
    assert hit.passage == passage and hit.score == score


def test_passages_without_id_get_one_of_their_own(server):
    items = [{"document": "T\nx"}, {"document": {"contents": '"T"\nx'}}, {"document": {"contents": "T\ny"}}]
    server.plan = [says({"result": [[{**item, "score": 1} for item in items]]})]
    (hits,) = RemoteRetriever(server.url).search(["x"], 3)
    one, same, other = [hit.passage.id for hit in hits]
    assert one == same != other and one


def test_more_results_than_asked_for_are_left_out_and_none_are_none(server):
    server.plan = [says({"result": [found("a", 9), []]})]
    hits = RemoteRetriever(server.url).search(["a", "b"], 3)
    assert [len(found) for found in hits] == [3, 0]


def test_what_was_asked_before_is_not_asked_again(server):
    retriever = RemoteRetriever(server.url)
    first = retriever.search(["a", "b", "a"], 2)
    assert first[0] == first[2] and asked(server) == [["a", "b"]]
    assert retriever.search(["b", "c"], 2)[0] == first[1] and asked(server) == [["a", "b"], ["c"]]
    assert len(retriever.search(["a"], 3)[0]) == 3 and asked(server)[2:] == [["a"]]  # Another top_k.
    assert retriever.search(["a", "b", "c"], 2)[:2] == first[:2] and len(server.requests) == 3
    assert (retriever.hits, retriever.misses) == (4, 5)


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
    assert none.search(["a"], 1) == none.search(["a"], 1) and len(asked(server)) == 3 and none.hits == 0


def test_failures_are_not_cached(server):
    retriever = RemoteRetriever(server.url)
    server.plan = [says({}, 500)]
    assert kind_of(retriever, ["a"]) == "http_5xx"
    assert retriever.search(["a"], 1) and len(server.requests) == 2


@pytest.mark.parametrize("act", [hangs, trickles, trickles_headers, trickles_in_http_1_0])
def test_a_slow_answer_is_given_up(server, act):
    server.plan = [act]
    start = time.monotonic()
    assert kind_of(RemoteRetriever(server.url, seconds=0.2)) == "timeout"
    assert time.monotonic() - start < FOREVER / 4


def test_an_answer_may_end_with_its_connection(server):
    server.plan = [ends_in_http_1_0]
    assert len(RemoteRetriever(server.url).search(["a"], 2)[0]) == 1


def test_passages_that_the_task_has_take_its_ids(server):
    corpus = [Passage("p7", "About a", "text\n 0"), Passage("twin", " About a", "text 0"), Passage("a1", "Other", "x")]
    retriever = RemoteRetriever(server.url, corpus=corpus)
    for _ in range(2):  # From the server, then from the cache.
        (hits,) = retriever.search(["a"], 3)
        assert [hit.passage.id for hit in hits] == ["p7", "a1", "a2"]
    assert hits[0].passage == Passage("p7", "About a", "text 0") and retriever.hits == 1


@pytest.mark.parametrize("act", [drops, resets, speaks_no_http])
def test_a_broken_connection_is_told(server, act):
    server.plan = [act]
    assert kind_of(RemoteRetriever(server.url)) == "unreachable"


def test_where_nobody_listens_that_is_told():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    assert kind_of(RemoteRetriever(f"http://127.0.0.1:{port}")) == "unreachable"


@pytest.mark.parametrize(("status", "kind"), [(500, "http_5xx"), (503, "http_5xx"), (429, "http_429")])
def test_a_passing_failure_is_tried_again(server, status, kind, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.plan = [says({}, status), drops, says({}, status)]
    retriever = RemoteRetriever(server.url, attempts=4, backoff=10)
    assert len(retriever.search(["a"], 2)[0]) == 2 and asked(server) == [["a"]] * 4
    for pause, full in zip(pauses, (10, 20, 30), strict=True):  # Doubled, up to the most.
        assert full / 2 <= pause <= full
    server.plan = [says({}, status)] * 4
    assert kind_of(retriever, ["b"]) == kind and not server.plan


@pytest.mark.parametrize("act", [says(b"<html>busy</html>"), says({}, 404), says(b"", 307)])
def test_what_will_not_pass_is_not_tried_again(server, act):
    server.plan = [act]
    assert kind_of(RemoteRetriever(server.url, attempts=3)) in ("bad_answer", "http_error")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe\x00", b"null", b"[]", b"{}", b'{"result": {}}', b'{"result": null}', b'{"result": []}']
    + [b'{"result": [[], []]}', b'{"result": [{}]}', b'{"result": [[3]]}', b'{"result": [["text"]]}']
    + [b'{"result": [[{"document": {}}]]}', b'{"result": [[{"document": {"contents": 3}}]]}']
    + [b'{"result": [[{"document": {"contents": "x"}, "score": "much"}]]}', b"[" * 100_000]
    + [b'{"result": [[{"document": {"contents": "x"}, "score": NaN}]]}']
    + [b'{"result": [[{"document": {"text": 3}}]]}', b'{"result": [[{"document": {"title": 3, "text": "x"}}]]}']
    + [b'{"result": [[{"document": {"text": "x"}, "score": 1' + b"0" * 400 + b"}]]}", b'{"result": [[]'],
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


def test_a_huge_answer_is_not_read(server, monkeypatch):
    monkeypatch.setattr(requests, "MAX_BYTES", 1000)
    server.plan = [says(b" " * 1001)]
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


def test_a_server_that_stays_down_ends_as_a_typed_failure(server):
    tool = wrap_tool(
        SearchTool(RemoteRetriever(server.url), 2), ToolsConfig(max_attempts=2, backoff_seconds=0), ToolMetrics()
    )
    server.plan = [says(b"soon", 503)] * 2
    result = asyncio.run(base.call(tool, {"query": "a"}))
    assert result.error == base.ToolError("http_5xx", "infrastructure") and "status 503: 'soon'" in result.content


@pytest.mark.parametrize(
    ("field", "value"),
    [("url", "localhost:8000"), ("url", "ftp://a/b"), ("url", "http://"), ("url", "http://a:b"), ("url", "http://[a")]
    + [("seconds", 0), ("seconds", float("nan")), ("attempts", 0), ("backoff", -1), ("cache", -1)],
)
def test_settings_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"task\.multihop\.retriever\.{field} is "):
        RemoteRetriever(**{"url": "http://localhost"} | {field: value})

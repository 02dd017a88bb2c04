"""A corpus served over HTTP: what a run finds there is what it would find at home."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import program

from agentr1_jax import http as requests
from agentr1_jax.errors import UserError
from agentr1_jax.tools import base
from agentr1_jax.tools.search import BM25, Hit, Passage, RemoteRetriever, SearchTool
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool

serve_retriever = program("serve_retriever")
ROOT = Path(__file__).parents[2]
CORPUS = [
    Passage(f"p{i}", f'The "{word}"\u2028 one', f"text\nof {word} {i}") for i, word in enumerate("red blue red".split())
]
QUERIES = ["red", "blue one", "nothing here", "red"]


class Slow:
    """An asynchronous retriever, as a dense one is; finds the first passages, and never twice at once."""

    blocking, batches = False, True

    def __init__(self):
        self.busy = threading.Lock()

    async def search(self, queries, top_k):
        assert self.busy.acquire(blocking=False)
        found = [[Hit(passage, 0.5) for passage in CORPUS[:top_k]] for _ in queries]
        self.busy.release()
        return found


@pytest.fixture
def served(request):
    retriever = request.param()
    server = requests.make_server(serve_retriever.make_routes(retriever, 3, "x"), "127.0.0.1", 0)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield retriever, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


bm25 = pytest.mark.parametrize("served", [lambda: BM25(CORPUS)], indirect=True)


@bm25
def test_the_remote_retriever_finds_what_the_local_one_does(served):
    local, url = served
    remote = RemoteRetriever(f"{url}/retrieve")
    for top_k in (1, 2, 5):
        assert remote.search(QUERIES, top_k) == local.search(QUERIES, top_k)
    health = json.loads(requests.request("GET", f"{url}/health", None, 10))
    assert health == {"retriever": "x", "passages": 3}
    plain = requests.request("POST", f"{url}/retrieve", b'{"queries": ["blue"], "topk": 1, "return_scores": false}', 10)
    assert json.loads(plain)["result"][0][0]["contents"] == f'"{CORPUS[1].title}"\n{CORPUS[1].text}'


@pytest.mark.parametrize("served", [Slow], indirect=True)
def test_an_asynchronous_retriever_is_asked_by_one_thread_at_a_time(served):
    _, url = served
    found = []

    def ask():
        found.extend(RemoteRetriever(f"{url}/retrieve", 60.0, cache=0).search(QUERIES, 2))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[hit.passage for hit in hits] for hits in found] == [CORPUS[:2]] * 32


@bm25
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "cannot be read"),
        (b"[1]", "cannot be read"),
        (b'{"queries": ["a"], "top": 3}', "unexpected keyword argument 'top'"),
        (b'{"queries": "a"}', "queries must be a list of texts"),
        (b'{"queries": ["a"], "topk": 0}', "topk from 1 to 1000"),
        (json.dumps({"queries": ["a"] * 5000}).encode(), "at most 4096 queries"),
    ],
)
def test_what_is_no_search_is_refused_in_one_sentence(served, body, message):
    _, url = served
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(f"{url}/retrieve", body), timeout=60)
    with raised.value as answer:
        assert answer.code == 400 and message in json.loads(answer.read())["error"]


@bm25
def test_requests_are_bounded_in_length_and_time(served, monkeypatch):
    _, url = served
    host = url.removeprefix("http://")
    for length in (str(requests.MAX_BYTES + 1), "-1", "x"):
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("POST", "/retrieve", headers={"Content-Length": length})
        with connection.getresponse() as answer:
            assert answer.status == 413 and "a request has at most" in json.loads(answer.read())["error"]
        connection.close()
    monkeypatch.setattr(requests, "REQUEST_SECONDS", 0.05)
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.putrequest("POST", "/retrieve")
    connection.putheader("Content-Length", "1000000")
    connection.endheaders()
    with pytest.raises(ConnectionError):  # Each packet is in time, the request never is.
        while True:
            connection.sock.settimeout(0.01)
            connection.send(b" ")
            try:
                answer = connection.sock.recv(1000)
            except TimeoutError:
                continue
            assert b" 408 " in answer or b"did not arrive within" in answer
            raise ConnectionError
    connection.close()


@bm25
def test_a_request_whose_head_trickles_is_given_up(served, monkeypatch):
    _, url = served
    monkeypatch.setattr(requests, "REQUEST_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        connection.settimeout(0.01)
        with pytest.raises(ConnectionError):  # Each packet is in time, the request never is.
            while True:
                connection.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1000):
                        raise ConnectionError


def test_connections_are_limited_in_number(monkeypatch):
    monkeypatch.setattr(requests, "MOST_CONNECTIONS", 1)
    asked, release = threading.Event(), threading.Event()
    routes = {"GET /wait": lambda: asked.set() or {"waited": release.wait(60)}}
    with requests.make_server(routes, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        ask = functools.partial(requests.request, "GET", f"http://127.0.0.1:{server.server_port}/wait", None)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, 60)
            assert asked.wait(60)
            for _ in range(3):
                with pytest.raises(requests.HttpError) as refused:
                    ask(10)
                assert refused.value.kind in ("http_5xx", "unreachable"), "told at once"
            release.set()
            assert first.result() == b'{"waited": true}'
        again, end = None, time.monotonic() + 20
        while again is None and time.monotonic() < end:  # The place is free soon after the answer.
            with contextlib.suppress(requests.HttpError):
                again = ask(60)
        assert again == first.result()
        server.shutdown()


def test_connections_wait_until_the_server_has_time_for_them():
    with requests.make_server({}, "127.0.0.1", 0) as server, contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(server.server_address, timeout=0.5))


def test_an_answer_that_json_cannot_hold_is_an_error_in_one_sentence():
    with requests.make_server({"GET /set": lambda: {"set": {1}}}, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(requests.HttpError, match="status 500: .*TypeError: .* set is not JSON"):
            requests.request("GET", f"http://127.0.0.1:{server.server_port}/set", None, 60)
        server.shutdown()


def test_the_whole_command_until_sigterm_and_what_a_run_hears_then(tmp_path):
    for part in (0, 1):
        lines = [json.dumps({"id": p.id, "title": p.title, "text": p.text}) for p in CORPUS[part : part + 2]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    command = [
        sys.executable,
        "-m",
        "experiments.serve_retriever",
        tmp_path / "0.jsonl",
        tmp_path / "1.jsonl",
        "--port=0",
    ]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    serving = next(line for line in server.stderr if "serving" in line)
    found = re.search(r"serving at (http://\S+/retrieve)", serving)
    assert found, serving
    remote = RemoteRetriever(found[1], 60.0)
    assert remote.search(QUERIES, 3) == BM25(CORPUS).search(QUERIES, 3)
    server.send_signal(signal.SIGTERM)
    rest = server.communicate(timeout=60)[1]
    assert server.returncode == 0 and "stopped" in rest and "Traceback" not in rest
    assert len(remote.search(["red"], 3)[0]) == 2  # From its cache.
    metrics = ToolMetrics()
    tool = wrap_tool(SearchTool(remote, 3), ToolsConfig(max_attempts=2, backoff_seconds=0), metrics)
    failed = asyncio.run(base.call(tool, {"query": "green"}))  # Ends the trajectory, which is dropped and counted.
    assert (failed.error.kind, failed.error.fault) == ("unreachable", "infrastructure")
    assert metrics.metrics()["tools/error/unreachable"] == 2 and metrics.metrics()["tools/failures"] == 1


def test_mistakes_are_one_sentence(tmp_path):
    corpus, other = tmp_path / "corpus.jsonl", tmp_path / "other.jsonl"
    corpus.write_text('{"id": 1, "title": "", "text": "a word"}')
    other.write_text('{"id": 1, "title": "", "text": "another word"}')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for paths, retriever, message in (
            ([tmp_path / "none"], "bm25", "none: no such corpus; .*prepare_data"),
            ([corpus, other], "bm25", r"other\.jsonl: the id '1' is another passage's, too"),
            ([corpus], "dense", "--retriever: kind is 'dense', which needs encoder; set it"),
            ([corpus], "http(url=http://x)", r"write bm25, bm25\(index=FOLDER\) or dense\(encoder=...\)"),
            ([corpus], "bm25", rf"cannot listen at 127\.0\.0\.1:{port} \(.*choose another port"),
        ):
            with pytest.raises(UserError, match=message):
                serve_retriever.make_retriever_server(paths, retriever, "127.0.0.1", port)

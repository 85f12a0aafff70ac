"""Connections to the reward server that lie, wait, flood or leave: the next request is served."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import make_reward_model
from tests.trainer.served import GOOD, HEAD, JSON, serving, unharmed


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory):
    return make_reward_model(tmp_path_factory.mktemp("connections") / "judge")


@pytest.fixture(scope="module")
def server(reward_dir):
    with serving(reward_dir, limits={"max_requests": 4}) as served:
        yield served


@pytest.fixture(scope="module")
def impatient(reward_dir):
    """A server that gives 40 connections half a second each to send a request."""
    with serving(reward_dir, limits={"receive_timeout_s": 0.5, "max_connections": 40}) as served:
        yield served


@pytest.fixture
def served(server):
    with unharmed(server):
        yield server


def test_20_mib_are_refused_before_they_are_read(served):
    answer = served.ask(b'{"query": ["' + b"a" * (20 << 20) + b'"]}')
    assert (answer.status_code, answer.json()["field"]) == (413, "body")
    waits = HEAD + b"Content-Length: 20971520\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    assert served.raw(waits).startswith(b"HTTP/1.1 413 ")


def test_chunks_without_an_end_are_cut_off(served):
    chunk = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        num_chunks = 0
        with pytest.raises(OSError):  # reset or broken pipe, as it comes
            while num_chunks < 1000:
                connection.sendall(chunk)
                num_chunks += 1
        assert 16 <= num_chunks < 200


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"POST /get_rew",
        HEAD,
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b'Transfer-Encoding: chunked\r\n\r\n2\r\n{"',
        HEAD + b"Content-Length: 19\r\n\r\n" + GOOD + HEAD + b"Content-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half a line", "half the headers", "half a body", "half a chunk", "pipelined"],
)
def test_a_request_that_does_not_arrive_is_closed_at_its_deadline(impatient, start):
    begin = time.monotonic()
    answer = impatient.raw(start)
    assert time.monotonic() - begin < 5
    assert answer.count(b"HTTP/1.1") == answer.count(b"HTTP/1.1 200") == start.count(GOOD)


def test_an_idle_connection_is_kept_for_the_next_request(impatient):
    with httpx.Client(base_url=impatient.url) as client:
        first = client.post("/get_reward", content=GOOD, headers=JSON)
        stream = first.extensions["network_stream"].get_extra_info("client_addr")
        time.sleep(0.8)  # longer than a request may take to arrive
        second = client.post("/get_reward", content=GOOD, headers=JSON)
        assert second.extensions["network_stream"].get_extra_info("client_addr") == stream


def test_what_is_not_http_is_refused_or_closed(served):
    good = HEAD + b"Content-Length: 19\r\n\r\n" + GOOD
    assert served.raw(b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert served.raw(HEAD + b"X: " + b"a" * (1 << 20)).startswith(b"HTTP/1.1 4")
    assert served.raw(HEAD + b"Content-Length: -1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    both = b"Content-Length: 19\r\nContent-Length: 18\r\n\r\n"
    assert served.raw(HEAD + both + GOOD).startswith(b"HTTP/1.1 400 ")
    answer = served.raw(good + b"\x00 pipelined \xff nonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    old = good.replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    assert b'"rewards"' in served.raw(old)


def test_more_connections_than_allowed_are_closed_and_those_there_are_served(impatient):
    idle = [socket.create_connection(("127.0.0.1", impatient.port)) for _ in range(300)]
    time.sleep(0.2)
    impatient.client.close()
    impatient.client = httpx.Client(base_url=impatient.url, timeout=30, trust_env=False)
    end = time.monotonic() + 5
    while True:
        try:
            assert len(impatient.rewards("good")) == 1
            break
        except httpx.TransportError:
            assert time.monotonic() < end
            time.sleep(0.1)
    for connection in idle:
        connection.close()


def test_more_requests_than_allowed_are_sent_away_and_health_still_answers(served, monkeypatch):
    model, gate = served.service.models[0], threading.Event()
    score = model.score
    monkeypatch.setattr(model, "score", lambda rows: gate.wait(10) and score(rows))
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(served.rewards, text) for text in "abcd"]
        while served.client.get("/ready").json()["requests"] < 4:
            time.sleep(0.01)
        answer = served.ask(GOOD)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        probes = [served.client.get("/health") for _ in range(5)]
        assert {probe.status_code for probe in probes} == {200}
        assert min(probe.elapsed.total_seconds() for probe in probes) < 0.1
        gate.set()
        assert all(len(future.result()) == 1 for future in held)


def test_a_client_that_leaves_frees_its_place(served, monkeypatch):
    model, gate, texts = served.service.models[0], threading.Event(), []
    score = model.score

    def slow_score(rows):
        assert gate.wait(10)
        texts.extend(model.tokenizer.decode(row) for row in rows)
        return score(rows)

    monkeypatch.setattr(model, "score", slow_score)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.rewards, "stays")
        while served.service.batcher.num_forwards == 0 or served.service.batcher.num_waiting:
            time.sleep(0.01)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/get_reward", json={"query": ["leaves"]}, timeout=0.3)
        while served.client.get("/ready").json() != {
            "ready": True,
            "reason": None,
            "queued": 0,
            "requests": 1,
        }:
            time.sleep(0.01)
        gate.set()
        assert len(first.result()) == 1
    assert "leaves" not in texts


def test_any_bytes_leave_the_server_alive(served):
    @settings(max_examples=40, deadline=None, database=None)
    @given(st.binary(min_size=1, max_size=200))
    def throw(data):
        length = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(data)
        answer = served.raw(HEAD + length + data)
        assert answer.startswith(b"HTTP/1.1 4") or b'"rewards"' in answer
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
            connection.sendall(data)

    throw()

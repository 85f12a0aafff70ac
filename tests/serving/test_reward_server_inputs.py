"""Bad requests for rewards are refused by name, never scored, and the next one is served."""

from __future__ import annotations

import gzip
import json
import logging
import math
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.served import JSON, serving, unharmed, wait_until
from tests.tiny import make_reward_model

HEAD = b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
GOOD = b'{"query": ["good"]}'
TOKEN = "secret-token-of-32-characters-xx"


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory):
    return make_reward_model(tmp_path_factory.mktemp("inputs") / "judge")


@pytest.fixture(scope="module")
def server(reward_dir):
    with serving(reward_dir, data={"max_len": 64}) as served:
        yield served


@pytest.fixture
def served(server):
    with unharmed(server):
        yield server


class Marker:
    """Pickled, it would write a file when unpickled."""

    def __reduce__(self):
        return (open, ("unpickled", "w"))


def deep(depth):
    return b'{"query": ' + b"[" * depth + b"]" * depth + b"}"


def body_with_ids(*ids):
    return json.dumps({"query": ["a"] * len(ids), "ids": ids}).encode()


BODIES = {
    "no body": (b"", 400, "body"),
    "not JSON": (b"query=hello", 400, "body"),
    "pickle": (pickle.dumps(Marker()), 400, "body"),
    "a list": (b'["a"]', 400, "body"),
    "no query": (b'{"prompts": ["a"]}', 400, "query"),
    "a text": (b'{"query": "hello"}', 422, "query"),
    "null within": (b'{"query": ["a", null]}', 422, "query[1]"),
    "a pair": (b'{"query": [["a", "b"]]}', 422, "query[0]"),
    "an empty text": (b'{"query": ["a", ""]}', 422, "query[1]"),
    "too many characters": (json.dumps({"query": ["a" * 1_000_001]}).encode(), 413, "query[0]"),
    "too many texts": (json.dumps({"query": ["a"] * 100_000}).encode(), 413, "query"),
    "100000 deep": (deep(100_000), 400, "body"),
    "unknown field": (b'{"query": ["a"], "prompt": ["b"]}', 422, "prompt"),
    "half a character": (b'{"query": ["a", "b\\ud800"]}', 400, "body"),
    "bad UTF-8": (b'{"query": ["\xff"]}', 400, "body"),
    "labels too few": (b'{"query": ["a", "b"], "labels": [1]}', 422, "labels"),
    "ids over all floats": (b'{"query": ["a", "b"], "ids": [1, 1e999]}', 422, "ids[1]"),
    "ids over 256 characters": (body_with_ids("a" * 256, "a" * 257), 422, "ids[1]"),
    "an id of 5000 digits": (b'{"query": ["a"], "ids": [' + b"7" * 5000 + b"]}", 400, "body"),
    "ids of lists": (body_with_ids(["a"]), 422, "ids[0]"),
    "an unknown field of a megabyte": (
        json.dumps({"query": [], "x" * 10**6: 1}).encode(),
        422,
        "x" * 64,
    ),
    "another model": (b'{"query": ["a"], "model": "gpt"}', 404, "model"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused_and_its_field_is_named(served, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body, status, field = BODIES[name]
    answer = served.ask(body)
    assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
    assert answer.json()["error"]
    assert not list(tmp_path.iterdir())


def test_texts_numbers_and_null_come_back_as_ids(served):
    ids = ["step12/3/0/t1", "\U0001f600" * 256, "\x00", "", None, 10**4000, -(2**63), 0.5, -1e308]
    answer = served.ask({"query": ["a"] * len(ids), "ids": ids})
    assert (answer.status_code, answer.json()["ids"]) == (200, ids)


def test_what_looks_bad_but_is_text_is_scored(served):
    quotes = '"\\" [[[[[[[[[[[[ {{{{{{{{{{{{ ,,,, \\\\'
    texts = [quotes, "nul\x00", "\U000f0000", "NaN", " ", "<|end|>"]
    assert len(served.rewards(*texts)) == len(texts)
    full = {"query": ["a"], "prompts": ["a"], "labels": [{"x": [1, None]}], "ids": ["id-1"]}
    answer = served.ask({**full, "model": "judge"}).json()
    assert answer["ids"] == ["id-1"]
    assert list(answer["models"]) == ["judge"]
    assert served.rewards() == []


@pytest.mark.parametrize(
    ("headers", "status", "field"),
    [
        ({"content_type": "text/plain"}, 415, "content-type"),
        ({"content_type": "application/x-www-form-urlencoded"}, 415, "content-type"),
    ],
)
def test_bad_headers_are_refused_by_name(served, headers, status, field):
    answer = served.ask(GOOD, **headers)
    assert (answer.status_code, answer.json()["field"]) == (status, field)


def test_a_body_that_would_unpack_to_much_is_not_unpacked(served):
    bomb = gzip.compress(b'{"query": ["' + b"a" * 100_000_000 + b'"]}')
    assert served.ask(bomb, content_encoding="gzip").status_code == 400


def test_20_mib_are_refused_before_they_are_read(served):
    head = HEAD + b"Content-Length: 20971520\r\n\r\n"
    with socket.create_connection(served.place, timeout=5) as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
    answer = served.ask(iter([b"x" * 2**20] * 20))  # chunks, of no length that is said
    assert answer.status_code == 413


def test_a_request_that_does_not_arrive_is_refused_at_its_deadline(reward_dir):
    with (
        serving(reward_dir, limits={"receive_timeout_s": 0.3}) as impatient,
        socket.create_connection(impatient.place, timeout=10) as connection,
    ):
        connection.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"query":')
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_more_requests_than_allowed_are_sent_away_and_health_still_answers(reward_dir):
    gate = threading.Event()
    with serving(reward_dir, limits={"max_requests": 2}) as served:
        score = served.service.batchers[0].model.score
        served.service.batchers[0].model.score = lambda rows: gate.wait(10) and score(rows)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(served.rewards, text) for text in "ab"]
            wait_until(lambda: served.service.num_requests == 2)
            answer = served.ask(GOOD)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert served.client.get("/health").status_code == 200
            gate.set()
            assert all(len(future.result()) == 1 for future in waiting)


@pytest.fixture
def poisoned(served, monkeypatch):
    """A model that fails on texts with a `!` and has no number for those with a `?`."""
    model = served.service.batchers[0].model
    fails, is_nan = (model.tokenizer(sign).input_ids[0] for sign in "!?")
    score = model.score

    def poisoned_score(rows):
        if any(fails in row for row in rows):
            raise RuntimeError("out of memory\nmore lines")
        return [
            float("nan") if is_nan in row else s for row, s in zip(rows, score(rows), strict=True)
        ]

    monkeypatch.setattr(model, "score", poisoned_score)
    return served


def test_a_text_that_breaks_the_model_is_its_requests_error_alone(poisoned):
    with ThreadPoolExecutor(3) as pool:
        bad = pool.submit(poisoned.ask, {"query": ["a", "b", "boom!"]}, x_request_id="id-7")
        good = pool.submit(poisoned.rewards, "c", "d")
        nan = pool.submit(poisoned.ask, {"query": ["e", "what?"]})
        assert len(good.result()) == 2
    answer = bad.result()
    assert answer.status_code == 503
    assert answer.json() == {
        "error": "the model failed: out of memory",
        "field": "query[2]",
        "request_id": "id-7",
    }
    assert nan.result().status_code == 500
    assert nan.result().json()["error"] == "non_finite: the score is nan"
    assert nan.result().json()["field"] == "query[1]"


def test_a_model_that_fails_altogether_is_not_ready(served, monkeypatch):
    def broken(rows):
        raise RuntimeError("device-side assert")

    with monkeypatch.context() as patch:
        patch.setattr(served.service.batchers[0].model, "score", broken)
        assert served.ask(GOOD).status_code == 503
        ready = served.client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the model fails")
        assert served.client.get("/health").status_code == 200
    assert served.ask(GOOD).status_code == 200


def test_the_same_request_id_is_computed_once(served):
    first = served.ask(GOOD, x_request_id="once")
    num_rows = served.service.batchers[0].num_rows
    second = served.ask(GOOD, x_request_id="once")
    assert second.json() == first.json()
    assert second.headers["x-request-id"] == "once"
    assert served.service.batchers[0].num_rows == num_rows
    assert served.ask({"query": ["other"]}, x_request_id="once").json() != first.json()


def test_a_failed_request_can_be_repeated_under_its_id(poisoned, monkeypatch):
    body = {"query": ["again!"]}
    assert poisoned.ask(body, x_request_id="again").status_code == 503
    monkeypatch.undo()
    assert poisoned.ask(body, x_request_id="again").status_code == 200


def test_without_the_right_token_nothing_is_read_and_nothing_is_logged(reward_dir, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(reward_dir, token=TOKEN) as served:
        assert served.client.get("/health").status_code == 200
        right = f"Bearer {TOKEN}"
        for wrong in ("", TOKEN, f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer é"):
            answer = served.ask(GOOD, authorization=wrong.encode("latin-1"))
            assert (answer.status_code, answer.json()["field"]) == (401, "authorization")
        in_url = served.client.post(f"/get_reward?token={TOKEN}", content=GOOD, headers=JSON)
        assert in_url.status_code == 401
        # Refused from the headers alone: the body never comes.
        head = HEAD + b"Authorization: Bearer no\r\nContent-Length: 1000\r\n\r\n"
        with socket.create_connection(served.place, timeout=5) as connection:
            connection.sendall(head)
            assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")
        assert served.ask(GOOD, authorization=right).status_code == 200
    ours = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert TOKEN not in "".join(record.getMessage() for record in ours)


WORDS = st.text(max_size=5) | st.sampled_from(["\ud800", "a\udfff"])  # and halves of characters
NUMBERS = st.integers() | st.floats(allow_nan=False) | st.sampled_from([math.inf, -math.inf])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(WORDS, part, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = st.sampled_from(["query", "prompts", "labels", "ids", "model", "x"]) | WORDS
GOOD_QUERIES = st.fixed_dictionaries(
    {"query": st.just(["a"])},
    optional={name: st.lists(JSON_VALUES, min_size=1, max_size=1) for name in ("labels", "ids")},
)
FIELDS = GOOD_QUERIES | st.dictionaries(FIELD_NAMES, JSON_VALUES, max_size=4)
# Python writes what is larger than every float as a word; JSON has digits for it.
BODY_BYTES = st.binary(max_size=60) | FIELDS.map(
    lambda fields: json.dumps(fields).replace("Infinity", "1e999").encode()
)


@settings(max_examples=60, deadline=None)
@given(BODY_BYTES)
def test_any_body_is_answered_in_json_and_none_is_the_servers_fault(server, body):
    answer = server.ask(body)
    assert answer.status_code < 500, answer.text
    assert ("rewards" in answer.json()) == (answer.status_code == 200)
    assert answer.headers["x-request-id"] == answer.json()["request_id"]

"""Scores over HTTP are the reward model's, whoever asks when, and the server stops in order."""

import contextlib
import gzip
import json
import logging
import math
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import transformers
from datasets import Dataset
from fastapi import HTTPException
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.commands import serve_rm
from openrlhf.commands.serve_rm import read_models, read_token
from openrlhf.config.serving import ServeRewardConfig
from openrlhf.datasets.reward_dataset import PreferenceDataset
from openrlhf.datasets.tokenized import RowFormat
from openrlhf.errors import ConfigError
from openrlhf.models.loading import load_sequence_model
from openrlhf.utils.tokenizer import load_tokenizer
from tests.commands.served import JSON, serving, unharmed
from tests.helpers.processes import wait_until
from tests.helpers.tokenizers import BOS, bos_tokenizer
from tests.models.helpers import scores_of
from tests.source import ROOT
from tests.tiny import Payload, make_reward_model

TEXTS = [
    "hi",
    "a longer text, with words",
    "<|user|>2+2<|end|><|assistant|>4<|end|>",
    "é\x00ß",
    " ",
]


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory):
    return make_reward_model(tmp_path_factory.mktemp("served") / "judge")


@pytest.fixture(scope="module")
def served(reward_dir):
    with serving(reward_dir, limits={"max_tokens_per_forward": 400}) as served:
        yield served


def trainers_scores(path, texts, **options):
    """As the trainer asks: token ids in a packed row, each text by itself."""
    model, tokenizer = load_sequence_model(path), transformers.AutoTokenizer.from_pretrained(path)
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return [scores_of(model, [row], **options).item() for row in rows]


def test_rewards_over_http_are_those_of_the_reward_model(served, reward_dir):
    expected = trainers_scores(reward_dir, TEXTS)
    assert served.rewards(*TEXTS) == pytest.approx(expected, abs=1e-5)
    assert [served.rewards(text)[0] for text in TEXTS] == pytest.approx(expected, abs=1e-5)


def test_every_one_of_64_clients_gets_its_own_answer(served, reward_dir):
    rng = random.Random(0)
    letters = "abcdefgh "
    texts = ["".join(rng.choices(letters, k=rng.randint(1, 80))) for _ in range(192)]
    requests = [texts[start : start + 3] for start in range(0, len(texts), 3)]
    before = served.service.batchers[0].num_forwards
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda texts: served.rewards(*texts), requests))
    found = [reward for answer in answers for reward in answer]
    assert found == pytest.approx(trainers_scores(reward_dir, texts), abs=1e-5)
    assert served.service.batchers[0].num_forwards - before < 64  # requests shared forwards


def test_requests_that_arrive_during_a_forward_share_the_next_one(served, monkeypatch):
    model, sizes, gate = served.service.batchers[0].model, [], threading.Event()
    score = model.score

    def slow_score(rows):
        sizes.append(len(rows))
        assert gate.wait(10)
        return score(rows)

    monkeypatch.setattr(model, "score", slow_score)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(served.rewards, "first")
        wait_until(lambda: sizes == [1])
        others = [pool.submit(served.rewards, text) for text in "abcde"]
        wait_until(lambda: served.service.batchers[0].num_waiting == 5)
        assert served.client.get("/ready").json()["queued"] == 5
        start = time.monotonic()
        assert served.client.get("/health").status_code == 200
        assert time.monotonic() - start < 0.5  # the model does not hold up the event loop
        gate.set()
        assert len({first.result()[0], *(other.result()[0] for other in others)}) == 6
    assert sizes == [1, 5]


def test_normalized_rewards_use_mean_and_std_of_the_config(reward_dir):
    with serving(reward_dir, reward={"normalize_enable": True}) as served:
        found = served.rewards(*TEXTS)
    assert found == pytest.approx(
        trainers_scores(reward_dir, TEXTS, normalize_reward=True), abs=1e-5
    )
    plain = trainers_scores(reward_dir, TEXTS)
    assert found == pytest.approx([(score - 0.1) / 0.5 for score in plain], abs=1e-5)


def test_several_models_add_up_and_each_can_be_asked_alone(reward_dir, tmp_path):
    other_dir = make_reward_model(tmp_path / "second", seed=5)
    one, two = (trainers_scores(path, TEXTS) for path in (reward_dir, other_dir))
    both = f"{reward_dir},{other_dir}"
    with serving(both, reward={"weights": (0.5, 2.0)}) as served:
        answer = served.ask({"query": TEXTS}).json()
        alone = served.ask({"query": TEXTS, "model": "second"}).json()
        wrong = served.ask({"query": TEXTS, "model": "third"})
    total = [0.5 * a + 2 * b for a, b in zip(one, two, strict=True)]
    assert answer["rewards"] == pytest.approx(total, abs=1e-5)
    assert answer["extra_logs"]["judge"] == pytest.approx(one, abs=1e-5)
    assert answer["extra_logs"]["second"] == pytest.approx(two, abs=1e-5)
    assert alone["rewards"] == pytest.approx(two, abs=1e-5)
    assert answer["models"]["judge"] != answer["models"]["second"]
    assert (wrong.status_code, wrong.json()["field"]) == (404, "model")


def test_a_cut_text_is_marked_and_scored_as_cut(reward_dir):
    texts = ["a" * 7, "a" * 8, "b" + "a" * 8]
    for side, kept in (("truncate_left", "a" * 8), ("truncate_right", "b" + "a" * 7)):
        with serving(reward_dir, data={"max_len": 8, "overlong_texts": side}) as served:
            answer = served.ask({"query": texts}).json()
        expected = trainers_scores(reward_dir, [*texts[:2], kept])
        assert answer["rewards"] == pytest.approx(expected, abs=1e-5)
        assert answer["truncated"] == [False, False, True]
        assert answer["extra_logs"]["truncated"] == [0.0, 0.0, 1.0]


def reader(path, **data):
    """A served model that reads texts; it has no weights yet."""
    [model] = read_models(ServeRewardConfig(reward={"model_name_or_path": str(path)}, data=data))
    return model


def test_a_prompt_that_is_sent_is_encoded_apart_as_in_training(reward_dir, tmp_path):
    path = shutil.copytree(reward_dir, tmp_path / "judge")
    bos_tokenizer(adds_bos=True, merged=(("a", "b"),)).save_pretrained(path)
    pair = {"prompt": "xa", "chosen": "bz", "rejected": "c"}
    data = PreferenceDataset(Dataset.from_list([pair]), load_tokenizer(str(path)), RowFormat())
    [(trained, _), _] = data.sequences(0)
    model, text = reader(path), "xabz</s>"
    for prompt, num_tokens in (("xa", 6), ("", 5), ("another prompt", 5)):
        [ids], _ = model.tokenize([text], [prompt])
        assert (ids == trained.tolist(), len(ids)) == (num_tokens == 6, num_tokens)
    with pytest.raises(HTTPException) as refused:  # its BOS alone is no text
        model.tokenize([""], [""])
    assert refused.value.detail == {"error": "the text is empty", "field": "query[0]"}
    cutting = reader(path, max_len=3, overlong_texts="truncate_left")
    assert cutting.tokenize([text], ["xa"]) == ([[BOS, *trained.tolist()[-2:]]], [True])


def test_prompts_of_a_request_belong_to_its_texts(served, monkeypatch):
    asked, model = [], served.service.batchers[0].model
    tokenize = model.tokenize
    monkeypatch.setattr(model, "tokenize", lambda *texts: asked.append(texts) or tokenize(*texts))
    for prompts in ({"prompts": ["a", "c"]}, {}):
        assert served.ask({"query": ["ab", "cd"], **prompts}).status_code == 200
    assert asked == [(["ab", "cd"], ["a", "c"]), (["ab", "cd"], ["", ""])]


def test_the_trainers_client_takes_the_answers(served, reward_dir):
    from openrlhf.rewards.base import RewardBatch
    from openrlhf.rewards.remote import RemoteReward

    prompts = ["h", "a longer", "<|user|>2+2<|end|><|assistant|>", "é", " "]
    answers = [text.removeprefix(prompt) for text, prompt in zip(TEXTS, prompts, strict=True)]
    batch = RewardBatch(TEXTS, prompts, answers, labels=[None] * len(TEXTS))
    source = RemoteReward(f"{served.url}/get_reward")
    found = source.submit(batch).result().rewards
    source.close()
    assert found == pytest.approx(trainers_scores(reward_dir, TEXTS), abs=1e-5)


def config_of(**settings):
    return ServeRewardConfig(reward={"model_name_or_path": "m"}, **settings)


def test_other_machines_need_a_token_and_this_one_does_not(monkeypatch, tmp_path):
    monkeypatch.delenv("OPENRLHF_REWARD_TOKEN", raising=False)
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert read_token(config_of(host=host)) is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "some.name"):
        with pytest.raises(ConfigError, match=f"--host {host} lets other machines connect"):
            read_token(config_of(host=host))
    file = tmp_path / "token"
    file.write_text("t" * 32 + "\n")
    assert read_token(config_of(host="0.0.0.0", token_file=str(file))) == "t" * 32
    monkeypatch.setenv("OPENRLHF_REWARD_TOKEN", "e" * 16 + "\n")
    assert read_token(config_of(host="0.0.0.0")) == "e" * 16
    file.write_text("\n")
    with pytest.raises(ConfigError, match="token is empty"):
        read_token(config_of(token_file=str(file)))


def start_server(*words, patch=""):
    code = f"{patch}\nfrom openrlhf.cli.serve_rm import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell that runs the tests in the background has them, and this, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def line_of(process, start):
    """The first line that begins so."""
    return next(line.rstrip("\n") for line in process.stdout if line.startswith(start))


SLOW_MODEL = """
import time
from openrlhf.commands.serve_rm import ServedModel
score = ServedModel.score
ServedModel.score = lambda self, rows: time.sleep(0.6) or score(self, rows)
"""
ENDLESS_LOADING = """
import time
from openrlhf.commands.serve_rm import ServedModel
def load(self):  # in short sleeps: a signal just before a long one would wait for its end
    while True:
        time.sleep(0.1)
ServedModel.load = load
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_after_what_is_in_flight(reward_dir, number):
    process = start_server("--reward_pretrain", str(reward_dir), "--port", "0", patch=SLOW_MODEL)
    url = line_of(process, "ready: ").removeprefix("ready: ")
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(
            httpx.post, url, json={"query": ["in flight"]}, headers=JSON, timeout=20
        )
        time.sleep(0.3)
        process.send_signal(number)
        assert line_of(process, "stopped: ") == "stopped: 1 texts scored in 1 forward passes"
        assert process.wait(20) == 0
        assert answer.result().json()["rewards"] == pytest.approx(
            trainers_scores(reward_dir, ["in flight"]), abs=1e-5
        )
    with pytest.raises(httpx.ConnectError):
        httpx.get(url.replace("get_reward", "health"))


@pytest.mark.slow
def test_ctrl_c_ends_a_server_that_loads_its_model_at_once(reward_dir):
    words = ["--reward_pretrain", str(reward_dir), "--port", "0"]
    process = start_server(*words, patch=ENDLESS_LOADING)
    line_of(process, "listening on ")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert time.monotonic() - start < 10  # Python's own end takes a second or more


def test_ctrl_c_as_soon_as_it_is_ready_stops_the_server(reward_dir, monkeypatch):
    said = []

    def hear(line: str) -> None:
        said.append(line)
        if line.startswith("ready"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(serve_rm, "notice", hear)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    config = {"port": 0, "reward": {"model_name_or_path": str(reward_dir)}}
    try:
        serve_rm.serve_rewards(ServeRewardConfig.model_validate(config))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert said[-1] == "stopped: 0 texts scored in 0 forward passes"


def test_what_cannot_be_served_is_said_before_anything_listens(reward_dir, tiny_model_dir, capsys):
    from openrlhf.cli.serve_rm import main
    from openrlhf.commands.serve_rm import listen

    def refused(*words):
        with pytest.raises(SystemExit) as end:
            main(["--port", "0", *words])
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "No reward model is named" in refused()
    assert "has no value head" in refused("--reward_pretrain", str(tiny_model_dir))
    name = str(reward_dir)
    assert "no token is set" in refused("--reward_pretrain", name, "--host", "0.0.0.0")
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert "Address already in use" in refused("--reward_pretrain", name, "--port", port)


HEAD = b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GOOD = b'{"query": ["good"]}'
TOKEN = "secret-token-of-32-characters-xx"


@pytest.fixture(scope="module")
def server(reward_dir):
    with serving(reward_dir, data={"max_len": 64}) as guarded:
        yield guarded


@pytest.fixture
def guarded(server):
    with unharmed(server):
        yield server


def body_with_ids(*ids):
    return json.dumps({"query": ["a"] * len(ids), "ids": ids}).encode()


BODIES = {
    "not JSON": (b"query=hello", 400, "body"),
    "pickle": (pickle.dumps(Payload(Path("unpickled"))), 400, "body"),
    "no query": (b'{"prompts": ["a"]}', 400, "query"),
    "a text": (b'{"query": "hello"}', 422, "query"),
    "null within": (b'{"query": ["a", null]}', 422, "query[1]"),
    "an empty text": (b'{"query": ["a", ""]}', 422, "query[1]"),
    "too many characters": (json.dumps({"query": ["a" * 1_000_001]}).encode(), 413, "query[0]"),
    "too many texts": (json.dumps({"query": ["a"] * 100_000}).encode(), 413, "query"),
    "unknown field": (b'{"query": ["a"], "prompt": ["b"]}', 422, "prompt"),
    "half a character": (b'{"query": ["a", "b\\ud800"]}', 400, "body"),
    "labels too few": (b'{"query": ["a", "b"], "labels": [1]}', 422, "labels"),
    "ids over 256 characters": (body_with_ids("a" * 256, "a" * 257), 422, "ids[1]"),
    "another model": (b'{"query": ["a"], "model": "gpt"}', 404, "model"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused_and_its_field_is_named(guarded, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body, status, field = BODIES[name]
    answer = guarded.ask(body)
    assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
    assert answer.json()["error"]
    assert not list(tmp_path.iterdir())


def test_texts_numbers_and_null_come_back_as_ids(guarded):
    ids = ["step12/3/0/t1", "\U0001f600" * 256, "\x00", "", None, 10**4000, -(2**63), 0.5, -1e308]
    answer = guarded.ask({"query": ["a"] * len(ids), "ids": ids})
    assert (answer.status_code, answer.json()["ids"]) == (200, ids)


def test_what_looks_bad_but_is_text_is_scored(guarded):
    quotes = '"\\" [[[[[[[[[[[[ {{{{{{{{{{{{ ,,,, \\\\'
    texts = [quotes, "nul\x00", "\U000f0000", "NaN", " ", "<|end|>"]
    assert len(guarded.rewards(*texts)) == len(texts)
    full = {"query": ["a"], "prompts": ["a"], "labels": [{"x": [1, None]}], "ids": ["id-1"]}
    answer = guarded.ask({**full, "model": "judge"}).json()
    assert answer["ids"] == ["id-1"]
    assert list(answer["models"]) == ["judge"]
    assert guarded.rewards() == []


def test_another_type_of_content_is_refused(guarded):
    answer = guarded.ask(GOOD, content_type="text/plain")
    assert (answer.status_code, answer.json()["field"]) == (415, "content-type")


def test_a_body_that_would_unpack_to_much_is_not_unpacked(guarded):
    bomb = gzip.compress(b'{"query": ["' + b"a" * 100_000_000 + b'"]}')
    assert guarded.ask(bomb, content_encoding="gzip").status_code == 400


def test_20_mib_are_refused_before_they_are_read(guarded):
    head = HEAD + b"Content-Length: 20971520\r\n\r\n"
    with socket.create_connection(guarded.place, timeout=5) as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
    answer = guarded.ask(iter([b"x" * 2**20] * 20))  # chunks, of no length that is said
    assert answer.status_code == 413


def test_a_request_that_does_not_arrive_is_refused_at_its_deadline(reward_dir):
    with (
        serving(reward_dir, limits={"receive_timeout_s": 0.3}) as impatient,
        socket.create_connection(impatient.place, timeout=10) as connection,
    ):
        connection.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"query":')
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "sent", [b"", b"POST /get", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"]
)
def test_headers_that_do_not_arrive_end_the_connection_at_the_deadline(reward_dir, sent):
    with serving(reward_dir, limits={"receive_timeout_s": 0.4}) as impatient:
        with socket.create_connection(impatient.place, timeout=10) as connection:
            connection.sendall(sent)
            time.sleep(0.2)
            connection.sendall(b"X" if sent else b"")  # what drips has no more time
            start = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1000) == b""
            assert time.monotonic() - start < 0.35
        assert impatient.client.get("/health").status_code == 200
        time.sleep(0.5)  # between two requests there is more time
        assert impatient.client.get("/health").status_code == 200
        assert len(impatient.server.server_state.connections) == 1


def test_a_request_that_was_answered_before_its_end_does_not_hold_its_connection(reward_dir):
    with (
        serving(reward_dir, limits={"receive_timeout_s": 0.4}) as impatient,
        socket.create_connection(impatient.place, timeout=10) as connection,
    ):
        connection.sendall(
            b"POST /other HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 404 ")
        with contextlib.suppress(ConnectionError):
            for _ in range(8):  # what drips has no more time
                connection.sendall(b"X")
                time.sleep(0.1)
        assert len(impatient.server.server_state.connections) == 0


def test_one_address_holds_no_more_connections_than_allowed(reward_dir):
    with serving(reward_dir, limits={"max_connections_per_address": 3}) as guarded:
        held = [socket.create_connection(guarded.place, timeout=5) for _ in range(3)]
        wait_until(lambda: len(guarded.server.server_state.connections) == 3)
        with socket.create_connection(guarded.place, timeout=5) as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 503 ")
        for connection in held:
            connection.close()
        wait_until(lambda: not guarded.server.server_state.connections)
        assert guarded.ask(GOOD).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:5000", "127.0.0.1.evil.example", ""]
)
def test_a_page_that_reached_this_machine_by_another_name_is_refused(guarded, host):
    answer = guarded.ask(GOOD, host=host)
    assert (answer.status_code, answer.json()["field"]) == (400, "host")
    assert guarded.client.get("/ready", headers={"host": host}).status_code == 400


def test_other_names_are_taken_from_who_has_the_token_and_own_names_from_all(reward_dir, guarded):
    for host in ("localhost:1", "[::1]:5000", "127.0.0.2"):
        assert guarded.ask(GOOD, host=host).status_code == 200
    with serving(reward_dir, token=TOKEN) as closed:
        answer = closed.ask(GOOD, host="judge.example", authorization=f"Bearer {TOKEN}")
        assert answer.status_code == 200


def test_more_requests_than_allowed_are_sent_away_and_health_still_answers(reward_dir):
    gate = threading.Event()
    with serving(reward_dir, limits={"max_requests": 2}) as guarded:
        score = guarded.service.batchers[0].model.score
        guarded.service.batchers[0].model.score = lambda rows: gate.wait(10) and score(rows)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(guarded.rewards, text) for text in "ab"]
            wait_until(lambda: guarded.service.num_requests == 2)
            answer = guarded.ask(GOOD)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert guarded.client.get("/health").status_code == 200
            gate.set()
            assert all(len(future.result()) == 1 for future in waiting)


@pytest.fixture
def poisoned(guarded, monkeypatch):
    """A model that fails on texts with a `!` and has no number for those with a `?`."""
    model = guarded.service.batchers[0].model
    fails, is_nan = (model.tokenizer(sign).input_ids[0] for sign in "!?")
    score = model.score

    def poisoned_score(rows):
        if any(fails in row for row in rows):
            raise RuntimeError("out of memory\nmore lines")
        return [
            float("nan") if is_nan in row else s for row, s in zip(rows, score(rows), strict=True)
        ]

    monkeypatch.setattr(model, "score", poisoned_score)
    return guarded


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


def test_a_model_that_fails_altogether_is_not_ready(guarded, monkeypatch):
    def broken(rows):
        raise RuntimeError("device-side assert")

    with monkeypatch.context() as patch:
        patch.setattr(guarded.service.batchers[0].model, "score", broken)
        assert guarded.ask(GOOD).status_code == 503
        ready = guarded.client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the model fails")
        assert guarded.client.get("/health").status_code == 200
    assert guarded.ask(GOOD).status_code == 200


def test_the_same_request_id_is_computed_once(guarded):
    first = guarded.ask(GOOD, x_request_id="once")
    num_rows = guarded.service.batchers[0].num_rows
    second = guarded.ask(GOOD, x_request_id="once")
    assert second.json() == first.json()
    assert second.headers["x-request-id"] == "once"
    assert guarded.service.batchers[0].num_rows == num_rows
    assert guarded.ask({"query": ["other"]}, x_request_id="once").json() != first.json()


def test_a_failed_request_can_be_repeated_under_its_id(poisoned, monkeypatch):
    body = {"query": ["again!"]}
    assert poisoned.ask(body, x_request_id="again").status_code == 503
    monkeypatch.undo()
    assert poisoned.ask(body, x_request_id="again").status_code == 200


def test_without_the_right_token_nothing_is_read_and_nothing_is_logged(reward_dir, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(reward_dir, token=TOKEN) as guarded:
        assert guarded.client.get("/health").status_code == 200
        right = f"Bearer {TOKEN}"
        for wrong in ("", TOKEN, f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer é"):
            answer = guarded.ask(GOOD, authorization=wrong.encode("latin-1"))
            assert (answer.status_code, answer.json()["field"]) == (401, "authorization")
        in_url = guarded.client.post(f"/get_reward?token={TOKEN}", content=GOOD, headers=JSON)
        assert in_url.status_code == 401
        # Refused from the headers alone: the body never comes.
        head = HEAD + b"Authorization: Bearer no\r\nContent-Length: 1000\r\n\r\n"
        with socket.create_connection(guarded.place, timeout=5) as connection:
            connection.sendall(head)
            assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")
        assert guarded.ask(GOOD, authorization=right).status_code == 200
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

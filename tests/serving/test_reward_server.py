"""Scores over HTTP are the reward model's, whoever asks when, and the server stops in order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import torch
import transformers

from openrlhf.config.cli import parse_config
from openrlhf.config.serving import ServeRewardConfig
from openrlhf.errors import ConfigError
from openrlhf.models.loading import load_sequence_model
from openrlhf.models.value_head import RewardModel
from openrlhf.serving.reward_server import Batcher, read_token, serve_rewards
from openrlhf.utils.packing import PackedBatch
from tests.serving.served import JSON, serving, wait_until
from tests.source import ROOT
from tests.tiny import as_openrlhf_saves, make_reward_model

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


def trainers_scores(path, texts, *, normalize_reward=False):
    """As the trainer asks: token ids in a packed row, each text by itself."""
    model = RewardModel(load_sequence_model(path), normalize_reward=normalize_reward).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    scores = []
    for text in texts:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        with torch.no_grad():
            batch = PackedBatch.from_sequences([ids], [torch.zeros(len(ids))])
            scores.append(model(batch).scores.item())
    return scores


def test_rewards_over_http_are_those_of_the_reward_model(served, reward_dir):
    expected = trainers_scores(reward_dir, TEXTS)
    assert served.rewards(*TEXTS) == pytest.approx(expected, abs=1e-5)
    assert [served.rewards(text)[0] for text in TEXTS] == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_that_openrlhf_saved_is_served(served, reward_dir, tmp_path):
    path = as_openrlhf_saves(reward_dir, tmp_path / "saved", head="value_head")
    with serving(path) as other:
        assert other.rewards(*TEXTS) == served.rewards(*TEXTS)


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


def test_a_forward_takes_a_row_of_each_request_in_turn():
    forwards = []

    def first_ids(rows):
        forwards.append([row[0] for row in rows])
        return [float(row[0]) for row in rows]

    async def ask():
        model = SimpleNamespace(score=first_ids)
        batcher = Batcher(model, ThreadPoolExecutor(1), max_rows=2, max_tokens=100)
        large = asyncio.ensure_future(batcher.score([[1], [2], [3]]))
        small = asyncio.ensure_future(batcher.score([[4]]))
        return await asyncio.gather(large, small)

    assert asyncio.run(ask()) == [[1.0, 2.0, 3.0], [4.0]]
    assert forwards == [[1, 4], [2, 3]]


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


def test_the_trainers_client_takes_the_answers(served, reward_dir):
    from openrlhf.rewards.base import RewardBatch
    from openrlhf.rewards.remote import RemoteReward

    prompts = [text[:1] for text in TEXTS]
    batch = RewardBatch(TEXTS, prompts, [text[1:] for text in TEXTS], labels=[None] * len(TEXTS))
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
    monkeypatch.setenv("OPENRLHF_REWARD_TOKEN", "e" * 16)
    assert read_token(config_of(host="0.0.0.0")) == "e" * 16
    file.write_text("short")
    with pytest.raises(ConfigError, match="at least 16 plain characters: 5 found"):
        read_token(config_of(token_file=str(file)))


class Process:
    """The command itself; `lines` is what it has said so far."""

    def __init__(self, *words, patch=""):
        code = f"{patch}\nfrom openrlhf.cli.serve_rm import main\nmain()"
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell that runs the tests in the background has them, and this, ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, start):
        """The first line that begins so."""
        wait_until(lambda: self._found(start) or self.popen.poll() is not None, 180)
        assert self._found(start), self.lines
        return self._found(start)

    def _found(self, start):
        return next((line for line in self.lines if line.startswith(start)), None)

    def end(self, number=None):
        """Exit code, after this signal."""
        if number is not None:
            self.popen.send_signal(number)
        code = self.popen.wait(20)
        self.reader.join(5)
        return code


SLOW_MODEL = """
import time
from openrlhf.serving.reward_server import ServedModel
score = ServedModel.score
ServedModel.score = lambda self, rows: time.sleep(0.6) or score(self, rows)
"""
ENDLESS_LOADING = """
import time
from openrlhf.serving.reward_server import ServedModel
ServedModel.load = lambda self: time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_after_what_is_in_flight(reward_dir, number):
    process = Process("--reward_pretrain", str(reward_dir), "--port", "0", patch=SLOW_MODEL)
    url = process.wait_for("ready: ").removeprefix("ready: ")
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(
            httpx.post, url, json={"query": ["in flight"]}, headers=JSON, timeout=20
        )
        time.sleep(0.3)
        assert process.end(number) == 0
        assert answer.result().json()["rewards"] == pytest.approx(
            trainers_scores(reward_dir, ["in flight"]), abs=1e-5
        )
    assert process.lines[-1] == "stopped: 1 texts scored in 1 forward passes"
    with pytest.raises(httpx.ConnectError):
        httpx.get(url.replace("get_reward", "health"))


@pytest.mark.slow
def test_ctrl_c_ends_a_server_that_loads_its_model_at_once(reward_dir):
    process = Process("--reward_pretrain", str(reward_dir), "--port", "0", patch=ENDLESS_LOADING)
    process.wait_for("listening on ")
    start = time.monotonic()
    assert process.end(signal.SIGINT) == 130
    assert time.monotonic() - start < 10  # Python's own end takes a second or more


def test_what_cannot_be_served_is_said_before_anything_listens(reward_dir, tiny_model_dir, capsys):
    from openrlhf.cli.serve_rm import main
    from openrlhf.serving.reward_server import listen

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


def test_an_attention_that_is_not_here_is_refused_before_a_model_is_looked_for():
    words = ["--reward_pretrain", "org/none", "--attn_implementation", "flash_atention_2"]
    config = parse_config(ServeRewardConfig, words).config
    with pytest.raises(ConfigError, match=r"flash_atention_2 is not known\. Type one of auto,"):
        serve_rewards(config)

"""The client of reward servers: one answer for every query, or an error with sample and server."""

import gzip
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import date
from email.utils import formatdate

import pytest

from openrlhf.commands.serve_rm import read_request
from openrlhf.config.serving import ServerLimitsConfig
from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards import remote
from openrlhf.rewards.base import RewardBatch, RewardResult
from openrlhf.rewards.remote import RemoteReward, body_of
from tests.rewards.servers import (
    Answer,
    RewardServer,
    free_url,
    lengths,
    rewards,
    started,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow one another quickly."""
    monkeypatch.setattr(remote, "BACKOFF_S", 0.02)


def batch_of(size: int) -> RewardBatch:
    return RewardBatch(
        queries=["q" * (i + 1) for i in range(size)],
        prompts=["p"] * size,
        responses=["r"] * size,
        labels=[{"answer": i} for i in range(size)],
        sample_ids=[f"step1/{i}/0" for i in range(size)],
    )


def score(urls: str, size: int = 1, **settings: float) -> RewardResult:
    usual = {"batch_size": 1, "timeout_s": 20}
    with closing(RemoteReward(urls, **(usual | settings))) as source:
        return source.submit(batch_of(size)).result()


def in_turn(*answers: Answer) -> RewardServer:
    """A server that gives these answers one after the other, then good ones."""
    left = list(answers)
    return RewardServer(lambda server, body: left.pop(0) if left else lengths(server, body))


def always(answer: Answer | None) -> RewardServer:
    return RewardServer(lambda server, body: answer)


def test_queries_prompts_labels_and_ids_are_sent_and_all_parts_come_back() -> None:
    with always(rewards([0.0], scores=[1], extra_logs={"a": [2.5], "b": 3}, id="x")) as server:
        result = score(server.url)
    assert server.requests == [
        {"query": ["q"], "prompts": ["p"], "labels": [{"answer": 0}], "ids": ["step1/0/0"]}
    ]
    assert result.rewards == [0.0]
    assert result.scores is not None and result.scores == [1.0]
    assert result.extra_logs == {"a": [2.5], "b": [3.0]}


@pytest.mark.parametrize("num_servers", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_every_query_is_answered_once_and_no_request_is_empty(num_servers: int, size: int) -> None:
    with ExitStack() as stack:
        servers = started(num_servers, stack)
        result = score(",".join(server.url for server in servers), size)
    assert result.rewards == [float(i + 1) for i in range(size)]
    assert sorted(query for server in servers for query in server.queries) == [
        "q" * (i + 1) for i in range(size)
    ]
    assert all(body["query"] for server in servers for body in server.requests)
    assert sum(bool(server.requests) for server in servers) == min(num_servers, size)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"rewards": [NaN]}', "rewards of sample step1/0/0 is nan"),
        (b'{"scores": [1]}', "the answer has no 'rewards'; it has ['scores']"),
        (b"<html>oops</html>", "for sample step1/0/0 is not a JSON object: <html>oops</html>"),
        (b"[" * 100_000, "is not a JSON object"),
    ],
)
def test_nonsense_is_an_error_at_once_that_names_sample_and_server(
    answer: bytes, message: str
) -> None:
    with always((200, answer)) as server, pytest.raises(RewardError) as caught:
        score(server.url)
    assert message in str(caught.value) and server.url in str(caught.value)
    assert len(server.requests) == 1


BUSY = (429, b"busy", {"Retry-After": "0"})


def test_what_may_pass_is_tried_until_the_time_is_over_with_one_request_id() -> None:
    with in_turn((500, b"a"), (503, b"b"), BUSY, (502, b""), (408, b"")) as server:
        assert score(server.url).rewards == [1.0]
    assert len(server.requests) == 6
    assert len({headers["X-Request-Id"] for headers in server.headers}) == 1
    with always((500, b"out of memory")) as server, pytest.raises(RewardError) as caught:
        score(server.url, timeout_s=0.5)
    assert len(server.requests) > 3
    assert f"no rewards for sample step1/0/0 after {len(server.requests)} tries" in str(
        caught.value
    )
    assert "answered 500: out of memory" in str(caught.value)


def test_a_server_that_is_away_for_a_while_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = RewardServer(port=int(free_url().split(":")[2].partition("/")[0]))
    timer = threading.Timer(1.3, server.__enter__)
    timer.start()
    assert score(f"http://127.0.0.1:{server.port}/get_reward", timeout_s=20).rewards == [1.0]
    timer.join()
    server.__exit__()
    [line] = capsys.readouterr().err.splitlines()
    assert "ConnectError" in line and "tried again until --reward_timeout_s 20 is over" in line


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_server_gets_the_pause_that_it_asks_for(form: str) -> None:
    # A date has whole seconds: this one is one to two seconds ahead.
    asked = "1.2" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
    with in_turn((429, b"busy", {"Retry-After": asked})) as server:
        start_s = time.monotonic()
        assert score(server.url).rewards == [1.0]
    assert time.monotonic() - start_s >= 0.9


def test_a_refusal_is_never_tried_again() -> None:
    with ExitStack() as stack:
        bad = stack.enter_context(always((400, b'{"error": "query[0]"}')))
        good = stack.enter_context(RewardServer())
        with pytest.raises(RewardError) as caught:
            score(f"{bad.url},{good.url}")
    assert 'answered 400 for sample step1/0/0: {"error": "query[0]"}' in str(caught.value)
    assert (len(bad.requests), len(good.requests)) == (1, 0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_error_that_names_its_target(status: int) -> None:
    with always((status, b"", {"Location": "/v2/get_reward"})) as server:
        with pytest.raises(RewardError) as caught:
            score(server.url)
        target = server.url.replace("/get_reward", "/v2/get_reward")
    words = f"it redirects to '{target}'. Type that address as --remote_rm_url."
    assert f"answered {status} for sample step1/0/0: {words}" in str(caught.value)
    odd = always((status, b"", {"Location": "http://[odd"}))
    with odd as server, pytest.raises(RewardError, match=r"redirects to 'http://\[odd'"):
        score(server.url)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (gzip.compress(b" " * 2**20 + b"{}"), "the answer is larger than 0 MiB"),
        (b" " * 2**20, "the answer is larger than 0 MiB"),
        (b"(br)", "the answer is compressed, and not as gzip"),
    ],
    ids=["unpacked", "as sent", "another way of packing"],
)
def test_an_answer_of_too_many_bytes_is_refused_before_it_is_held(
    packed: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_BYTES", 2**16)
    named = {} if packed.startswith(b" ") else {"Content-Encoding": "gzip"}
    with always((200, packed, named)) as server, pytest.raises(RewardError, match=message):
        score(server.url)


def test_an_answer_that_is_packed_is_read() -> None:
    packed = gzip.compress(rewards([2.0])[1])
    with always((200, packed, {"Content-Encoding": "gzip"})) as server:
        assert score(server.url).rewards == [2.0]
    with always((*rewards([2.0]), {"Content-Encoding": "Identity"})) as server:
        assert score(server.url).rewards == [2.0]


def test_a_body_that_drips_ends_at_the_limit() -> None:
    def drip(server: RewardServer, body: dict[str, object]) -> Answer:
        return 200, b"1" * 100, {"Drip": "0.05"}

    with RewardServer(drip) as server, pytest.raises(RewardError, match="no answer in 0"):
        score(server.url, timeout_s=0.4)


@pytest.mark.parametrize(("key", "meant"), [("reward", "rewards"), ("score", "scores")])
def test_a_key_that_is_nearly_right_is_refused(key: str, meant: str) -> None:
    fields = {"rewards": [1.0]} if key == "score" else {}
    answer = 200, json.dumps({**fields, key: [0.5]}).encode()
    with always(answer) as server, pytest.raises(RewardError) as caught:
        score(server.url)
    assert f"{server.url}: the answer has the key '{key}'. Write '{meant}'." in str(caught.value)


def test_two_keys_that_mean_the_same_are_refused() -> None:
    answer = 200, json.dumps({"rewards": [1.0], "reward": [0.5]}).encode()
    with always(answer) as server, pytest.raises(RewardError, match="beside 'rewards': drop one"):
        score(server.url)


def test_a_dead_server_is_replaced_by_another_without_waiting() -> None:
    with RewardServer() as server:
        result = score(f"{free_url()},{server.url}", 20)
    assert result.rewards == [float(i + 1) for i in range(20)]
    assert len(server.requests) == 20


def slow(server: RewardServer, body: dict[str, object]) -> Answer:
    server.stopping.wait(10)
    return lengths(server, body)


def test_a_slow_answer_ends_at_the_limit_of_all_tries() -> None:
    with RewardServer(slow) as server, pytest.raises(RewardError) as caught:
        score(server.url, timeout_s=0.7, try_timeout_s=0.3)
    assert "no answer in 0." in str(caught.value) and "--reward_timeout_s 0.7" in str(caught.value)


def echoing(change: Callable[[list[str]], object]) -> RewardServer:
    """A server that gives the ids back as this leaves them."""
    return RewardServer(
        lambda server, body: rewards([1.0] * len(body["query"]), ids=change(body["ids"]))
    )


@pytest.mark.parametrize("change", [lambda ids: ids[::-1], lambda ids: ids[:1], "".join])
def test_the_answer_to_other_samples_is_an_error(change: Callable[[list[str]], object]) -> None:
    with echoing(change) as server, pytest.raises(RewardError) as caught:
        score(server.url, 2, batch_size=2)
    found = change(["step1/0/0", "step1/1/0"])
    words = f"the ids {found!r}, where samples step1/0/0, step1/1/0 were asked for"
    assert words in str(caught.value) and server.url in str(caught.value)
    assert len(server.requests) == 1


def test_serve_rm_takes_what_is_sent() -> None:
    batch = replace(batch_of(2), columns={"is_truncated": [False, True], "level": ["easy", "hard"]})
    assert json.loads(body_of(batch))["is_truncated"] == [False, True]
    request = read_request(body_of(batch), ServerLimitsConfig())
    assert request.query == ["q", "qq"] and request.ids == ["step1/0/0", "step1/1/0"]
    row = 10**18  # and a step, a sample and a part of an episode that no run has
    longest = replace(batch, sample_ids=[f"episode{row}/{row}/{row}#{k}" for k in range(2)])
    assert read_request(body_of(longest), ServerLimitsConfig()).ids == longest.sample_ids


def test_another_model_in_the_place_of_the_first_is_an_error_until_the_first_is_back() -> None:
    answers = [rewards([1.0], models={"judge": digits}) for digits in ("aa", "bb", "aa")]
    with in_turn(*answers) as server, closing(RemoteReward(server.url)) as source:
        source.submit(batch_of(1)).result()
        with pytest.raises(RewardError) as caught:
            source.submit(batch_of(1)).result()
        assert source.submit(batch_of(1)).result().rewards == [1.0]
    assert f"{server.url}: it has another reward model now: {{'judge': 'bb'}}" in str(caught.value)
    assert "before it was {'judge': 'aa'}. Serve that one again" in str(caught.value)


def test_sixty_four_requests_are_in_flight_and_no_more() -> None:
    def together(server: RewardServer, body: dict[str, object]) -> Answer:
        deadline = time.monotonic() + 3
        while server.num_most < 64 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.02)
        return lengths(server, body)  # type: ignore[arg-type]

    with RewardServer(together) as server:
        result = score(server.url, 200)
    assert server.num_most == 64
    assert len(server.requests) == 200
    assert result.rewards == [float(i + 1) for i in range(200)]


def test_a_token_is_sent_and_no_proxy_comes_between_this_machine_and_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENRLHF_REWARD_TOKEN", "secret\n")  # as secrets are mounted
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    with RewardServer() as server:
        assert score(server.url).rewards == [1.0]
        assert score(server.url.replace("127.0.0.1", "localhost")).rewards == [1.0]
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("token", ["two words", "a\nb", "\u00fc"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENRLHF_REWARD_TOKEN", token)
    with pytest.raises(ConfigError) as caught:
        score("http://127.0.0.1:9")
    assert str(caught.value).startswith("OPENRLHF_REWARD_TOKEN holds a token that cannot be sent.")
    assert token not in str(caught.value)


def test_text_that_is_not_unicode_travels_and_labels_that_are_not_json_become_text() -> None:
    with RewardServer() as server, closing(RemoteReward(server.url)) as source:
        source.submit(RewardBatch(["\ud800\x00"], ["p"], ["r"], [None])).result()
        assert json.dumps(server.queries) == json.dumps(["\ud800\x00"])
        source.submit(RewardBatch(["q"], ["p"], ["r"], [date(2025, 1, 2)])).result()
    assert server.requests[1]["labels"] == ["2025-01-02"]


@pytest.mark.parametrize("urls", ["localhost:5000", "ftp://a/b", "a.py,b.py", "http://"])
def test_what_is_no_url_is_refused_before_a_thread_starts(urls: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"neither one \.py file nor a list of URLs"):
        RemoteReward(urls)
    assert threading.active_count() == before

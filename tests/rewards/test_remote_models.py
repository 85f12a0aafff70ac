"""What the client says of reward servers whose models differ, at one address or between two."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from openrlhf.errors import RewardError
from openrlhf.rewards import remote
from openrlhf.rewards.remote import RemoteReward
from tests.rewards.servers import RewardServer, rewards
from tests.rewards.test_remote import QUICK, always, batch_of, in_turn, score


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said from now on."""
    said: list[str] = []
    monkeypatch.setattr(remote, "warn", said.append)
    return said


def judges(stack: ExitStack, *models: object) -> list[RewardServer]:
    """Servers that answer with these models."""
    answers = (rewards([1.0], models=names) for names in models)
    return [stack.enter_context(always(answer)) for answer in answers]


def test_another_model_in_the_place_of_the_first_is_an_error_until_the_first_is_back() -> None:
    answers = [rewards([1.0], models={"judge": digits}) for digits in ("aa", "aa", "bb", "aa")]
    with in_turn(*answers) as server, closing(RemoteReward(server.url, QUICK)) as source:
        for _ in range(2):
            source.submit(batch_of(1)).result()
        with pytest.raises(RewardError) as caught:
            source.submit(batch_of(1)).result()
        assert source.submit(batch_of(1)).result().rewards == [1.0]
    assert f"{server.url}: another reward model answers now: judge (bb)" in str(caught.value)
    assert "before it was judge (aa). Serve that one again" in str(caught.value)


def test_servers_with_different_models_are_warned_of_once_by_url_and_hash(
    warnings: list[str],
) -> None:
    with ExitStack() as stack:
        servers = judges(stack, {"judge": "aa"}, {"judge": "bb"}, {"judge": "cc"})
        urls = [server.url for server in servers]
        with closing(RemoteReward(",".join(urls), QUICK)) as source:
            for _ in range(2):
                assert source.submit(batch_of(6)).result().rewards == [1.0] * 6
        assert all(server.requests for server in servers)
    [said] = warnings
    assert said.startswith("reward servers serve different models: ")
    named = [f"{u} judge ({x})" for u, x in zip(urls, ("aa", "bb", "cc"), strict=True)]
    assert sum(name in said for name in named) == 2
    assert "rewards of two models are not comparable within a group" in said


@pytest.mark.parametrize(
    "models",
    [
        [{"judge": "aa"}, {"judge": "aa"}],
        [{"judge": "aa"}, {"judge-copy": "aa"}],  # named after their folders
        [{"a": "aa", "b": "bb"}, {"b": "bb", "a": "aa"}],
        [{"judge": "aa"}, {}],
        [{"judge": "aa"}, None],
        [{"seconds": 1}, {"seconds": 2}],  # something of its own
    ],
)
def test_servers_with_the_same_models_or_none_are_not_warned_of(
    models: list[object], warnings: list[str]
) -> None:
    with ExitStack() as stack:
        servers = judges(stack, *models)
        score(",".join(server.url for server in servers), 6)
        assert all(server.requests for server in servers)
    assert not warnings


def test_a_server_may_say_other_things_under_that_name() -> None:
    with in_turn(*[rewards([1.0], models={"seconds": x}) for x in (1, 2)]) as server:
        score(server.url, 2)

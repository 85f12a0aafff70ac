"""Which Ray cluster is joined: the one named, else the one the user started; a dead one is noticed
at once, where Ray would try for minutes.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import services

from openrlhf.errors import ConfigError
from openrlhf.trainer.ray.launcher import find_cluster

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server


@pytest.fixture
def last_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `ray start` leaves its address, on a machine without a head."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = tmp_path / "ray"
    folder.mkdir()
    return folder / "ray_current_cluster"


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_head_that_left_its_address_behind_is_not_waited_for(last_address, listener, capsys):
    last_address.write_text(address_of(listener))
    listener.close()
    assert find_cluster(None) is None
    assert "does not respond" in capsys.readouterr().err


def test_a_head_that_listens_is_joined(last_address, listener):
    last_address.write_text(address_of(listener))
    found = find_cluster(None)
    assert found is not None and found.endswith(f":{listener.getsockname()[1]}")


def test_the_cluster_of_another_run_is_not_joined(last_address, listener, monkeypatch):
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {address_of(listener)})
    assert find_cluster(None) is None


def test_the_head_of_another_user_is_not_joined(last_address, listener, monkeypatch):
    last_address.write_text(address_of(listener))
    monkeypatch.setattr(os, "getuid", lambda: last_address.stat().st_uid + 1)
    assert find_cluster(None) is None


@pytest.mark.parametrize("kind", ["dead", "nonsense", "auto"])
def test_an_address_that_was_asked_for_must_respond(last_address, listener, monkeypatch, kind):
    asked = address_of(listener) if kind == "dead" else kind
    listener.close()
    monkeypatch.setenv("RAY_ADDRESS", asked)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS is {asked}, and no Ray cluster responds"):
        find_cluster(asked)

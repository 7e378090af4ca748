"""Loopback or a key; nothing from the wire is unpickled; engines that sleep."""

from __future__ import annotations

import asyncio
import re
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout import addresses, vllm_child
from mcore_rl.rollout.addresses import KEY_VARIABLE, KeyGuard, check_address, check_url, is_loopback
from mcore_rl.rollout.engine_args import engine_environment
from mcore_rl.rollout.sleep import SleepCycle, check_level
from mcore_rl.rollout.vllm_server import main, server_command, server_environment
from mcore_rl.rollout.vllm_url import UrlLink
from mcore_rl.types import StaleRollout

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback(host):
    assert is_loopback(host)
    check_address("--host", host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "node7", "localhost.example.org", ""])
def test_every_other_address_needs_a_key(host, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"--host: {re.escape(host)} is not loopback; set {KEY_VARIABLE}"):
        check_address("--host", host)
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    check_address("--host", host)


def test_the_server_listens_on_loopback_unless_told_otherwise_and_then_only_with_a_key(monkeypatch, capsys):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    command = server_command(RolloutConfig(), "model", port=8000)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    with pytest.raises(SystemExit):
        main(["--model", "model", "--host", "0.0.0.0"])
    assert f"--host: 0.0.0.0 is not loopback; set {KEY_VARIABLE}" in capsys.readouterr().err
    started = []
    monkeypatch.setattr("mcore_rl.rollout.vllm_server.os.execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr("mcore_rl.rollout.vllm_server.become_root", lambda: None)
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    main(["--model", "model", "--host", "0.0.0.0"])
    [(_, command, env)] = started
    assert command[command.index("--middleware") + 1] == addresses.GUARD
    assert env[KEY_VARIABLE] == "secret" and "secret" not in command


def test_a_link_to_another_address_needs_a_key_and_sends_it(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    limits = {"start_timeout_s": 1, "request_timeout_s": 1, "max_connections": 1}
    with pytest.raises(ValueError, match=r"rollout\.url=http://10\.0\.0\.7:8000: 10\.0\.0\.7 is not loopback"):
        UrlLink("http://10.0.0.7:8000", **limits)
    with pytest.raises(ValueError, match="is not loopback"):
        check_url("rollout.url", "http://node7:8000")
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert UrlLink("http://10.0.0.7:8000", **limits).headers == {"Authorization": "Bearer secret"}


def ask_guard(path, headers, kind="http"):
    """What comes back through the guard: "app" where it let the request through."""
    sent = []

    async def app(scope, receive, send):
        sent.append("app")

    async def send(message):
        sent.append(message.get("status") or message.get("code") or message["body"])

    asyncio.run(KeyGuard(app)({"type": kind, "path": path, "headers": headers}, None, send))
    return sent[0]


def test_the_guard_asks_for_the_key_on_every_route_but_health(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    right, wrong = [(b"authorization", b"Bearer secret")], [(b"authorization", b"Bearer secreT")]
    for path in ("/update_weights", "/collective_rpc", "/sleep", "/inference/v1/generate", "/healthy", "/v1/models"):
        assert ask_guard(path, right) == "app"
        assert [ask_guard(path, headers) for headers in ([], wrong, right + wrong)] == [401, 401, 401]
    assert ask_guard("/health", []) == "app"
    assert ask_guard("/v1/realtime", [], "websocket") == 1008
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ValueError, match="no key to ask for"):
        KeyGuard(lambda *_: None)


BOMB = b"cos\nmkdir\n(Vunpickled\ntR."  # a pickle, by hand: os.mkdir("unpickled") when it is opened


def pipe():
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def test_a_pickle_on_the_pipe_is_not_opened(tmp_path, monkeypatch):
    """The child reads bytes as JSON: a pickle is no message, and nothing in it runs."""
    monkeypatch.chdir(tmp_path)
    near, far = pipe()
    near.send_bytes(BOMB)
    with pytest.raises(ValueError, match="Expecting value"):
        vllm_child.serve(far, None)
    assert not (tmp_path / "unpickled").exists()
    near, far = pipe()
    near.send_bytes(BOMB)
    far.recv()  # this one unpickles
    assert (tmp_path / "unpickled").exists()


def test_no_code_between_run_and_engine_unpickles():
    """No import of pickle, no Connection.recv (which unpickles), numpy never with allow_pickle."""
    for folder in ("rollout", "sync"):
        for path in (ROOT / "mcore_rl" / folder).glob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"pickle\.|import pickle|cloudpickle|\.recv\(|torch\.load\(|allow_pickle=True", text), path
    for env in (engine_environment(RolloutConfig(), device="cpu", base={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}),):
        assert env["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
    assert server_environment(RolloutConfig())["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


class Sleeper:
    def __init__(self):
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake(self):
        self.calls.append("wake")


def cycle(level):
    sleeper = Sleeper()
    return sleeper, SleepCycle(sleeper, level)


def test_level_0_does_nothing():
    sleeper, engine = cycle(0)
    engine.rest()
    engine.wake()
    engine.require_usable("vllm")
    assert sleeper.calls == []


def test_level_1_is_itself_again_after_waking():
    sleeper, engine = cycle(1)
    engine.rest()
    engine.rest()
    with pytest.raises(StaleRollout, match="vllm sleeps"):
        engine.require_usable("vllm")
    engine.wake()
    engine.wake()
    engine.require_usable("vllm")
    assert sleeper.calls == ["sleep 1", "wake"]


def test_level_2_is_refused_until_a_complete_sync_followed():
    _, engine = cycle(2)
    engine.rest()
    with pytest.raises(StaleRollout, match="proved while the engine slept"):
        engine.proved()
    engine.wake()
    with pytest.raises(StaleRollout, match="vllm dropped its weights when it slept: a complete weight sync must come first"):
        engine.require_usable("vllm")
    engine.rest()
    engine.wake()
    assert engine.empty
    engine.proved()
    engine.require_usable("vllm")


def test_levels_that_cannot_be():
    check_level(0, cuda=False)
    check_level(2, cuda=True)
    for level in (1, 2):
        with pytest.raises(ValueError, match=f"rollout.sleep_level={level}: engines on a CPU cannot sleep; use 0"):
            check_level(level, cuda=False)
    with pytest.raises(ValueError, match=r"rollout.sleep_level=3: one of 0 .*, 1 .*, 2"):
        check_level(3, cuda=True)

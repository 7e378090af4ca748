"""Servers by a file of addresses: replaced, come back, gone. Engines are stubs."""

from __future__ import annotations

import codecs
import errno
import threading
import time
from pathlib import Path

import pytest
from fleet_stubs import PROMPTS, SAMPLING, VALUES, Servers, Source, drawn, expected

from mcore_rl.rollout import supply
from mcore_rl.rollout.addresses import KEY_VARIABLE, read_url_file
from mcore_rl.types import EngineDied


@pytest.fixture(autouse=True)
def key(monkeypatch):
    """The servers here are not on loopback."""
    monkeypatch.setenv(KEY_VARIABLE, "secret")


def test_a_server_is_replaced_by_a_change_of_the_file(tmp_path):
    servers = Servers(tmp_path, "http://a:1", "http://b:1")
    servers.kill("http://b:1")
    assert drawn(servers.fleet.generate(PROMPTS, SAMPLING)) == expected()
    [line] = servers.fleet.refresh()
    assert "http://b:1 died during 'generate'; not replaced (death 1 of at most 5): write the address of another into" in line
    assert servers.fleet.refresh() == []  # said once
    servers.up.add("http://c:1")
    servers.write("http://a:1", "http://c:1")
    assert [line.split(":", 2)[0] for line in servers.fleet.refresh()] == ["engine http", "engine http"]
    assert servers.names() == ["http://a:1", "http://c:1"]
    servers.sync.renew()
    servers.sync.sync(Source(), lambda: VALUES)
    assert drawn(servers.fleet.generate(PROMPTS, SAMPLING)) == expected()
    assert servers.made[-1].asked[0] == ["p3", "p4", "p5", "p6"]


def test_a_server_that_comes_back_is_taken_again(tmp_path):
    servers = Servers(tmp_path, "http://a:1")
    servers.kill("http://a:1")
    with pytest.raises(EngineDied):
        servers.fleet.generate(PROMPTS, SAMPLING)
    threading.Timer(0.05, lambda: servers.up.add("http://a:1")).start()
    time.sleep(0.1)
    assert "replaced" in servers.fleet.refresh()[0]
    assert (servers.names(), servers.fleet.version) == (["http://a:1"], None)


def test_when_nobody_comes_the_run_ends(tmp_path):
    servers = Servers(tmp_path, "http://a:1")
    servers.kill("http://a:1")
    with pytest.raises(EngineDied):
        servers.fleet.generate(PROMPTS, SAMPLING)
    with pytest.raises(EngineDied, match=r"no rollout engine is left at http://a:1 and none came within"):
        servers.fleet.refresh()


def test_a_file_in_the_middle_of_being_written_is_read_again(tmp_path):
    servers = Servers(tmp_path, "http://a:1")
    servers.up.add("http://b:1")
    servers.file.write_text("")
    threading.Timer(0.3, lambda: servers.write("http://a:1", "http://b:1")).start()
    assert servers.fleet.refresh() == ["engine http://b:1 joined; it gets a complete sync before its first sample"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("http://a:1\nhttp//b:1\n", ":2: http//b:1: an address like"),
        ("http://a:1\nhttp://a:80x\n", ":2: http://a:80x: an address like"),
        ("http://a:1\nhttp://a:1/\n", ":2: http://a:1: the same server stands there twice"),
        ("", ": names no address"),
        (None, ": no such file"),
    ],
)
def test_a_typo_in_the_file_keeps_the_servers_and_is_said_once(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(supply, "_WRITING_S", 0.05)
    servers = Servers(tmp_path, "http://a:1", "http://b:1")
    if content is None:
        servers.file.unlink()
    else:
        servers.file.write_text(content)
    assert servers.fleet.refresh() == []  # no engine changed, so none is read back
    [line] = servers.fleet.complaints()
    assert line.startswith(f"rollout.url_file={servers.file}{message}")
    assert line.endswith("; the addresses of before stay in force: http://a:1, http://b:1")
    assert (servers.fleet.refresh(), servers.fleet.complaints()) == ([], [])
    assert servers.names() == ["http://a:1", "http://b:1"]
    servers.file.write_text("nonsense\n")
    assert servers.fleet.refresh() == []
    assert [line.split(": ")[1] for line in servers.fleet.complaints()] == ["nonsense"]  # another fault is said too
    servers.write("http://a:1")
    assert servers.fleet.refresh() == ["engine http://b:1 left the run"]


def test_a_fault_that_was_said_is_not_waited_for_again(tmp_path):
    servers = Servers(tmp_path, "http://a:1")
    servers.file.write_text("nonsense\n")
    assert (servers.fleet.refresh(), len(servers.fleet.complaints())) == ([], 1)
    started = time.monotonic()
    assert servers.fleet.refresh() == []
    assert time.monotonic() - started < 1


def test_a_file_that_is_wrong_from_the_beginning_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(supply, "_WRITING_S", 0.05)
    with pytest.raises(ValueError, match=r"servers\.txt:2: nonsense: an address like"):
        Servers(tmp_path, "nonsense")


WRONG_LINES = {
    "hello": "an address like http://127.0.0.1:8000 is needed",
    "ftp://a:1": "an address like",
    "http://a:80x": "an address like http://127.0.0.1:8000 is needed (Port could not be cast to integer value as '80x')",
    "http://a:99999": "Port out of range",
    "http://a:0": "an address like",
    "http://[::1:8000": "an address like",
    "http://999.1.1.1:8000": "an address like",
    "http://:8000": "an address like",
    "http://b:1 http://c:1": "one by itself and without spaces",
    "http://b:1,http://c:1": "an address like",
    "http://a:1?x=1": "an address like",
    "http://A:1/": "the same server stands there twice, first as http://a:1",
    "http://localhost:7": "the same server stands there twice, first as http://127.0.0.1:7",
}


@pytest.mark.parametrize("wrong", WRONG_LINES)
def test_a_wrong_line_is_named_with_file_and_number(tmp_path, wrong):
    file = tmp_path / "servers.txt"
    file.write_text(f"# ours\nhttp://a:1\n\nhttp://127.0.0.1:7 # here\n{wrong}\n")
    with pytest.raises(ValueError, match=r"address|twice") as caught:
        read_url_file(file)
    assert str(caught.value).startswith(f"rollout.url_file={file}:5: {wrong.rstrip('/')}: ")
    assert WRONG_LINES[wrong] in str(caught.value)


def test_a_line_that_is_not_loopback_needs_the_key(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE)
    file = tmp_path / "servers.txt"
    file.write_text("http://127.0.0.1:1\nhttp://10.0.0.7:1\n")
    with pytest.raises(ValueError, match=r"servers.txt:2: http://10\.0\.0\.7:1: 10\.0\.0\.7 is not loopback"):
        read_url_file(file)


def test_a_file_of_addresses_is_read_strictly(tmp_path):
    file = tmp_path / "servers.txt"
    with pytest.raises(ValueError, match=r"servers\.txt: no such file"):
        read_url_file(file)
    with pytest.raises(ValueError, match="is no file"):
        read_url_file(tmp_path)
    file.write_text("# nobody\n\n")
    with pytest.raises(ValueError, match="names no address"):
        read_url_file(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"servers.txt: is no UTF-8 text \(byte 0\)"):
        read_url_file(file)
    file.write_bytes(codecs.BOM_UTF8 + b"http://a:1/ # first\r\n https://b:2\r\nhttp://[::1]:3\nhttp://127.0.0.1:4/there\n")
    assert read_url_file(file) == ["http://a:1", "https://b:2", "http://[::1]:3", "http://127.0.0.1:4/there"]


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    file = tmp_path / "servers.txt"
    file.write_text("http://a:1\n")
    monkeypatch.setattr(Path, "read_text", refuse)  # root may read every file
    with pytest.raises(ValueError, match=r"servers\.txt: cannot be read: Permission denied"):
        read_url_file(file)

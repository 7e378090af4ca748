"""Servers by a file of addresses: replaced, come back, gone. Engines are stubs."""

from __future__ import annotations

import threading
import time

import pytest
from fleet_stubs import PROMPTS, SAMPLING, VALUES, Servers, Source, drawn, expected

from mcore_rl.rollout.supply import read_url_file
from mcore_rl.types import EngineDied


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


def test_a_file_of_addresses_is_read_strictly(tmp_path):
    file = tmp_path / "servers.txt"
    with pytest.raises(ValueError, match="no such file"):
        read_url_file(file)
    file.write_text("# nobody\n\n")
    with pytest.raises(ValueError, match="names no address"):
        read_url_file(file)
    file.write_text("http://a:1/ # first\nhttp://a:1\n")
    with pytest.raises(ValueError, match="stands there twice"):
        read_url_file(file)

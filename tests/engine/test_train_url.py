"""`mcore-rl train` against a vLLM server it does not own: two steps, then the server dies in generation and in a sync."""

import time

import psutil
import pytest
from cli_runs import CACHE_RESET, FINISHED_LOADING, start_run, wait_for_line, wait_for_rows
from url_proxy import Proxy
from url_servers import Server, build_served

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_served(tmp_path_factory.mktemp("served"))


@pytest.fixture
def server(model, tmp_path):
    running = Server(model, tmp_path)
    running.wait()
    yield running
    running.kill()


def _run(tmp_path, model, server, name, *overrides):
    placement = ("rollout.placement=url", f"rollout.url=[{server.url}]", "rollout.max_engine_restarts=0")
    return start_run(tmp_path, name, f"model.path={model}", "model.build=null", *placement, *overrides)


def _ends_well(run, server):
    server.kill()
    started = time.monotonic()
    code, _, err = run.finish(LIMIT_S)
    last = err.strip().splitlines()[-1]
    assert code != 0
    assert server.url in last or server.url.removeprefix("http://") in last, err[-1500:]
    assert "Traceback" not in err
    assert run.leftovers() == []
    assert run.summary()["exit_reason"] not in ("completed", "")
    assert time.monotonic() - started < LIMIT_S


def test_two_steps_then_the_server_dies_in_generation(tmp_path, model, server):
    complete = _run(tmp_path, model, server, "two_steps", "train.steps=2")
    code, _, err = complete.finish(300.0)
    assert code == 0, err[-2000:]
    assert [row["version"] for row in complete.rows()] == [2, 4]
    assert max(row["delta_max_abs_nats"] for row in complete.rows()) <= 1e-3
    assert complete.summary()["export_check"]["matched"] > 0
    assert psutil.pid_exists(server.process.pid)  # a server that is not ours is left running

    endless = _run(tmp_path, model, server, "generation", "train.steps=100000", "rollout.max_tokens=100")
    wait_for_rows(endless, 1)
    wait_for_line(server.log, CACHE_RESET)
    time.sleep(0.5)
    _ends_well(endless, server)


def test_the_server_dies_in_a_sync(tmp_path, model, server):
    run = _run(tmp_path, model, server, "sync", "train.steps=100000", "rollout.max_tokens=2")
    wait_for_rows(run, 1)
    wait_for_line(server.log, FINISHED_LOADING)
    _ends_well(run, server)


@pytest.fixture
def behind(server):
    """behind(which): a proxy of the server that answers, to those weight updates, that they were not done."""
    proxies = []

    def start(which):
        no = {"success": False, "message": "no memory"}
        proxies.append(Proxy(server.url, lambda path, count: no if path == "/update_weights" and which(count) else None))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.stop()


def test_an_update_that_was_not_done_is_synced_again_or_ends_the_run(tmp_path, model, behind):
    """One bucket a sync; the third is refused once, or always."""
    again = ("train.steps=3", "sync.on_failed_proof=resync")
    once = behind(lambda count: count == 3)
    run = _run(tmp_path, model, once, "healed", *again)
    code, out, err = run.finish(300.0)
    assert code == 0, err[-2000:]
    [line] = [line for line in out.splitlines() if "weight sync failed" in line]
    said = f"vllm at {once.url} (log: where that server was started): /update_weights: status 200 and says that it was not done: "
    assert said in line and "no memory" in line and "a complete one follows (re-sync 1 of at most 2)" in line
    rows = run.rows()
    assert [row["version"] for row in rows] == [2, 4, 6]
    assert rows[-1]["sync/resyncs"] == 1
    assert max(row["delta_max_abs_nats"] for row in rows) <= 1e-3

    code, _, err = _run(tmp_path, model, behind(lambda count: count >= 3), "stopped", *again).finish(300.0)
    assert code != 0
    last = err.strip().splitlines()[-1]
    assert last.count("/update_weights: status 200 and says that it was not done") == 2, err[-2000:]
    assert "this was the complete sync that followed a failed one" in last

    code, _, err = _run(tmp_path, model, behind(lambda count: count == 3), "default", "train.steps=3").finish(300.0)
    assert code != 0
    assert err.strip().splitlines()[-1].count("/update_weights: status 200 and says that it was not done") == 1, err[-2000:]

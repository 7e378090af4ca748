"""Two servers by a file of addresses; one is killed in mid-run and another takes its place by a change of the file."""

import pytest
from chaos_runs import HELD, compare
from cli_runs import start_run, wait_for_rows
from url_servers import Server, build_served

STEPS = 16
RUN = (f"train.steps={STEPS}", "rollout.max_tokens=60", "rollout.max_model_len=128", "model.build=null")


@pytest.fixture
def servers(tmp_path):
    """Three of them, serving the same model."""
    model = build_served(tmp_path)
    started = [Server(model, tmp_path, name) for name in "abc"]
    for server in started:
        server.wait()
    yield model, *started
    for server in started:
        server.kill()


@pytest.mark.timeout(1500)
def test_a_killed_server_is_replaced_by_a_change_of_the_file(tmp_path, servers):
    model, first, second, third = servers
    addresses = tmp_path / "servers.txt"
    addresses.write_text(f"{first.url}\n{second.url}\n")
    calm = start_run(tmp_path, "calm", *HELD, *RUN, f"model.path={model}")
    code, _, err = calm.finish(300.0)
    assert code == 0, err[-2000:]

    placement = ("rollout.placement=url", f"rollout.url_file={addresses}", "rollout.request_timeout_s=30")
    run = start_run(tmp_path, "struck", *HELD, *RUN, f"model.path={model}", *placement)
    wait_for_rows(run, 2)
    second.kill()
    alone = len(run.rows()) + 2
    wait_for_rows(run, alone)
    addresses.write_text(f"# b died\n{first.url}\n{third.url}\n")
    code, out, err = run.finish(300.0)
    assert code == 0, err[-2000:]

    alive = [row["engine/alive"] for row in run.rows()]
    assert alive[0] == alive[-1] == 2 and 1 in alive, alive
    assert run.rows()[-1]["engine/restarts"] == 1
    assert "write the address of another into" in out and f"engine {third.url} joined" in out
    assert min(server.generations for server in (first, second, third)) > 0
    found = compare(run, calm)
    assert (found.total, found.missing, found.doubled) == (STEPS * 4 * 2, [], [])
    assert found.equal >= 0.99 * found.total, found.different
    assert run.leftovers() == []
    assert first.process.poll() is None and third.process.poll() is None

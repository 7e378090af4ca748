"""Metrics that know their reducer, JSON lines that keep NaN, sinks, and what a person sees."""

import io
import json
import math
import os
import sys
from pathlib import Path

import pytest

from mcore_rl.progress import PROGRESS_FD, Progress, progress_stream, step_line
from mcore_rl.telemetry.fanout import FanOut
from mcore_rl.telemetry.jsonl import dump_line, read_rows, read_texts
from mcore_rl.telemetry.jsonl_sink import JsonlSink
from mcore_rl.telemetry.metrics import Metric, Reducer, combine, largest, last, mean, smallest, total


def test_parts_are_combined_by_their_own_reducer():
    """Mean of 2 over 1 item and 5 over 3 items is (2 + 15) / 4, not 3.5."""
    one = {"loss": mean(2.0, 1), "tokens": total(10), "low": smallest(3), "high": largest(3), "lr": last(0.1)}
    two = {"loss": mean(5.0, 3), "tokens": total(7), "low": smallest(-1), "high": largest(-1), "lr": last(0.2), "extra": last(9)}
    assert combine([one, two]) == {"loss": 4.25, "tokens": 17, "low": -1, "high": 3, "lr": 0.2, "extra": 9}


@pytest.mark.parametrize("reducer", [Reducer.MEAN, Reducer.SUM, Reducer.MIN, Reducer.MAX])
@pytest.mark.parametrize("place", [0, 1])
def test_nan_in_any_part_stays(reducer, place):
    values = [1.0, 1.0]
    values[place] = math.nan
    assert math.isnan(combine([{"x": Metric(value, reducer)} for value in values])["x"])


def test_a_part_without_weight_does_not_count_and_a_mean_of_nothing_is_nan():
    assert combine([{"x": mean(math.nan, 0)}, {"x": mean(3.0, 2)}]) == {"x": 3.0}
    assert math.isnan(combine([{"x": mean(0.0, 0)}])["x"])


def test_parts_that_disagree_on_the_reducer_are_refused():
    with pytest.raises(ValueError, match="metric x: reducers differ between parts: max, mean"):
        combine([{"x": mean(1.0)}, {"x": largest(1.0)}])


def test_lines_are_strict_json_and_numbers_come_back(tmp_path):
    row = {"step": 3, "a": math.nan, "b": [1.5, math.inf, -math.inf], "c": {"d": math.nan}}
    line = dump_line(row)

    def forbidden(name):
        raise AssertionError(f"{name} is not strict JSON")

    strict = json.loads(line, parse_constant=forbidden)
    assert strict == {"step": 3, "a": "NaN", "b": [1.5, "Infinity", "-Infinity"], "c": {"d": "NaN"}}
    (tmp_path / "x.jsonl").write_text(line + "\n")
    (back,) = read_rows(tmp_path / "x.jsonl")
    assert math.isnan(back["a"])
    assert back["b"] == [1.5, math.inf, -math.inf]


def test_a_half_written_last_line_is_dropped_and_a_broken_one_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0}\n{"step":1,"lo')
    assert read_rows(path) == [{"step": 0}]
    path.write_text('{"step":0}\n{"step":1,"lo\n{"step":2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON"):
        read_rows(path)


def test_a_text_is_read_back_as_it_was_written(tmp_path):
    """Also one with an end of line of str.splitlines, one that is a number's name, and after a cut inside a character."""
    row = {"a": "x\u2028y\u2029z\x85", "b": "NaN"}
    line = dump_line(row) + "\n"
    (tmp_path / "x.jsonl").write_bytes((line + line).encode() + line.encode()[:8])
    assert read_texts(tmp_path / "x.jsonl") == [row, row]


@pytest.mark.parametrize("line", [b"[]", b"\xff", b"[" * 100_000, b"1" * 5_000])
def test_a_line_that_cannot_be_a_row_is_named(tmp_path, line):
    (tmp_path / "x.jsonl").write_bytes(b'{"step":0}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: "):
        read_rows(tmp_path / "x.jsonl")


def test_the_sink_writes_each_step_at_once(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log_step(0, {"x": math.nan, "load": [1.0, 2.0]})
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert math.isnan(row["x"])
    assert (row["step"], row["load"]) == (0, [1.0, 2.0])
    sink.close()
    sink.close()


@pytest.mark.parametrize("value", [None, "3", True, [1.0, None]])
def test_the_sink_refuses_what_is_no_number(tmp_path, value):
    sink = JsonlSink(tmp_path)
    with pytest.raises(ValueError, match="metric reward at step 4 is"):
        sink.log_step(4, {"reward": value})
    sink.close()


def test_left_out_rollouts_are_counted(tmp_path):
    sink = JsonlSink(tmp_path, max_rollouts=3)
    sink.log_rollouts(0, [{"id": 0, "delta": math.nan}, {"id": 1}])
    sink.log_rollouts(1, [{"id": 2}, {"id": 3}, {"id": 4}])
    sink.close()
    rows = read_rows(tmp_path / "rollouts.jsonl")
    assert [row.get("id") for row in rows] == [0, 1, 2, None]
    assert math.isnan(rows[0]["delta"])
    assert rows[-1] == {"rollouts_left_out": 2}


class Recording:
    def __init__(self, name, events, *, fails=False):
        self.name, self.events, self.fails = name, events, fails

    def log_step(self, step, metrics):
        self.events.append((self.name, "step", step, metrics))

    def log_rollouts(self, step, records):
        self.events.append((self.name, "rollouts", step, list(records)))

    def close(self):
        self.events.append((self.name, "close"))
        if self.fails:
            raise OSError("disk full")


def test_every_sink_gets_everything_and_all_are_closed():
    events = []
    sink = FanOut([Recording("a", events), Recording("b", events, fails=True)])
    sink.log_step(1, {"x": 1.0})
    sink.log_rollouts(1, [{"id": 0}])
    with pytest.raises(OSError, match="disk full"):
        sink.close()
    assert events[:2] == [("a", "step", 1, {"x": 1.0}), ("b", "step", 1, {"x": 1.0})]
    assert events[2:4] == [("a", "rollouts", 1, [{"id": 0}]), ("b", "rollouts", 1, [{"id": 0}])]
    assert events[4:] == [("b", "close"), ("a", "close")]


ROW = {
    "reward_mean": 0.4125,
    "accuracy": 0.39,
    "delta_mean_abs_nats": 2.1e-6,
    "delta_max_abs_nats": 1.2e-5,
    "seconds/rollout": 1.24,
    "seconds/update": 2.0,
    "expert_load/layer_0": [1.0, 2.0],
}


def test_a_step_on_one_line():
    line = step_line(2, 20, ROW, held_out=0.195)
    assert line == (
        "step  3/20  reward 0.412  accuracy 0.390 (held-out 0.195)  |delta| 2.1e-06 nats (max 1.2e-05)  "
        "rollout 1.2s update 2.0s = 3.2s"
    )
    assert step_line(0, 5, {}) == "step 1/5  reward -  accuracy -"
    assert "reward -" in step_line(0, 5, {"reward_mean": math.nan})
    taught = step_line(0, 5, {"teacher_kl_nats/0": 0.12345, "teacher_kl_nats/1": 0.1})
    assert taught == "step 1/5  reward -  accuracy -  KL to teacher 0.1235 0.1000 nats"


def test_a_log_gets_plain_lines_and_the_places_last():
    stream = io.StringIO()
    with Progress(3, stream=stream) as progress:
        progress.phase("warm-up", 280)
        progress.advance("warm-up", 20, 280)
        progress.evaluation("before RL", 0.195, 0.035, 500)
        progress.log_step(0, dict(ROW))
        progress.log_rollouts(0, [])
        progress.finish({"report": "runs/x/report.html", "logs": "runs/x/logs"}, "gain +69.5 points")
    text = stream.getvalue()
    lines = [line.split("] ", 1)[1] for line in text.splitlines()]
    assert lines[0] == "warm-up (280 steps)"
    assert lines[1] == "held-out accuracy, before RL: 0.195 +- 0.035 (500 prompts)"
    assert lines[2].startswith("step 1/3  reward 0.412  accuracy 0.390 (held-out 0.195)")
    assert lines[3:] == ["gain +69.5 points", "report  runs/x/report.html", "logs    runs/x/logs"]
    assert "\x1b" not in text


def test_progress_can_be_silent():
    stream = io.StringIO()
    with Progress(3, stream=stream, enabled=False) as progress:
        progress.phase("warm-up")
        progress.log_step(0, dict(ROW))
        progress.finish({"report": "x"})
    assert stream.getvalue() == ""


def test_progress_falls_silent_when_nobody_reads_it():
    """No error at a line, at the end, or when the stream itself goes away with bytes left in it."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, Progress(3, stream=stream) as progress:
        for step in range(3):
            progress.log_step(step, dict(ROW))
        progress.phase("export", 3)
        progress.finish({"report": "x"}, "done")


@pytest.mark.skipif(not Path("/dev/ptmx").exists(), reason="no pseudo-terminals here")
def test_progress_falls_silent_when_its_terminal_is_gone():
    main, terminal = os.openpty()
    stream = os.fdopen(terminal, "w")
    with stream, Progress(3, stream=stream) as progress:
        os.close(main)
        progress.line("x" * 100)
        progress.advance("training", 1, 3)
        progress.finish({"report": "x"})


def test_progress_goes_to_the_launcher_s_terminal(tmp_path, monkeypatch):
    with (tmp_path / "terminal").open("w") as terminal:
        monkeypatch.setenv(PROGRESS_FD, str(terminal.fileno()))
        progress_stream().write("here\n")
    assert (tmp_path / "terminal").read_text() == "here\n"


@pytest.mark.parametrize("number", ["", "seven", "-1", "1e3", "9999", "9" * 30, "/dev/null"])
def test_a_descriptor_that_is_none_is_named_and_not_used(monkeypatch, capsys, number):
    monkeypatch.setenv(PROGRESS_FD, number)
    with Progress(3) as progress:
        progress.line("here")
    said = capsys.readouterr()
    assert "here" in said.out
    assert said.err.startswith(f"{PROGRESS_FD}={number!r} is no open file descriptor to write to")
    assert len(said.err.splitlines()) == 1


def test_a_descriptor_for_reading_is_not_written_to(monkeypatch, capsys):
    with Path(os.devnull).open() as readable:
        monkeypatch.setenv(PROGRESS_FD, str(readable.fileno()))
        assert progress_stream() is sys.stdout
    assert "open for reading alone" in capsys.readouterr().err


def test_progress_without_a_stdout_goes_nowhere(monkeypatch):
    monkeypatch.delenv(PROGRESS_FD, raising=False)
    monkeypatch.setattr(sys, "stdout", None)
    with Progress(3) as progress:
        progress.line("here")

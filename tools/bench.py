"""`make bench`: one GSPO batch here (Megatron + vLLM + proved sync) against TRL's GRPOTrainer, step by step in turns.

8 prompts x 8 samples x 32 tokens, a 23 M-parameter Qwen3-MoE in fp32, the same checkpoint, prompts, reward, completion
length and one optimizer step a batch on both sides. Median of the steps after two warm-ups. Exit status 1 when ours is
slower. Figures and conditions go to runs/bench/bench.json.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import bench_case as case
from bench_idle import say_if_busy, settled_load

from mcore_rl.config.compose import compose_config, resolved_yaml
from mcore_rl.config.schema import BuildConfig, TaskConfig
from mcore_rl.data.build import build_task
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.ranks import free_port
from mcore_rl.tiny_model import build_tiny

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "bench"
TRL_VENV = ROOT / ".venv-trl"
TRL_PINS = ROOT / "requirements" / "trl.txt"
CORES = len(os.sched_getaffinity(0))
WORLD = 2
TARGET = 0.8


@dataclass
class Side:
    """One side of the comparison: its processes (the first one talks), its log, its figures."""

    name: str
    processes: list[subprocess.Popen[str]]
    log: Path
    steps: list[dict[str, object]] = field(default_factory=list)

    def hear(self) -> dict[str, object]:
        """The next answer; everything else it prints goes to the log. SystemExit when it ended."""
        talker = self.processes[0]
        if talker.stdout is None:
            raise RuntimeError(f"{self.name} has no output pipe")
        with self.log.open("a") as log:
            for line in talker.stdout:
                if line.startswith(case.MARK):
                    return json.loads(line.removeprefix(case.MARK))
                log.write(line)
        raise SystemExit(f"{self.name} ended early (exit status {talker.wait()}); its log is {self.log}")

    def step(self) -> None:
        """Order one step and keep its figures."""
        talker = self.processes[0]
        if talker.stdin is None:
            raise RuntimeError(f"{self.name} has no input pipe")
        talker.stdin.write("step\n")
        talker.stdin.flush()
        self.steps.append(self.hear())
        print(f"{self.name:8s} step {len(self.steps) - 1}: {self.seconds()[-1]:.3f} s", flush=True)

    def seconds(self) -> list[float]:
        """Seconds of every step so far."""
        return [float(str(step["seconds"])) for step in self.steps]

    def stages(self) -> dict[str, float]:
        """Median seconds per stage over the measured steps."""
        rows = [step["stages"] for step in self.steps[case.WARM_UPS :]]
        parts = [row for row in rows if isinstance(row, dict)]
        return {name: statistics.median(part.get(name, 0.0) for part in parts) for name in parts[-1]}

    def end(self) -> None:
        """Close its input, then make sure that nothing is left."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def trl_python() -> Path:
    """TRL's own environment, made from requirements/trl.txt when it is missing or the pins changed."""
    python, stamp = TRL_VENV / "bin" / "python", TRL_VENV / "bench.stamp"
    if not stamp.is_file() or stamp.read_text() != TRL_PINS.read_text():
        print(f"creating {TRL_VENV} (once, some minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(TRL_VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-r", str(TRL_PINS)], check=True)
        stamp.write_text(TRL_PINS.read_text())
    return python


def write_case() -> tuple[Path, Path]:
    """Checkpoint folder and prompts file of the case."""
    checkpoint, prompts = FOLDER / "checkpoint", FOLDER / "prompts.json"
    build_tiny(checkpoint, BuildConfig(hf_config=dict(case.MODEL)), seed=0)
    tokenizer = load_tokenizer(checkpoint)
    task = build_task(TaskConfig(), tokenizer, seed=0)
    drawn = [task.prompts(step, case.PROMPTS_PER_STEP) for step in range(case.WARM_UPS + case.STEPS)]
    rows = [[{"text": task.renderer.text(p.question), "ids": list(p.token_ids)} for p in step] for step in drawn]
    prompts.write_text(json.dumps(rows))
    return checkpoint, prompts


def write_config(checkpoint: Path) -> Path:
    """The run's configuration: an ordinary one without evaluation; `python tools/bench.py key=value ...` changes it."""
    overrides = {
        "name": "bench/ours",
        "out_dir": str(ROOT / "runs"),
        "device": "cpu",
        "model": "hf",
        "model.path": str(checkpoint),
        "layout.world": WORLD,
        "layout.ep": WORLD,
        "optimizer.lr": case.LEARNING_RATE,
        "algorithm.clip_low": case.CLIP_LOW,
        "algorithm.clip_high": case.CLIP_HIGH,
        "rollout.max_tokens": case.COMPLETION_TOKENS,
        "rollout.max_model_len": 64,
        "rollout.threads": CORES,
        "train.steps": case.WARM_UPS + case.STEPS,
        "train.prompts_per_step": case.PROMPTS_PER_STEP,
        "train.samples_per_prompt": case.SAMPLES,
        "eval.prompts": 0,
        "telemetry.wandb": "disabled",
        "telemetry.progress": False,
    }
    path = FOLDER / "config.yaml"
    path.write_text(resolved_yaml(compose_config([*(f"{key}={value}" for key, value in overrides.items()), *sys.argv[1:]])))
    return path


def start(name: str, commands: list[list[str]], environments: list[dict[str, str]]) -> Side:
    """Start a side's processes; the first one is spoken to."""
    log = FOLDER / f"{name}.log"
    processes = []
    for command, extra in zip(commands, environments, strict=True):
        pipe = subprocess.PIPE if not processes else subprocess.DEVNULL
        with log.open("a") as errors:
            out = subprocess.PIPE if not processes else errors
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **extra}
            started = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdin=pipe, stdout=out, stderr=errors)
        processes.append(started)
    return Side(name, processes, log)


def start_ours(config: Path, prompts: Path) -> Side:
    """Our ranks, one thread each, and their engine."""
    command = [sys.executable, str(ROOT / "tools" / "bench_ours.py"), str(config), str(prompts)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    shared |= {"TORCHDYNAMO_DISABLE": "1", "LOCAL_WORLD_SIZE": str(WORLD)}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORLD)]
    return start("ours", [command] * WORLD, environments)


def start_trl(checkpoint: Path, prompts: Path) -> Side:
    """TRL on all cores."""
    command = [str(trl_python()), str(ROOT / "tools" / "bench_trl.py"), str(checkpoint), str(prompts), str(FOLDER / "trl")]
    return start("trl", [command], [{"OMP_NUM_THREADS": str(CORES)}])


def report(ours: Side, trl: Side, parameters: int, load: float) -> bool:
    """Print and write the figures; True when ours is not slower."""
    medians = {side.name: statistics.median(side.seconds()[case.WARM_UPS :]) for side in (ours, trl)}
    ratio = medians["ours"] / medians["trl"]
    excess = medians["ours"] - TARGET * medians["trl"]
    stages = dict(sorted(ours.stages().items(), key=lambda item: -item[1]))
    figures = {
        "parameters": parameters,
        "cores": CORES,
        "steps": case.STEPS,
        "warm_ups": case.WARM_UPS,
        "load_average_before": load,
        "seconds_median": medians,
        "ratio": ratio,
        "stages_ours_s": stages,
        "stages_trl_s": trl.stages(),
        "seconds": {side.name: side.seconds() for side in (ours, trl)},
    }
    (FOLDER / "bench.json").write_text(json.dumps(figures, indent=1))
    print(
        f"\n{parameters:,} parameters, {CORES} cores, median of {case.STEPS} steps after {case.WARM_UPS} warm-ups, taken in turns"
    )
    say_if_busy(load)
    print(f"ours {medians['ours']:.3f} s, TRL {medians['trl']:.3f} s a step: ratio {ratio:.2f}")
    print("ours by stage: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in stages.items()))
    print("TRL by stage: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in trl.stages().items()))
    if excess > 0:
        print(f"{TARGET}x would need {excess:.3f} s less, out of " + ", ".join(list(stages)[:3]))
    else:
        print(f"{TARGET}x is reached with {-excess:.3f} s to spare")
    print(f"figures: {FOLDER / 'bench.json'}")
    return ratio <= 1.0


def main() -> None:
    """Command line."""
    load = settled_load()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    checkpoint, prompts = write_case()
    sides = [start_trl(checkpoint, prompts)]
    try:
        sides.append(start_ours(write_config(checkpoint), prompts))
        trl, ours = sides
        sizes = [side.hear().get("parameters") for side in sides]
        if sizes[0] != sizes[1]:
            raise SystemExit(f"the two sides hold different models: {sizes} parameters")
        for _ in range(case.WARM_UPS + case.STEPS):
            trl.step()
            ours.step()
        faster = report(ours, trl, int(str(sizes[0])), load)
    finally:
        for side in sides:
            side.end()
    raise SystemExit(0 if faster else 1)


if __name__ == "__main__":
    main()

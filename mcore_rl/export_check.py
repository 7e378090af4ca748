"""Does the exported checkpoint, read by plain transformers, answer as the engine did? Greedy, token for token.

The engine's own answer is scored, so every token of it is judged, whatever came before: it is transformers' choice too, or
its log-prob is so close below the best that the engine's rounding decides (a near tie).

Runs in a process of its own (`python -m mcore_rl.export_check CHECKPOINT REQUESTS`): a trainer rank's torch is patched.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.types import Completion

_LIMIT_S = 1800.0


@dataclass(frozen=True)
class ExportCheck:
    """Greedy answers of `prompts` prompts: `matched` are identical, `near_ties` part only where rounding decides.

    `first_difference` describes the first that is neither.
    """

    prompts: int
    matched: int
    near_ties: int
    first_difference: str | None

    def to_json(self) -> dict[str, Any]:
        """Builtins only."""
        return asdict(self)


@dataclass(frozen=True)
class Scored:
    """Of every token of an answer: what transformers would have chosen, and by how many nats it is likelier."""

    choices: list[int]
    gaps: list[float]


def check_export(checkpoint: Path, completions: Sequence[Completion], scratch: Path, *, tie_nats: float) -> ExportCheck:
    """Let transformers score the engine's greedy `completions` with `checkpoint`.

    tie_nats: log-probs at most this far apart are a tie between the two engines. RuntimeError with the child's last line when
    the checkpoint cannot be read or run.
    """
    requests = [{"prompt": list(c.prompt_token_ids), "answer": list(c.token_ids)} for c in completions]
    scratch.write_text(json.dumps(requests), encoding="utf-8")
    command = [sys.executable, "-m", "mcore_rl.export_check", str(checkpoint), str(scratch)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"export check: transformers could not answer from {checkpoint}: {reason}")
    scored = [Scored(**row) for row in json.loads(child.stdout.strip().splitlines()[-1])]
    return judge(completions, scored, tie_nats)


def judge(completions: Sequence[Completion], scored: Sequence[Scored], tie_nats: float) -> ExportCheck:
    """Identical, near tie or different, answer by answer."""
    matched = near_ties = 0
    different: list[str] = []
    for completion, row in zip(completions, scored, strict=True):
        parted = [index for index, token in enumerate(completion.token_ids) if token != row.choices[index]]
        wrong = [index for index in parted if not row.gaps[index] <= tie_nats]
        if wrong:
            at = wrong[0]
            different.append(
                f"{completion.prompt_id}, token {at}: engine {completion.token_ids[at]}, transformers {row.choices[at]}, "
                f"{row.gaps[at]:.3g} nats likelier (a tie: {tie_nats:g})"
            )
        elif parted:
            near_ties += 1
        else:
            matched += 1
    return ExportCheck(len(completions), matched, near_ties, different[0] if different else None)


def score_answers(checkpoint: Path, requests: Sequence[dict[str, list[int]]]) -> list[Scored]:
    """Every token of every answer after its prompt, in one forward pass of transformers each (no generation config)."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    scored: list[Scored] = []
    for request in requests:
        prompt, answer = request["prompt"], request["answer"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best, choices = logits.max(-1)  # a difference of logits is one of log-probs
        given = logits.gather(1, torch.tensor(answer, dtype=torch.int64)[:, None])[:, 0]
        scored.append(Scored(choices.tolist(), (best - given).tolist()))
    return scored


def main(argv: Sequence[str]) -> int:
    """argv: checkpoint folder, requests file. Prints one JSON line of scores."""
    checkpoint, requests = argv
    scored = score_answers(Path(checkpoint), json.loads(Path(requests).read_text(encoding="utf-8")))
    sys.stdout.write(json.dumps([asdict(row) for row in scored]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Does the exported checkpoint, read by plain transformers, answer as the engine did? Greedy, token for token.

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
    """`matched` of `prompts` greedy answers are identical; `first_difference` describes the first that is not."""

    prompts: int
    matched: int
    first_difference: str | None

    def to_json(self) -> dict[str, Any]:
        """Builtins only."""
        return asdict(self)


def check_export(checkpoint: Path, completions: Sequence[Completion], scratch: Path) -> ExportCheck:
    """Let transformers answer the same prompts greedily from `checkpoint` and compare with the engine's `completions`.

    RuntimeError with the child's last line when the checkpoint cannot be read or generated from.
    """
    requests = [{"prompt": list(c.prompt_token_ids), "max_tokens": len(c.token_ids)} for c in completions]
    scratch.write_text(json.dumps(requests), encoding="utf-8")
    command = [sys.executable, "-m", "mcore_rl.export_check", str(checkpoint), str(scratch)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"export check: transformers could not answer from {checkpoint}: {reason}")
    answers: list[list[int]] = json.loads(child.stdout.strip().splitlines()[-1])
    different = [
        f"{c.prompt_id}: engine {list(c.token_ids)}, transformers {answer}"
        for c, answer in zip(completions, answers, strict=True)
        if list(c.token_ids) != answer
    ]
    return ExportCheck(len(completions), len(completions) - len(different), different[0] if different else None)


def answer_greedily(checkpoint: Path, requests: Sequence[dict[str, object]]) -> list[list[int]]:
    """The next max_tokens most likely tokens after every prompt, by transformers' forward alone (no generation config)."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    answers: list[list[int]] = []
    with torch.no_grad():
        for request in requests:
            prompt, count = request["prompt"], request["max_tokens"]
            ids = torch.tensor([prompt])
            cache = None
            chosen: list[int] = []
            for _ in range(int(str(count))):
                output = model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                chosen.append(int(output.logits[0, -1].argmax()))
                ids = torch.tensor([[chosen[-1]]])
            answers.append(chosen)
    return answers


def main(argv: Sequence[str]) -> int:
    """argv: checkpoint folder, requests file. Prints one JSON line of answers."""
    checkpoint, requests = argv
    answers = answer_greedily(Path(checkpoint), json.loads(Path(requests).read_text(encoding="utf-8")))
    sys.stdout.write(json.dumps(answers) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

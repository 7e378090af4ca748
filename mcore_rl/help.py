"""What `--help` and `--keys` print."""

from __future__ import annotations

from enum import Enum
from textwrap import fill

from omegaconf import OmegaConf

from mcore_rl.cli_tools import TOOLS
from mcore_rl.config.compose import config_groups
from mcore_rl.config.keys import all_keys, describe, type_at
from mcore_rl.config.schema import RunConfig

COMMANDS = {
    "train": "evaluate, warm up (when sft.steps > 0), train with RL, evaluate again, export, report",
    "sft": "the supervised warm-up alone, and its checkpoint",
    "distill": "evaluate, learn from a teacher's opinion of the model's own answers, evaluate again, export, report",
    "eval": "the held-out evaluation of a model alone",
    "probe": "how often the model is right on training prompts: buckets, a band file to train on, the launch rule",
    "report": "report.html and pictures from the files of a run",
}
_EXAMPLES = """\
Examples
  mcore-rl train experiment=quickstart
  mcore-rl train experiment=quickstart name=mine train.steps=40 optimizer.lr=5e-5 algorithm=grpo router=jitter
  mcore-rl train model=hf model.path=/models/mine task=file task.train_file=train.jsonl task.eval_file=test.jsonl
  mcore-rl train experiment=quickstart rollout.placement=url rollout.url=[http://127.0.0.1:8000]
  torchrun --nproc-per-node 2 -m mcore_rl train experiment=quickstart
  mcore-rl probe model=hf model.path=runs/warm/checkpoint name=probe data_gate.prompts=256
  mcore-rl distill experiment=quickstart model=hf model.path=runs/warm/checkpoint distill.teacher=runs/big/checkpoint name=opd
  mcore-rl report runs/quickstart
"""
_FLAGS = """\
Flags
  --cfg     print the resolved configuration and stop
  --keys    print every key, its default and what may stand there
  --help    this text
"""


def help_text(command: str) -> str:
    """Help for the whole program ("") or for one command."""
    head = f"mcore-rl {command or 'COMMAND'} [group=option ...] [key=value ...] [flags]\n"
    if command:
        head += f"\n{command}: {COMMANDS[command]}\n"
    else:
        head += "\nRL post-training on Megatron-Core and vLLM. Everything a run writes is in runs/<name>/.\n\nCommands\n"
        head += "".join(f"  {name:<8}  {text}\n" for name, text in COMMANDS.items())
        head += "\nTools (mcore-rl convert --help)\n"
        head += "".join(f"  {name:<8}  {text}\n" for name, text in TOOLS.items())
    if command == "report":
        return head + "\n  mcore-rl report runs/quickstart\n"
    return "\n".join([head, _groups(), _FLAGS, _EXAMPLES])


def keys_text() -> str:
    """Every key of the schema with its default and its values."""
    defaults = OmegaConf.structured(RunConfig)
    rows = [(key, _shown(OmegaConf.select(defaults, key)), describe(type_at(key))) for key in all_keys()]
    wide = max(len(key) for key, _, _ in rows)
    middle = max(len(value) for _, value, _ in rows)
    return "".join(f"{key:<{wide}}  {value:<{middle}}  {words}\n" for key, value, words in rows)


def _groups() -> str:
    groups = config_groups()
    wide = max(len(name) for name in groups)
    rows = (
        fill(f"  {name:<{wide}}  {', '.join(options)}", 120, subsequent_indent=" " * (wide + 4))
        for name, options in groups.items()
    )
    return "Groups\n" + "".join(f"{row}\n" for row in rows)


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    return "null" if value is None else str(value)

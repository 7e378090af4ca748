"""Write a GGUF checkpoint of a chat model as a Hugging Face folder: fp32 safetensors, config, tokenizer with template.

python tools/convert_gguf.py model.gguf out/
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

LEFT_OVER = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert(gguf: Path, out: Path) -> None:
    """Read with transformers (dequantized) and save; the generation config says only what stops an answer."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not isinstance(model, PreTrainedModel) or not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SystemExit(f"transformers read {type(model).__name__} and {type(tokenizer).__name__} from {gguf}")
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise SystemExit(f"the tokenizer in {gguf} has no chat template or no stop token")
    plain = unquantized(model)
    plain.config.eos_token_id = tokenizer.eos_token_id
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    plain.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, **generation)
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def unquantized(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that remembers nothing of GGUF (transformers refuses to save one that does)."""
    values = model.config.to_dict()
    for key in LEFT_OVER:
        values.pop(key, None)
    plain = type(model)(type(model.config).from_dict(values))
    plain.load_state_dict(model.state_dict())
    return plain


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write a GGUF checkpoint as a Hugging Face folder.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    convert(arguments.gguf, arguments.out)


if __name__ == "__main__":
    main()

"""The small tokenizer, made in code: byte-level BPE, digits one by one, ChatML template. Saved as any Hugging Face one.

256 bytes + 3 special tokens + the merges of a few words; 302 tokens, so a model vocabulary of 320 holds it.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

VOCAB_LIMIT = 320
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WORDS = "user assistant system What is Compute the value of answer boxed plus minus"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(name: str = "arithmetic") -> PreTrainedTokenizerFast:
    """The small tokenizer by the name a BuildConfig gives it. pad is id 0, the end of a turn (eos) id 2.

    ValueError on an unknown name.
    """
    if name != "arithmetic":
        raise ValueError(f"model.build.tokenizer: '{name}' is unknown; the one small tokenizer is 'arithmetic'")
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\d| |\n|[^\s\w]|[^\W\d]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_LIMIT,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(WORDS.split() * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHATML
    return fast


def load_tokenizer(path: str | Path, key: str = "model.path") -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder. ValueError when it is missing, slow, or lacks a chat template or stop token.

    key: the setting that names the folder.
    """
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{key}: no tokenizer.json in {folder}")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{key}: the tokenizer in {folder} is {type(tokenizer).__name__}, a fast one is needed")
    if not tokenizer.chat_template:
        raise ValueError(f"{key}: the tokenizer in {folder} has no chat template")
    stop_token_ids(tokenizer)
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's eos. ValueError when it has none."""
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ValueError(f"the tokenizer's eos_token_id is {eos!r}: one stop token is needed")
    return (eos,)

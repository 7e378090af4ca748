"""From a question to the prompt ids the engine samples from, and from sampled ids back to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from mcore_rl.data.tokenizer import stop_token_ids
from mcore_rl.types import Completion, Prompt


@dataclass(frozen=True)
class Renderer:
    """One rendering for training, evaluation and demonstrations: chat template, system prompt, suffix.

    template_kwargs go to the chat template (enable_thinking and the like).
    """

    tokenizer: PreTrainedTokenizerFast
    system_prompt: str | None = None
    suffix: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def text(self, question: str) -> str:
        """The rendered prompt, up to where the answer begins."""
        messages = [{"role": "user", "content": question + self.suffix}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        rendered = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **dict(self.template_kwargs)
        )
        if not isinstance(rendered, str):
            raise TypeError(f"the chat template gave {type(rendered).__name__} where one text is needed")
        return rendered

    def prompt(self, prompt_id: str, question: str, answer: str) -> Prompt:
        """The question as token ids. The template writes its own special tokens, so none are added."""
        return Prompt(prompt_id, tuple(self.encode(self.text(question))), question, answer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special tokens added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def response(self, text: str) -> tuple[int, ...]:
        """Ids of a demonstration, stop token last."""
        return (*self.encode(text), stop_token_ids(self.tokenizer)[0])

    def read(self, completion: Completion) -> tuple[str, bool]:
        """Text of a completion without its stop token, and whether it stopped (else it was cut off).

        ValueError naming the sample when the sampled ids and the finish reason disagree, or nothing was sampled.
        """
        ids, stops = completion.token_ids, stop_token_ids(self.tokenizer)
        stopped = bool(ids) and ids[-1] in stops
        if not ids or completion.finish_reason != ("stop" if stopped else "length"):
            raise ValueError(
                f"completion {completion.sample_id}: finish_reason {completion.finish_reason!r} "
                f"with {len(ids)} tokens ending in {list(ids[-1:])}; 'stop' must end in {list(stops)}, 'length' must not"
            )
        body = list(ids[:-1] if stopped else ids)
        text = self.tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not isinstance(text, str):
            raise TypeError(f"decode gave {type(text).__name__} where one text is needed")
        return text, stopped

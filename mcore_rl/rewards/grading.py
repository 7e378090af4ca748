"""From the text of one completion to a Score: format, extraction, comparison by value. Reward is 1 or 0.

A truncated answer (no stop token) is never correct: it earns 0 in every mode, and counts as truncated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.rewards.extraction import EXTRACTORS, full_format, require_pattern
from mcore_rl.types import Prompt, Score

# Changes whenever the same completion could get another reward. Recorded in every manifest and evaluation.
REWARD_VERSION = "1"

INTEGER = r"-?\d+"
DECIMAL = r"-?\d[\d,]*(?:\.\d+)?"
EXPRESSION = r"[0-9+\-*/() ]+"


@dataclass(frozen=True)
class Grader:
    """pattern: the answer slot. body: regular expression of an answer, for the full format. equal(extracted, prompt).

    full_format: the whole completion must be free text, the slot, the stop token; nothing after the slot.
    """

    pattern: str
    body: str
    full_format: bool
    equal: Callable[[str, Prompt], bool]

    def __post_init__(self) -> None:
        """ValueError on an unknown pattern."""
        require_pattern(self.pattern)

    @property
    def mode(self) -> str:
        """Name of the extraction for records: slot, strictness, version."""
        return f"{self.pattern}/{'full' if self.full_format else 'strict'}/v{REWARD_VERSION}"

    def extract(self, text: str) -> str | None:
        """The answer, or None when the slot is missing, ambiguous or malformed."""
        if not self.full_format:
            return EXTRACTORS[self.pattern](text)
        match = full_format(self.pattern, self.body).fullmatch(text)
        return None if match is None else match.group(1)

    def grade(self, prompt: Prompt, text: str, *, stopped: bool) -> Score:
        """Score of `text` (the completion without its stop token); stopped: it ended with a stop token."""
        extracted = self.extract(text)
        format_ok = stopped and extracted is not None
        correct = format_ok and extracted is not None and self.equal(extracted, prompt)
        return Score(float(correct), correct, extracted, format_ok, truncated=not stopped)

"""From the text of one completion to a Score: format, extraction, comparison by value, composition.

A truncated answer (no stop token) is never correct: it earns 0 in every mode, and counts as truncated. `correct` is the
verdict; the reward may be graded (partial credit, auxiliary terms behind the correctness gate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mcore_rl.rewards.composition import GOAL, Composition, compose
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
    composition: what a graded answer earns.
    """

    pattern: str
    body: str
    full_format: bool
    equal: Callable[[str, Prompt], bool]
    composition: Composition = field(default_factory=Composition)

    def __post_init__(self) -> None:
        """ValueError on an unknown pattern."""
        require_pattern(self.pattern)

    @property
    def mode(self) -> str:
        """Name of the extraction for records (parser_version): slot, strictness, version."""
        return f"{self.pattern}/{'full' if self.full_format else 'strict'}/v{REWARD_VERSION}"

    @property
    def reward_version(self) -> str:
        """Name of the reward for records: version of the code, form and terms."""
        return f"{REWARD_VERSION}/{self.composition.name}"

    def extract(self, text: str) -> str | None:
        """The answer, or None when the slot is missing, ambiguous or malformed."""
        if not self.full_format:
            return EXTRACTORS[self.pattern](text)
        match = full_format(self.pattern, self.body).fullmatch(text)
        return None if match is None else match.group(1)

    def grade(self, prompt: Prompt, text: str, *, stopped: bool, n_tokens: int = 0) -> Score:
        """Score of `text` (the completion without its stop token).

        stopped: it ended with a stop token. n_tokens: sampled tokens, for the length cost.
        """
        extracted = self.extract(text)
        format_ok = stopped and extracted is not None
        correct = format_ok and extracted is not None and self.equal(extracted, prompt)
        goal = self.composition.goal(format_ok=format_ok, correct=correct, extracted=extracted, reference=prompt.answer)
        terms = self.composition.auxiliary(n_tokens)
        reward = compose(self.composition.form, goal, terms)
        components = {GOAL: goal, **terms} if terms else {}
        return Score(reward, correct, extracted, format_ok, not stopped, goal=goal, components=components)

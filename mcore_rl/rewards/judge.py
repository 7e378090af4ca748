"""Equality of two mathematical answers by math-verify, in a reward process of its own, with a limit that always holds."""

from __future__ import annotations

import logging

from mcore_rl.rewards.pool import RewardPool
from mcore_rl.rewards.process import CallSpec

logger = logging.getLogger(__name__)

TARGET = "mcore_rl.rewards.math_verification:same_by_math_verify"
MAX_ANSWER_CHARS = 400


class MathJudge:
    """Asks math-verify in a child process, started at the first question. Not shared between threads: one judge each.

    timeouts counts the questions without a verdict (out of time, or the process ended or raised); such a pair is judged
    different.
    """

    def __init__(self, limit_s: int = 5) -> None:
        """limit_s: seconds one comparison may take."""
        self.limit_s = limit_s
        self.timeouts = 0
        # The first comparison builds parsers and caches; made before the first sample, a slow machine charges it to none.
        self.pool = RewardPool(CallSpec(TARGET, float(limit_s), warm_up=[r"\sqrt{4}", "2"]), workers=1)

    def same(self, candidate: str, reference: str) -> bool:
        """Verdict of math-verify; False when it gives none. RuntimeError when it cannot be started."""
        if max(len(candidate), len(reference)) > MAX_ANSWER_CHARS:
            return False
        (reply,) = self.pool.ask_all([[candidate, reference]])
        if reply.failure is None:
            return reply.value is True
        self.timeouts += 1
        logger.warning("math-verify gave no verdict (%s) on %r against %r: judged different", reply.detail, candidate, reference)
        return False

    def close(self) -> None:
        """End the child process."""
        self.pool.close()

"""What follows a failed proof: the end of the run, or one complete sync more (`sync.on_failed_proof`)."""

from __future__ import annotations

from collections.abc import Callable

from mcore_rl.config.schema import OnFailedProof, SyncConfig
from mcore_rl.seams import WeightSource
from mcore_rl.sync.session import ProbeFn, WeightSync
from mcore_rl.types import SyncReport, WeightMismatch


def proved_or_resynced(
    session: WeightSync, source: WeightSource, probe: ProbeFn, config: SyncConfig, *, tell: Callable[[str], None]
) -> SyncReport:
    """A proved sync; where the first try is refused and the policy allows it, by one complete sync more.

    That one sets everything up again and reads every tensor back, and nothing is sampled before it is proved. tell: hears
    of it in one line, with the tensor and the engine. Collective: a refusal reaches every rank (a rank with another error
    ends, and its launcher ends the others), and every rank counts the same. Raises as WeightSync.sync does; WeightMismatch
    of both tries when the second is refused too. A dead engine is not synced again here.
    """
    try:
        return session.sync(source, probe)
    except WeightMismatch as failure:
        if config.on_failed_proof is OnFailedProof.stop:
            raise
        if session.resyncs >= config.max_resyncs:
            raise WeightMismatch(f"{failure}; sync.max_resyncs={config.max_resyncs} are spent") from failure
        first = str(failure)
    session.count_resync()
    tell(f"weight sync failed: {first}; a complete one follows (re-sync {session.resyncs} of at most {config.max_resyncs})")
    try:
        return session.sync(source, probe)
    except WeightMismatch as second:
        raise WeightMismatch(f"{second}; this was the complete sync that followed a failed one: {first}") from second

"""The reasons a run stops for, as types. Light: the launcher knows them without torch."""

from __future__ import annotations


class StaleRollout(RuntimeError):
    """A completion was sampled with other weights than the trainer holds."""


class WeightMismatch(RuntimeError):
    """An engine does not compute with the trainer's weights; the message names the tensor and the engine."""


class EngineDied(RuntimeError):
    """A rollout engine stopped answering; the message says which one and where its log is."""


class EngineRefused(RuntimeError):
    """A rollout engine answered, with an error. It is alive."""


class StopRun(RuntimeError):
    """The run ends here for a named reason; nothing was lost and nothing else is wrong."""

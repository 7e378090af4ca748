"""All rollout engines of a run as one: prompts are spread over them, weights go to each, and a lost one is replaced.

A death costs time, never a sample: what the lost engine was asked goes to the others with the same seeds, or to its
replacement once a complete sync of that has been proved. `refresh` is where engines are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mcore_rl.rollout.match import check_facts, compare_facts, table
from mcore_rl.rollout.supply import EngineSupply
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.sync.group import EndpointGroup
from mcore_rl.types import Completion, EngineDied, Prompt, SamplingParams


@dataclass
class _Seat:
    """One place and its engine. death: why that is gone. settled: an engine has been ready here, or joined a running run."""

    place: str
    engine: VllmEngine
    death: EngineDied | None = None
    settled: bool = False
    told: bool = False


class Fleet(EndpointGroup[VllmEngine]):
    """Implements types.RolloutEngine and sync.endpoint.SyncEndpoint over the engines of a supply."""

    def __init__(self, supply: EngineSupply, *, max_restarts: int) -> None:
        """Engines begin to start. max_restarts: deaths of engines that the run survives, all together."""
        self._supply = supply
        self._max_restarts = max_restarts
        self._losses = 0
        self._expected: Mapping[str, Any] | None = None
        self._tables: Path | None = None
        self._last_death: EngineDied | None = None
        self._seats = [_Seat(place, supply.open(place)) for place in supply.places()]

    @property
    def members(self) -> Sequence[VllmEngine]:
        """The engines that live."""
        return [seat.engine for seat in self._seats if seat.death is None]

    @property
    def name(self) -> str:
        """The only engine's name, or all of them."""
        names = [seat.engine.name for seat in self._seats]
        return names[0] if len(names) == 1 else f"{len(names)} engines: {'; '.join(names)}"

    @property
    def version(self) -> int | None:
        """The version that every living engine has proved; None while one has not, or none lives."""
        versions = {engine.version for engine in self.members}
        return versions.pop() if len(versions) == 1 else None

    @property
    def losses(self) -> int:
        """Engines that died so far."""
        return self._losses

    def lost(self, member: VllmEngine, death: EngineDied) -> None:
        """Take a dead engine out."""
        for seat in self._seats:
            if seat.engine is member and seat.death is None:
                seat.death, self._last_death = death, death
                self._losses += 1
                member.close()

    def expect(self, facts: Mapping[str, Any], tables: Path) -> None:
        """Every engine must run this model (rollout.match) when it is ready; the comparisons are written to `tables`."""
        self._expected, self._tables = facts, tables

    def wait_ready(self) -> None:
        """Block until every engine has started, and compare it with the trainer. ValueError when it runs another model.

        A run does not survive an engine that cannot start at its beginning.
        """
        self.each(lambda engine: engine.wait_ready())
        for seat in self._seats:
            seat.settled = True
        if self._expected is not None and self._tables is not None:
            self._compare(self._expected, self._tables)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """samples_per_prompt completions per prompt, ordered by (prompt, sample), each exactly once.

        Whole groups are spread over the engines. What an engine did not finish goes to the others; EngineDied when none
        is left, or more died than the run survives.
        """
        groups: dict[int, list[Completion]] = {}
        while len(groups) < len(prompts):
            missing = [index for index in range(len(prompts)) if index not in groups]
            engines = self.members
            if not engines or self._losses > self._max_restarts:
                raise self._last_death or EngineDied("no rollout engine is left")
            dealt = deal(missing, len(engines))
            calls = [
                (engine, lambda engine, share=share: engine.generate([prompts[i] for i in share], sampling))
                for engine, share in zip(engines, dealt, strict=False)
            ]
            for share, outcome in zip(dealt, self.outcomes(calls), strict=True):
                if isinstance(outcome, Exception):
                    if not isinstance(outcome, EngineDied):
                        raise outcome
                    continue
                size = sampling.samples_per_prompt
                groups.update({index: outcome[at * size : (at + 1) * size] for at, index in enumerate(share)})
        return [completion for index in range(len(prompts)) for completion in groups[index]]

    def survives(self) -> bool:
        """Whether the last death is one that the run goes on after."""
        dead = [seat for seat in self._seats if seat.death is not None]
        return bool(dead) and self._losses <= self._max_restarts and all(seat.settled for seat in dead)

    def refresh(self) -> list[str]:
        """Replace lost engines and follow changed addresses; one line per change, none when nothing changed.

        Every engine must be synced after a change. EngineDied when more died than the run survives, or none is left and
        none comes.
        """
        self._look_after()
        if self._last_death is not None and self._losses > self._max_restarts:
            raise self._last_death
        lines = self._follow() + self._replace()
        while not self.members:
            self._supply.wait([seat.place for seat in self._seats])
            lines += self._follow() + self._replace()
        return lines

    def complaints(self) -> list[str]:
        """What the last `refresh` could not use of a list of addresses, once: every engine stayed as it was."""
        return self._supply.complaints()

    def rest(self) -> None:
        """Let every engine give its GPU memory back, where a sleep level is set."""
        self.each(lambda engine: engine.rest())

    def wake(self) -> None:
        """Let every engine take it again."""
        self.each(lambda engine: engine.wake())

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Every engine usable inside."""
        with ExitStack() as stack:
            for engine in self.members:
                stack.enter_context(engine.awake())
            yield

    def health(self) -> None:
        """EngineDied when one does not answer."""
        self.each(lambda engine: engine.health())

    def close(self) -> None:
        """Stop what the run owns."""
        for seat in self._seats:
            seat.engine.close()

    def _look_after(self) -> None:
        """Notice engines that died, or were started again by somebody, since they were last asked."""
        running = [seat.engine for seat in self._seats if seat.settled and seat.death is None]
        for outcome in self.outcomes([(engine, lambda member: member.same_process()) for engine in running]):
            if isinstance(outcome, Exception) and not isinstance(outcome, EngineDied):
                raise outcome

    def _compare(self, expected: Mapping[str, Any], tables: Path) -> None:
        facts = self.each(lambda engine: engine.facts())
        found = [(engine.name, compare_facts(expected, known)) for engine, known in zip(self.members, facts, strict=True)]
        tables.parent.mkdir(parents=True, exist_ok=True)
        tables.write_text("\n\n".join(table(*pair) for pair in found) + "\n", encoding="utf-8")
        for pair in found:
            check_facts(*pair)

    def _follow(self) -> list[str]:
        """Seats as the supply has places now."""
        wanted = self._supply.places()
        lines: list[str] = []
        for seat in [seat for seat in self._seats if seat.place not in wanted]:
            seat.engine.close()
            self._seats.remove(seat)
            lines.append(f"engine {seat.place} left the run" + (f": {seat.death}" if seat.death else ""))
        known = {seat.place for seat in self._seats}
        for place in wanted:
            if place not in known:
                self._seats.append(_Seat(place, self._supply.open(place), settled=True))
                lines.append(f"engine {place} joined; it gets a complete sync before its first sample")
        return lines

    def _replace(self) -> list[str]:
        lines: list[str] = []
        for seat in self._seats:
            if seat.death is None:
                continue
            engine = self._supply.reopen(seat.place)
            count = f"death {self._losses} of at most {self._max_restarts}"
            if engine is not None:
                lines.append(f"{seat.death}; replaced ({count}), it gets a complete sync before its first sample")
                seat.engine, seat.death, seat.told = engine, None, False
            elif not seat.told:
                lines.append(f"{seat.death}; not replaced ({count}): {self._supply.advice()}")
                seat.told = True
        return lines


def deal(items: Sequence[int], hands: int) -> list[list[int]]:
    """`items` in at most `hands` runs of neighbours whose lengths differ by at most 1; no run is empty."""
    hands = min(hands, len(items))
    cuts = [len(items) * hand // hands for hand in range(hands + 1)]
    return [list(items[start:end]) for start, end in pairwise(cuts)]

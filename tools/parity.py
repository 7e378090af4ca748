"""The parity table: every family on every layout against transformers and against one rank: `python tools/parity.py`.

A cell holds packed and padded (one sequence a row) batches of uneven lengths, different ones on each data-parallel rank.
Logits and log-probs must be transformers' to 1e-4 in fp32; the gradient of every named parameter must be the one rank's,
||a - b|| <= 1e-5 ||b|| + 1e-7 of the global norm, and the one rank's must be transformers' (float64). Exit status 1 when a
cell fails, or when a layout is refused that is not an expert layout of a dense family.

All cells run on one pool of four processes. FAMILY and LAYOUT names may be given to run a part: `parity.py qwen3 CP2`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import parity_cells  # noqa: E402  # pyright: ignore[reportMissingImports]
from parity_cells import FAMILIES, KINDS, LAYOUTS  # noqa: E402  # pyright: ignore[reportMissingImports]
from rank_pool import RankFailure, RankPool  # noqa: E402  # pyright: ignore[reportMissingImports]
from transformers.utils import logging  # noqa: E402


@dataclass(frozen=True)
class Cell:
    """What the table shows of one cell."""

    text: str
    ok: bool


def say(text: str) -> None:
    """One line of progress."""
    print(text, flush=True)


def run_cell(pool: RankPool, case: parity_cells.Case, name: str, expected: dict) -> tuple[Cell, dict]:
    """One layout of one family, and the one rank's gradients, known from the first cell on."""
    layout, started = LAYOUTS[name], time.monotonic()
    refused = parity_cells.refusal(case, layout)
    if refused is not None or parity_cells.must_be_refused(case, layout):
        ok = refused is not None and parity_cells.must_be_refused(case, layout)
        return Cell("refused" if ok else f"{'REFUSED' if refused else 'NOT REFUSED'}", ok), expected
    results = pool.run(parity_cells.cell, layout, case.folder, case.batch)
    if name == "1":
        expected = {kind: results[0][kind][2] for kind in KINDS}
    wanted = dict.fromkeys(KINDS, case.gradients) if name == "1" else expected
    found = parity_cells.distances(case, results, wanted)
    seconds = time.monotonic() - started
    for kind, far in found.items():
        say(
            f"    {name:13s} {kind}: logits {far.logits:.1e}, log-probs {far.logprobs:.1e} (1e-4 allowed), "
            f"gradient {far.gradients:.2f} of what is allowed{'' if far.ok else '  FAILED'}"
        )
    ok = all(far.ok for far in found.values())
    return Cell(f"{'ok' if ok else 'FAILED'} {seconds:.1f}s", ok), expected


def run_family(pool: RankPool, family: str, layouts: list[str], folder: Path) -> dict[str, Cell]:
    """A row of the table. A cell whose ranks fail is a failed cell; the next one starts new ranks."""
    started = time.monotonic()
    case = parity_cells.make_case(folder, family)
    say(f"{family}: transformers' answers after {time.monotonic() - started:.1f} s")
    row: dict[str, Cell] = {}
    expected: dict = {}
    for name in dict.fromkeys(["1", *layouts]):
        try:
            row[name], expected = run_cell(pool, case, name, expected)
        except (RankFailure, AssertionError, KeyError) as error:
            say(f"    {name}: {str(error)[-2000:]}")
            row[name] = Cell("FAILED", ok=False)
    return row


def table(rows: dict[str, dict[str, Cell]], layouts: list[str]) -> str:
    """Families down, layouts across."""
    widths = {name: max(len(name), *(len(row[name].text) for row in rows.values())) for name in layouts}
    first = max(map(len, rows))
    head = "  ".join([" " * first, *(f"{name:{widths[name]}s}" for name in layouts)])
    body = ["  ".join([f"{f:{first}s}", *(f"{row[n].text:{widths[n]}s}" for n in layouts)]) for f, row in rows.items()]
    return "\n".join([head, *body])


def main() -> None:
    """Command line."""
    unknown = [name for name in sys.argv[1:] if name not in FAMILIES and name not in LAYOUTS]
    if unknown:
        sys.exit(f"parity.py: {unknown[0]} is neither a family ({', '.join(FAMILIES)}) nor a layout ({', '.join(LAYOUTS)})")
    families = [name for name in FAMILIES if name in sys.argv[1:]] or list(FAMILIES)
    layouts = [name for name in LAYOUTS if name in sys.argv[1:]] or list(LAYOUTS)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started, pool, rows = time.monotonic(), RankPool(), {}
    try:
        with tempfile.TemporaryDirectory(prefix="mcore_rl_parity_") as folder:
            for family in families:
                (Path(folder) / family).mkdir()
                rows[family] = run_family(pool, family, layouts, Path(folder) / family)
    finally:
        pool.dispose()
    say(f"\n{table(rows, layouts)}")
    cells = [row[name] for row in rows.values() for name in dict.fromkeys(["1", *layouts])]
    failed = sum(not cell.ok for cell in cells)
    say(f"{len(cells)} cells, {failed} failed, {time.monotonic() - started:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

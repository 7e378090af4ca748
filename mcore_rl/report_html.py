"""The report as one page: no script, no request to anywhere, pictures inside."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.report_data import RunData
from mcore_rl.report_plots import Plot
from mcore_rl.summary import COMPLETED

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fafafa; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 10px; }
.sub { color: #666; margin: 0 0 18px; } .bad { color: #b3261e; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 10px; }
.tile { background: #fff; border: 1px solid #e6e6e6; border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: #666; font-size: 12.5px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 14px; }
figure { margin: 0; background: #fff; border: 1px solid #e6e6e6; border-radius: 8px; padding: 12px 14px; }
figure h3 { font-size: 14.5px; margin: 0; } figcaption { color: #666; font-size: 12.5px; margin: 0 0 6px; }
img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; background: #fff; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { border: 1px solid #e6e6e6; padding: 4px 9px; text-align: left; vertical-align: top; }
.wide { overflow-x: auto; } td.number { text-align: right; } code { font-size: 12.5px; overflow-wrap: anywhere; }
details { margin-top: 10px; } summary { cursor: pointer; color: #555; }
pre { background: #fff; border: 1px solid #e6e6e6; padding: 10px; overflow-x: auto; font-size: 12px; }
"""
_COLUMNS = ("reward_mean", "accuracy", "delta_mean_abs_nats", "delta_max_abs_nats", "policy_entropy_nats", "zero_var_frac")


def render_page(data: RunData, pictures: Sequence[tuple[Plot, Path]], name: str) -> str:
    """The whole page; pictures are embedded."""
    reason = str(data.summary.get("exit_reason", "unknown: the run has no summary.json"))
    state = "completed" if reason == COMPLETED else f'<span class="bad">{html.escape(reason)}</span>'
    parts = [
        f"<h1>{html.escape(name)}</h1>",
        f'<p class="sub">{state} &middot; {html.escape(_subtitle(data))}</p>',
        _tiles(data),
        f'<h2>Pictures</h2><div class="plots">{"".join(_figure(plot, path) for plot, path in pictures)}</div>',
        _missing(data.missing),
        _conditions(data.manifest),
        _steps_table(data),
    ]
    title = html.escape(f"{name}: mcore_rl report")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>\n'


def number(value: object, digits: int = 3) -> str:
    """A number for people: fixed where that is readable, scientific where it is not, `-` where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if isinstance(value, int) or not math.isfinite(value) or value == 0:
        return str(value)
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def _subtitle(data: RunData) -> str:
    manifest = data.manifest
    sha = (manifest.get("code") or {}).get("git_sha")
    words = [f"{data.summary.get('steps', len(data.rows))} steps"]
    words += [f"seed {manifest['seed']}"] if "seed" in manifest else []
    words += [f"started {manifest['launch']['started']}"] if (manifest.get("launch") or {}).get("started") else []
    words += [f"code {sha[:10]}{' with local changes' if manifest['code'].get('dirty') else ''}"] if sha else []
    return ", ".join(words)


def _tiles(data: RunData) -> str:
    s = data.summary
    gain = s.get("paired_gain_ci95_low")
    seconds = s.get("seconds_by_stage") or {}
    quarters = [number(s.get(f"delta_mean_abs_{part}_quarter_nats")) for part in ("first", "last")]
    tiles = [
        (f"{number(s.get('accuracy_before'))} &rarr; {number(s.get('accuracy_after'))}", "held-out accuracy, greedy"),
        (
            f"{number(s.get('accuracy_before_t1'))} &rarr; {number(s.get('accuracy_after_t1'))}",
            "held-out accuracy, temperature 1",
        ),
        ("-" if gain is None else f"{100 * gain:+.1f} points", "lower end of the paired 95 % gain"),
        (f"&plusmn; {number(s.get('ci95_half_width'))}", f"95 % half-width, n = {number(s.get('eval_n'))}"),
        (" &rarr; ".join(quarters), "mean |delta| in nats, first and last quarter"),
        (number(s.get("delta_max_abs_nats")), "largest |delta| in nats"),
        (f"{sum(seconds.values()) / 60:.1f} min" if seconds else "-", "time in all stages"),
    ]
    return (
        '<div class="tiles">' + "".join(f'<div class="tile"><b>{b}</b><span>{text}</span></div>' for b, text in tiles) + "</div>"
    )


def _figure(plot: Plot, path: Path) -> str:
    picture = base64.b64encode(path.read_bytes()).decode()
    alt = html.escape(f"{plot.title}. {plot.caption}", quote=True)
    return (
        f"<figure><h3>{html.escape(plot.title)}</h3><figcaption>{html.escape(plot.caption)}</figcaption>"
        f'<img alt="{alt}" src="data:image/png;base64,{picture}"></figure>'
    )


def _missing(names: Sequence[str]) -> str:
    if not names:
        return ""
    listed = ", ".join(f"<code>{html.escape(name)}</code>" for name in names)
    return f"<h2>Missing</h2><p>Looked for and not found in the files of this run: {listed}.</p>"


def _conditions(manifest: Mapping[str, Any]) -> str:
    if not manifest:
        return ""
    shown = {key: value for key, value in manifest.items() if key != "config"}
    rows = "".join(f"<tr><th>{html.escape(key)}</th><td>{_value(value)}</td></tr>" for key, value in shown.items())
    config = html.escape(json.dumps(manifest.get("config", {}), indent=2))
    return (
        f'<h2>Conditions</h2><div class="wide"><table>{rows}</table></div>'
        f"<details><summary>Resolved configuration</summary><pre>{config}</pre></details>"
    )


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        items = (f"{html.escape(str(key))} = <code>{html.escape(str(item))}</code>" for key, item in value.items())
        return ", ".join(items)
    return f"<code>{html.escape(str(value))}</code>"


def _steps_table(data: RunData) -> str:
    columns = [name for name in _COLUMNS if any(name in row for row in data.rows)]
    if not columns:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("step", *columns))
    body = "".join(
        "<tr>"
        + f'<td class="number">{row["step"]}</td>'
        + "".join(f'<td class="number">{number(row.get(c))}</td>' for c in columns)
        for row in data.rows
    )
    return f'<details><summary>Numbers by step</summary><div class="wide"><table><tr>{head}</tr>{body}</table></div></details>'

"""The table of a conformance run, operator × dtype × backend, as JSON and as a page to look at."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazytensor.conformance import opinfo

GOOD = (opinfo.EQUAL, opinfo.EXPECTED)


def table(rows: Iterable[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """The outcomes put together: one cell for each entry and dtype, and the totals."""
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    totals: Counter[str] = Counter()
    for row in rows:
        cell = cells.setdefault((row["op"], row["dtype"]), _cell(row))
        totals[row["status"]] += 1
        cell["checks"] += 1
        cell["statuses"][row["status"]] = cell["statuses"].get(row["status"], 0) + 1
        outcome = opinfo.Outcome(row["op"], row["dtype"], 0, "", "", fallbacks=tuple(row.get("fallbacks", ())))
        if outcome.fallbacks:
            cell["fallbacks"] = sorted({*cell["fallbacks"], *outcome.fallbacks})
            cell["avoidable"] = sorted({*cell["avoidable"], *opinfo.avoidable(outcome)})
        if row["status"] not in GOOD:
            cell["failures"].append({k: row[k] for k in ("sample", "form", "status", "detail") if k in row})
    entries = {op for op, _ in cells}
    falling = {op for (op, _), cell in cells.items() if cell["avoidable"]}
    checks = sum(totals.values())
    return {
        **about,
        "checks": checks,
        "statuses": dict(totals),
        "equal_percent": round(100 * totals[opinfo.EQUAL] / max(checks, 1), 3),
        "entries": len(entries),
        "recorded_without_fallback_percent": round(100 * (1 - len(falling) / max(len(entries), 1)), 2),
        "entries_with_avoidable_fallback": sorted(falling),
        "cells": [cells[key] for key in sorted(cells)],
    }


def _cell(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "op": row["op"],
        "dtype": row["dtype"],
        "checks": 0,
        "statuses": {},
        "fallbacks": [],
        "avoidable": [],
        "failures": [],
    }


def summary(found: dict[str, Any]) -> list[str]:
    """The totals as lines to print."""
    statuses = ", ".join(f"{count:,} {status}" for status, count in sorted(found["statuses"].items()))
    return [
        f"{found['checks']:,} checks of {found['entries']} entries on {found['target']}: {statuses}",
        f"{found['equal_percent']:.2f} % equal CPU eager",
        f"{found['recorded_without_fallback_percent']:.1f} % of entries recorded without fallback, "
        "data-dependent shapes apart",
    ]


def text(found: dict[str, Any]) -> str:
    """The table for machines."""
    return json.dumps(found, indent=1)


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write the table for machines."""
    path.write_text(text(found) + "\n", encoding="utf-8")


def write_html(found: dict[str, Any], path: Path) -> None:
    """Write the table as one page that needs nothing else."""
    dtypes = [str(d).removeprefix("torch.") for d in opinfo.DTYPES]
    dtypes = [d for d in dtypes if any(cell["dtype"] == d for cell in found["cells"])]
    by_op: dict[str, dict[str, dict[str, Any]]] = {}
    for cell in found["cells"]:
        by_op.setdefault(cell["op"], {})[cell["dtype"]] = cell
    body = "".join(
        f"<tr><th scope=row>{html.escape(op)}</th>{''.join(_td(cells.get(d)) for d in dtypes)}</tr>\n"
        for op, cells in by_op.items()
    )
    head = "".join(f"<th scope=col>{d}</th>" for d in dtypes)
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in summary(found))
    versions = html.escape(f"torch {found['torch']}, lazytensor {found['lazytensor']}")
    path.write_text(
        _PAGE.format(target=html.escape(found["target"]), versions=versions, lines=lines, head=head, body=body),
        encoding="utf-8",
    )


def _td(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "<td class=none></td>"
    good = sum(cell["statuses"].get(status, 0) for status in GOOD)
    kind = "bad" if good < cell["checks"] else "known" if opinfo.EXPECTED in cell["statuses"] else "good"
    notes = [f"{f['form']} {f['sample']}: {f['status']}: {f.get('detail', '')}" for f in cell["failures"][:5]]
    notes += [f"fell back: {', '.join(cell['fallbacks'])}"] if cell["fallbacks"] else []
    mark = " ↩" if cell["fallbacks"] else ""
    return f'<td class={kind} title="{html.escape(chr(10).join(notes), quote=True)}">{good}/{cell["checks"]}{mark}</td>'


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>OpInfo on {target}</title>
<style>
:root {{ color-scheme: light dark; font: 14px/1.5 system-ui, sans-serif; }}
body {{ max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 2px 8px; border-bottom: 1px solid #8884; text-align: right; }}
th[scope=row] {{ text-align: left; font-weight: 500; font-family: ui-monospace, monospace; }}
thead th {{ position: sticky; top: 0; background: Canvas; }}
.good {{ color: #1a7f37; }} .known {{ color: #9a6700; }}
.bad {{ background: #cf222e33; color: #cf222e; font-weight: 600; }}
input {{ font: inherit; width: 100%; padding: 6px 8px; box-sizing: border-box; margin: 1rem 0; }}
</style>
<h1>OpInfo on {target}</h1>
<p>PyTorch's own samples, forward, backward, in place, with out= and with arguments that must raise,
compared with CPU eager.
Each cell: checks that agree / checks made; ↩ marks a fallback. Point at a cell for what differed. {versions}.</p>
<ul>{lines}</ul>
<input id="filter" type="search" placeholder="Filter by operator; ! shows the cells that differ" aria-label="Filter">
<table><thead><tr><th scope=col>entry</th>{head}</tr></thead><tbody>
{body}</tbody></table>
<script>
const box = document.getElementById("filter"), rows = [...document.querySelectorAll("tbody tr")];
box.addEventListener("input", () => {{
  const bad = box.value.startsWith("!"), text = box.value.replace("!", "").toLowerCase();
  for (const row of rows)
    row.hidden = !row.cells[0].textContent.toLowerCase().includes(text) || (bad && !row.querySelector(".bad"));
}});
</script>
</html>
"""

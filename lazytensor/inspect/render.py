"""Reports that print: titles, notes and tables, shown as plain text, by rich, or as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any


class Table:
    """Rows under a title.  A column is right-aligned if its heading starts with ``>``."""

    def __init__(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], more: int = 0) -> None:
        self.title = title
        self.columns = [c.lstrip(">") for c in columns]
        self.right = [c.startswith(">") for c in columns]
        self.rows = [[str(cell) for cell in row] for row in rows]
        self.more = more  # rows left out

    def text(self) -> str:
        """The table in plain text."""
        if not self.rows:
            return f"{self.title}: none"
        widths = [max(len(r[i]) for r in [self.columns, *self.rows]) for i in range(len(self.columns))]
        lines = [self.title]
        for row in [self.columns, *self.rows]:
            cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, self.right, strict=True)]
            lines.append(("  " + "  ".join(cells)).rstrip())
        if self.more:
            lines.append(f"  … and {self.more} more")
        return "\n".join(lines)

    def html(self) -> str:
        """The table in HTML."""
        heads = "".join(f"<th>{escape(c)}</th>" for c in self.columns)
        rows = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align:{"right" if r else "left"}">{escape(c)}</td>'
                for c, r in zip(row, self.right, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        more = f"<p>… and {self.more} more</p>" if self.more else ""
        head = f"<p><b>{escape(self.title)}</b></p><table><thead><tr>{heads}</tr></thead>"
        return f"{head}<tbody>{rows}</tbody></table>{more}"


class Report:
    """Something that prints well anywhere, and whose ``data`` is plain."""

    def __init__(self, title: str, notes: Sequence[str], tables: Sequence[Table], data: Any) -> None:
        self.title = title
        self.notes = list(notes)
        self.tables = list(tables)
        self.data = data

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {n}" for n in self.notes), *("\n" + t.text() for t in self.tables)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(n)}</li>" for n in self.notes)
        return f"<h4>{escape(self.title)}</h4><ul>{notes}</ul>" + "".join(t.html() for t in self.tables)

    def __rich__(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        parts: list[Any] = [Text(self.title, style="bold"), *(Text("  " + n) for n in self.notes)]
        for table in self.tables:
            if not table.rows:
                parts.append(Text(f"{table.title}: none", style="dim"))
                continue
            shown = RichTable(title=table.title, title_justify="left", box=SIMPLE_HEAD)
            for column, right in zip(table.columns, table.right, strict=True):
                shown.add_column(column, justify="right" if right else "left", overflow="fold")
            for row in table.rows:
                shown.add_row(*map(Text, row))
            parts.append(shown)
            if table.more:
                parts.append(Text(f"… and {table.more} more", style="dim"))
        return Group(*parts)

    def show(self) -> None:
        """Print it, by rich where that is installed."""
        try:
            from rich.console import Console
        except ImportError:
            print(self)
        else:
            Console().print(self)


def amount(number: float) -> str:
    """A count in few letters: 12.3 k."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 1000 or unit == " T":
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    raise AssertionError


def size(number: float) -> str:
    """Bytes in few letters: 12.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """A time in few letters: 12.3 ms."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"

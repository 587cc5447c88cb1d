"""GitHub's Markdown: text that stays text, tables, blocks that open on demand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from whiten_index.report.tables import NUMBER, Table

_MEANT = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def plain(text: str) -> str:
    """Return text of one line in which nothing is markup, a table's cell or a mention."""
    return _MEANT.sub(r"\\\1", " ".join(text.split()))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[bool]) -> str:
    """Return a table.

    Args:
        head: names of the columns, plain text.
        rows: cells, markup as they are.
        numbers: whether each column holds numbers, which stand on the right.
    """
    lines = [list(map(plain, head)), ["---:" if number else ":---" for number in numbers]]
    lines += [list(row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def of_table(content: Table) -> str:
    """Return a table of text cells, rows that stand out in bold names."""
    rows = []
    for row in content.rows:
        cells = list(map(plain, row.cells))
        if row.kind:
            cells[0] = f"**{cells[0]}**"
        rows.append(cells)
    head = [column.name for column in content.columns]
    return table(head, rows, [column.kind == NUMBER for column in content.columns])


def folded(summary: str, content: str) -> str:
    """Return a block that opens on demand."""
    escaped = summary.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"<details>\n<summary>{escaped}</summary>\n\n{content}\n\n</details>"


def code(text: str) -> str:
    """Return a block of code, whatever it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{text}\n{fence}"

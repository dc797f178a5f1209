"""A report as one HTML file that needs no other file: tables, plots, and the notes beside them."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape

from dflash2_train.evaluate.tables import Table

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2127; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #dfe3e8; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #8a96a3; } .figure { text-align: right; white-space: nowrap; }
ul { color: #4a5560; font-size: .9rem; } img { max-width: 100%; }
"""
_FIGURE = re.compile(r"[-+–]?[\d.,]*(%|x)?( [\[(].*[\])])?")


def to_html(title: str, tables: Sequence[Table], images: Sequence[tuple[str, bytes]] = ()) -> str:
    """The whole page. ``images`` are PNG files with what they show; every text is escaped."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    for caption, png in images:
        data = base64.b64encode(png).decode()
        parts.append(f'<p><img alt="{escape(caption, quote=True)}" src="data:image/png;base64,{data}"></p>')
    parts += [_table(table) for table in tables]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _table(table: Table) -> str:
    figures = [all(bool(_FIGURE.fullmatch(row[place])) for row in table.rows) for place in range(len(table.header))]
    head = _row("th", table.header, figures)
    body = "".join(_row("td", row, figures) for row in table.rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<h2>{escape(table.title)}</h2><div class="wide"><table><thead>{head}</thead>'
        f"<tbody>{body}</tbody></table></div>" + (f"<ul>{notes}</ul>" if notes else "")
    )


def _row(tag: str, texts: Sequence[str], figures: Sequence[bool]) -> str:
    """One row; columns of figures stand to the right, their names too."""
    opened = {True: f'<{tag} class="figure">', False: f"<{tag}>"}
    cells = [f"{opened[figure]}{escape(text)}</{tag}>" for text, figure in zip(texts, figures, strict=True)]
    return f"<tr>{''.join(cells)}</tr>"

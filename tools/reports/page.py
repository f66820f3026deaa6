"""The report as one HTML file."""

import base64
import html
import json
from typing import Any

from tools.reports.comparison import BYTES, CAVEAT, plans_line, rank_paths, table


def as_html(summary: dict[str, Any], picture: bytes) -> str:
    """The whole report in one file that loads nothing."""
    header, *rows = table(summary)

    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    paths = "".join(f"<li>{html.escape(path)}</li>" for path in [*rank_paths(summary), plans_line(summary)])
    details = {key: summary[key] for key in ("iterations", "machine", "versions", "settings")}
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>EDGC report</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse }} th, td {{ padding: .3em 1em; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left; font-weight: 600 }} img {{ max-width: 100%; margin: 1em 0 }}
</style>
<h1>EDGC against dense</h1>
<table>{line(header, "th")}{"".join(line(row, "td") for row in rows)}</table>
<p>{BYTES} {CAVEAT}</p>
<img alt="Entropy, ranks, delay, loss and bytes over iterations"
 src="data:image/png;base64,{base64.b64encode(picture).decode()}">
<h2>Ranks</h2><ul>{paths}</ul>
<h2>Run</h2><pre>{html.escape(json.dumps(details, indent=2))}</pre>
</html>
"""

"""Pages of which a command makes a part."""

from pathlib import Path

END = "<!-- end -->"


def replace_tables(page: Path, start: str, tables: str) -> None:
    """Put tables in the place of what stands between the comments ``start`` and ``END`` of a Markdown page."""
    before, rest = page.read_text(encoding="utf-8").split(start, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{start}\n{tables}\n\n{END}{after}", encoding="utf-8")

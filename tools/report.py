"""Compare EDGC's runs with a dense one: a table, ``summary.json``, ``report.png`` and a self-contained ``report.html``.

    python tools/report.py runs/quickstart        reads runs/quickstart/{dense,paper,edgc}/{events.jsonl,tensorboard/}

The folder must have ``dense`` and ``edgc``. Runs in other folders beside them, such as ``powersgd``, get a row as well.

Bytes, ranks, entropies and step times come from the event log, losses from Megatron's own TensorBoard scalars.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

from tools.reports.comparison import BYTES, CAVEAT, as_text, load_runs, plans_line, rank_paths, summarise, table
from tools.reports.page import as_html
from tools.reports.picture import draw
from tools.shared.command import command_parser, say_error
from tools.shared.files import write, write_json
from tools.shared.runs import RunError


def main(argv: list[str] | None = None) -> int:
    """Report on the folder in ``argv``; returns the exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, help="folder that holds the runs dense/ and edgc/, and perhaps others")
    folder = parser.parse_args(argv).folder
    try:
        runs, left_out = load_runs(folder)
        summary = summarise(runs)
    except RunError as error:
        say_error("report", error)
        return 2
    for why in left_out:
        print(f"report: leaves out {why}", file=sys.stderr)
    picture = draw(runs)
    write(folder / "report.png", picture)
    write(folder / "report.html", as_html(summary, picture).encode())
    write_json(folder / "summary.json", summary)
    print(as_text(table(summary)))
    print("\n".join([*rank_paths(summary), plans_line(summary)]))
    print(BYTES)
    print(CAVEAT)
    print(f"written: {folder / 'report.html'}, {folder / 'report.png'}, {folder / 'summary.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure engines against each other: loss and bytes of real multi-process runs on the same tokens.

    python tools/frontier.py --config configs/frontier/default.yaml

Every run has its own folder under ``runs/frontier/`` and is kept once it has finished with the same command, so an
interrupted list goes on where it stopped. Each finished run adds a line to ``docs/frontier/results/MODEL.jsonl``; at
the end ``docs/frontier/NAME.md`` and ``docs/frontier/NAME.png`` hold the list's table and plot, which ``--report``
makes of these lines without training. The format of a list is described in docs/frontier/lists.md.
"""

import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

from tools._root import REPOSITORY
from tools.experiments import study_page
from tools.experiments.lists import ListError, how_made, load_list, missing_corpora
from tools.experiments.page import markdown
from tools.experiments.plot import draw, draw_trends
from tools.experiments.results import not_run, page_lines, result
from tools.experiments.store import RESULTS, read_results, record_result
from tools.experiments.training import COMMAND, finished, run
from tools.shared.command import command_parser, end_on_signals, say_error
from tools.shared.files import write
from tools.shared.runs import RunError, load_run, times_fewer

DOCS = REPOSITORY / "docs" / "frontier"


def main(argv: list[str] | None = None) -> int:
    """Run the list in ``argv``; returns the exit status."""
    end_on_signals()
    parser = command_parser(__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the list of runs, a YAML file")
    parser.add_argument("--gpu", action="store_true", help="train on GPUs (default: on the CPU)")
    parser.add_argument("--report", action="store_true", help="train nothing: make the page of the results kept")
    arguments = parser.parse_args(argv)
    try:
        runs = load_list(arguments.config, arguments.gpu)
    except ListError as error:
        say_error("frontier", error)
        return 2
    todo = [] if arguments.report else [trial for trial in runs.trials if not trial.gone and not finished(trial)]
    if missing := missing_corpora(todo):
        for corpus in missing:
            say_error("frontier", ListError(f"there is no corpus {corpus}: {how_made(corpus)}"))
        return 2
    failed = False
    for number, trial in enumerate(runs.trials, start=1):
        if arguments.report:
            break
        if trial.gone:
            continue
        start = time.perf_counter()
        label = f"frontier: {number}/{len(runs.trials)} {trial.setting} {trial.name} seed {trial.seed}"
        try:
            folder = run(trial)
            measured = load_run(folder)
        except RunError as error:
            failed = True
            print(f"{label}: failed: {error}", file=sys.stderr, flush=True)
            continue
        line = result(
            trial, measured, json.loads((folder / COMMAND).read_text()), (*runs.studies, *filter(None, [runs.study]))
        )
        record_result(DOCS / RESULTS, line)
        fewer = times_fewer(line["dp_bytes_dense"], line["dp_bytes"])
        print(
            f"{label}: loss {measured.val_loss:.4f}, {fewer:.2f}x fewer bytes, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    lines = page_lines(runs.trials, read_results(DOCS / RESULTS, (trial.model for trial in runs.trials)))
    missing = not_run(runs.trials, lines)
    for text in missing:
        print(f"frontier: not run yet: {text}", flush=True)
    if not lines:
        return 1 if failed else 0
    pages: dict[str, tuple[str, bytes]] = {}
    if runs.study:
        pages[runs.name] = study_page.page(runs.name, runs.title, runs.study, lines, missing)
    else:
        page = markdown(runs.name, runs.title, lines, runs.comparisons, missing, runs.trends)
        pages[runs.name] = page, draw_trends(lines, runs.trends) if runs.trends else draw(lines)
    for study in (one for one in runs.studies if study_page.has_lines(one, lines)):
        name = f"{runs.name}_{study}"
        pages[name] = study_page.page(runs.name, f"{runs.title}: {study}", study, lines, missing, picture=name)
    for name, (page, picture) in pages.items():
        write(DOCS / f"{name}.md", page.encode())
        write(DOCS / f"{name}.png", picture)
        print(f"written: {', '.join(str(DOCS / f'{name}.{kind}') for kind in ('md', 'png'))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m edgc flags`` and the page made from it."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from edgc import __version__, flags
from edgc.config import EDGCConfig, setting_fields
from edgc.flags import HEADINGS

REPOSITORY = Path(__file__).parents[2]


def test_every_setting_is_in_one_group_and_the_first_group_has_eleven() -> None:
    assert Counter(name for names in HEADINGS.values() for name in names) == Counter(
        setting.name for setting in setting_fields()
    )
    assert len(next(iter(HEADINGS.values()))) == 11


def test_the_command_needs_no_torch() -> None:
    script = (
        "import runpy, sys; sys.argv = ['edgc', 'flags']; runpy.run_module('edgc', run_name='__main__');"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert printed.stdout == flags.text()


def test_the_command_tells_its_version() -> None:
    command = [sys.executable, "-m", "edgc", "--version"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert printed.stdout == f"edgc {__version__}\n"


def test_a_flag_stands_with_its_values_default_and_source() -> None:
    lines = flags.text().splitlines()
    assert [line for line in lines if line.startswith("  --edgc-preset")] == [
        "  --edgc-preset {paper,safe,balanced,fast,optimus}"
    ]
    place = lines.index("  --edgc-window <iterations>")
    window = EDGCConfig.from_preset().ranks.window
    assert f"Default: {window}. Source: arXiv" in " ".join(line.strip() for line in lines[place + 1 : place + 3])
    assert "  --edgc-align, --edgc-no-align" in lines
    assert all(len(line) <= flags.WIDTH for line in lines)


def test_the_page_is_what_the_command_writes() -> None:
    page = (REPOSITORY / "docs" / "flags.md").read_text()
    assert page == flags.markdown(), "python -m edgc flags --markdown >docs/flags.md"

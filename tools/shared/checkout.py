"""The commit of a checkout."""

import subprocess
from pathlib import Path


def commit(folder: Path) -> str:
    """Of a checkout, with a + if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = [
        line for line in git("status", "--porcelain", "--untracked-files=no").splitlines() if "docs/" not in line
    ]
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")

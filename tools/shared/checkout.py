"""The commit of a checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit(folder: Path, *paths: str) -> str:
    """The last commit that changed these paths (default: all but docs), with a + if files there differ from it;
    ``unknown`` where git has none, or is not there.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    within = paths or (".", ":!docs")
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *within)
        return git("log", "-1", "--format=%h", "--", *within) + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

"""The commit of a checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit(folder: Path, *paths: str) -> str:
    """The last commit that changed these paths (default: all but docs), with a + if files there differ from it;
    ``unknown+`` where git has none, is not there, or does not trust the folder: nobody knows what the files are then.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    within = paths or (".", ":!docs")
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *within)
        last = git("log", "-1", "--format=%h", "--", *within)
    except (OSError, subprocess.CalledProcessError):
        last = ""
    return last + ("+" if changed else "") if last else "unknown+"

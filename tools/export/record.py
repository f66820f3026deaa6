"""What an export says of itself."""

import json
from pathlib import Path
from typing import Any

RECORD = "export.json"  # in the exported folder: which checkpoint it comes from


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder; None if ``export_hf.py`` has not written the folder."""
    path = folder / RECORD
    return dict(json.loads(path.read_text())) if path.is_file() else None

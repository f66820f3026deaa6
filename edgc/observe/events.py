"""The event log: one JSON object a line. ``docs/events.md`` documents every field."""

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from edgc.config import ConfigError, flag
from edgc.printing import print_warning


class EventLog:
    """Appends events to ``events.jsonl`` in a folder; without a folder it does nothing.

    Raises ``ConfigError`` where the file cannot be opened. What fails later, as on a full disk, ends the log, not the
    run: process 0 alone would end, and all others wait for it.
    """

    FILE = "events.jsonl"

    def __init__(self, folder: str | None):
        self._file: TextIO | None = None
        if folder is not None:
            path = Path(folder)
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._file = (path / self.FILE).open("a+", encoding="utf-8")
                self._end_last_line()
            except OSError as error:
                raise ConfigError(f"{flag('log_dir')} = {folder}: no event log can be written: {error}") from error

    def _end_last_line(self) -> None:
        """A run that was killed may have left it unfinished."""
        assert self._file is not None
        if end := self._file.tell():
            self._file.seek(end - 1)
            if self._file.read() != "\n":
                self._file.write("\n")

    def close(self) -> None:
        """Nothing can be written any more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, event: str, **fields: Any) -> None:
        """Append one event and flush it, so that a killed run keeps its log."""
        if self._file is not None:
            line = json.dumps({"event": event, "time": round(time.time(), 3), **_plain(fields)}, allow_nan=False)
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError as error:
                print_warning(f"the event log ends here: {error}")
                with suppress(OSError):
                    self._file.close()  # tries to write once more
                self._file = None


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """All events of a run, oldest first. Lines that a killed run left unfinished are ignored."""
    events = []
    for line in (Path(folder) / EventLog.FILE).read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events

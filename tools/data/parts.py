"""An indexed data set in parts: an encoding that was killed continues after its last finished part."""

import fcntl
import json
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.data.errors import InputError


class Parts:
    """The finished parts in ``folder``, for one ``recipe``: those of another one are discarded on entry.

    A part is a pair of ``.bin`` and ``.idx`` for each split that has documents in it, and a JSON file, written last,
    which names them. The folder outlives an interruption, so on exit it stays, unless there is nothing finished in it.
    Raises ``InputError`` where another run is at work in the folder.

    ``documents`` and ``tokens`` (per split) count what the finished parts hold."""

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        self.folder = folder
        self.tokenizer = folder / "tokenizer.model"  # one that was trained for this data set
        self.documents = 0
        self.tokens: Counter[str] = Counter()
        self._recipe = json.dumps(recipe, indent=2) + "\n"
        self._finished: list[dict[str, int]] = []  # of each part its files and their sizes

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self.folder}: another run is writing this data set") from None
        except OSError:
            pass  # a file system without locks
        if not self.is_for_recipe():
            if any(path.name != "lock" for path in self.folder.iterdir()):
                print(f"{self.folder}: parts of other arguments or another source, discarded", file=sys.stderr)
            self._clear()
            (self.folder / "recipe.json").write_text(self._recipe)
        while self._read_part():
            pass
        if self._finished:
            print(f"{self.folder}: going on after {self.documents:,} documents", file=sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()  # before it goes: a network file system keeps a deleted file that is open, and its folder
        if kind is None or not (self._finished or self.tokenizer.exists()):
            shutil.rmtree(self.folder)

    def is_for_recipe(self) -> bool:
        """Whether the folder exists and belongs to this recipe."""
        try:
            return (self.folder / "recipe.json").read_text() == self._recipe
        except OSError:
            return False

    def write(self, documents: Iterable[tuple[str, list[int]]], vocabulary_size: int) -> bool:
        """Write one more part from splits and token ids; without any document write none, and return ``False``."""
        number = len(self._finished)
        builders: dict[str, Any] = {}
        count, tokens = 0, Counter[str]()
        for split, ids in documents:
            if split not in builders:
                builders[split] = _builder(f"{self._path(number, split)}.bin", vocabulary_size)
            builders[split].add_document(ids, [len(ids)])
            count += 1
            tokens[split] += len(ids)
        if not count:
            return False
        paths = []
        for split, builder in builders.items():
            builder.finalize(f"{self._path(number, split)}.idx")
            paths += [Path(f"{self._path(number, split)}{ending}") for ending in (".bin", ".idx")]
        part = {"documents": count, "tokens": tokens, "files": {path.name: path.stat().st_size for path in paths}}
        unnamed = self.folder / "part.json"
        unnamed.write_text(json.dumps(part))
        unnamed.rename(self.folder / f"{number:05}.json")
        self._take(part)
        return True

    def merge(self, paths: dict[str, str], vocabulary_size: int) -> None:
        """Join the parts of each split into the data files at ``paths`` (split to path without ending)."""
        for split, path in paths.items():
            whole = _builder(f"{path}.bin", vocabulary_size)
            for number, files in enumerate(self._finished):
                if f"{self._path(number, split).name}.bin" in files:
                    with warnings.catch_warnings(action="ignore"):  # Megatron's reader misses its process's number
                        whole.add_index(str(self._path(number, split)))
            whole.finalize(f"{path}.idx")

    def _path(self, number: int, split: str) -> Path:
        return self.folder / f"{number:05}_{split}"

    def _read_part(self) -> bool:
        """Take up the next finished part, if there is one and its files are there at their full size."""
        try:
            part = json.loads((self.folder / f"{len(self._finished):05}.json").read_text())
            if part["files"] != {name: os.stat(self.folder / name).st_size for name in part["files"]}:
                return False
        except (OSError, ValueError):
            return False
        self._take(part)
        return True

    def _take(self, part: dict[str, Any]) -> None:
        self._finished.append(part["files"])
        self.documents += part["documents"]
        self.tokens.update(part["tokens"])

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()


def _builder(path: str, vocabulary_size: int) -> Any:
    with warnings.catch_warnings(action="ignore"):  # Megatron says which optimizers are missing
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    return IndexedDatasetBuilder(path, DType.optimal_dtype(vocabulary_size))

"""The page that compares rounding as it is with rounding under ``torch.compile``; nothing is compiled here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tools import bench_torch_compile


@pytest.mark.parametrize(("changes", "same"), [(lambda message: message, "yes"), (lambda message: message + 1, "no")])
def test_every_format_and_size_has_a_row_that_says_whether_results_are_the_same(
    changes: Any, same: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(function: Any, **_: object) -> Any:
        def call(tensor: Tensor) -> Tensor:
            result: Tensor = changes(function(tensor))
            return result

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    bench_torch_compile.main(["--values", "128", "256", "--repetitions", "2", "--output", str(tmp_path / "page")])
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| int")]
    assert [(row.split("|")[1].strip(), row.split("|")[2].strip()) for row in rows] == [
        (name, size) for name in ("int8", "int5", "int4") for size in ("128", "256")
    ]
    assert all(row.split("|")[7].strip() == same for row in rows)

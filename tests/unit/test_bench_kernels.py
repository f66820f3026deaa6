"""The page of times of block sizes, from figures that are made up, and what is called; nothing is timed here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import edgc.compress
from tools import bench_kernels
from tools.bench_kernels import PASSES, Blocks, candidates, page, timed, used

pytest.importorskip("triton", reason="Triton comes with torch's CUDA build")


def figures(missing: tuple[Blocks, ...] = ()) -> dict[str, Any]:
    """All candidates at rank 64: the first is the slowest, each further one takes 0.01 ms less."""
    rows = []
    for kernel in PASSES:
        for place, blocks in enumerate(candidates(kernel, 64, used(kernel, 64, True))):
            if blocks not in missing:
                rows.append({"kernel": kernel, "rank": 64, "blocks": blocks, "ms": 1 - place / 100})
    versions = {"python": "3", "triton": "4"}
    return {
        "device": "GPU X", "versions": versions, "hopper": True, "matrix": [30, 4000], "copy_ms": 0.2, "rows": rows
    }  # fmt: skip


def tables(text: str) -> dict[str, list[list[str]]]:
    """The cells of the rows of each section."""
    found = {}
    for section in text.split("\n## ")[1:]:
        title, *lines = section.splitlines()
        found[title] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    return found


def test_a_table_has_the_fastest_the_slowest_the_one_in_use_and_the_floor(tmp_path: Path) -> None:
    (tmp_path / "made_up.json").write_text(json.dumps({**figures(), "note": "made up"}))
    assert bench_kernels.main(["--output", str(tmp_path / "made_up"), "--report"]) == 0
    text = (tmp_path / "made_up.md").read_text()
    assert "on one GPU X (python 3, triton 4); every time is in [made_up.json](made_up.json)" in text
    assert "The times were made up. " in text and "30 x 4,000" in text
    found = tables(text)
    assert list(found) == ["`project`, rank 64", "`write_back`, rank 64"]
    for kernel, floor in (("project", "0.300"), ("write_back", "0.400")):
        *rows, last = found[f"`{kernel}`, rank 64"]
        all_blocks = candidates(kernel, 64, used(kernel, 64, True))
        place = len(all_blocks) - all_blocks.index(used(kernel, 64, True))  # 1 is the fastest
        in_use = ["in use" in one[0] for one in rows].index(True)
        assert (rows[in_use][0], rows[in_use][-2]) == (f"{place}, in use", f"{1 - (len(all_blocks) - place) / 100:.3f}")
        places = {int(one[0].partition(",")[0]) for one in rows}
        assert places == {*range(1, 11), place, len(all_blocks)} and rows[-1][-2] == "1.000"
        assert (last[0], *last[-2:]) == ("floor", floor, "1.00x")
        assert rows[-1][-1] == f"{1 / float(floor):.2f}x"


def test_blocks_without_a_time_are_told_of() -> None:
    result = figures()
    result["rows"][0] |= {"ms": None, "shared_bytes": 3 * 2**18}
    text = page(result, "made_up.json")
    assert text.count("These need more shared memory than there is: ") == 1
    assert "16 rows, 64 columns, 4 warps, 2 stages (768 KiB).\n" in text
    assert "was not timed" not in text and "The times were" not in text
    text = page(figures(missing=(used("project", 64, True),)), "made_up.json")
    assert text.count("The size in use was not timed: ") == 1 and "shared memory than" not in text


@pytest.mark.parametrize("kernel", PASSES)
def test_what_is_timed_is_the_kernel_with_these_blocks(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    from tests.interpreter import interpreted_kernels

    kernels = interpreted_kernels()
    monkeypatch.setattr(edgc.compress, "kernels", kernels, raising=False)
    launched: list[dict[str, int]] = []
    name = f"_{kernel}_kernel"
    own = getattr(kernels, name)

    class Noted:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                launched.append(options)
                own[grid](*args, **options)

            return launch

    def called(call: Any) -> float:
        call()
        if len(launched) == 2:
            raise OutOfResources(300_000, 200_000, "shared memory")
        return float(len(launched))

    monkeypatch.setattr(kernels, name, Noted())
    monkeypatch.setattr(bench_kernels, "milliseconds", called)
    usual = getattr(kernels, f"{kernel}_blocks")
    todo = [(kernel, 64, blocks) for blocks in candidates(kernel, 64, {"in use": 1})[:3]]
    rows = list(timed(todo, 64, 96, torch.device("cpu")))
    assert [(one.ms, one.shared_bytes) for one in rows] == [(1, None), (None, 300_000), (3, None)]
    for (_, _, blocks), options in zip(todo, launched, strict=True):
        assert blocks.items() <= options.items()
    # passes are counted with an error, of which a part waits
    assert launched[0]["CHANGED" if kernel == "project" else "WAITS"] is True
    assert getattr(kernels, f"{kernel}_blocks") is usual


def test_the_blocks_in_use_are_always_tried() -> None:
    for kernel in PASSES:
        usual, odd = candidates(kernel, 128, used(kernel, 128, True)), candidates(kernel, 128, {"ROWS": 7})
        assert used(kernel, 128, True) in usual and odd == [*usual, {"ROWS": 7}]
        assert len({tuple(sorted(blocks.items())) for blocks in usual}) == len(usual)


@pytest.mark.parametrize("given", [[], ["--report"]])
def test_without_a_gpu_or_figures_one_line_says_so(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main(["--output", str(tmp_path / "none"), *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_kernels: error: ") and error.count("\n") == 1
    assert ("none.json" if given else "no CUDA device") in error
    assert not list(tmp_path.iterdir())

"""Which processes may train on a GPU."""

from typing import Any

import pytest
import torch

from megatron.edgc.recipes import cpu


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_a_gpu_that_is_counted_but_lost_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def lost(*args: Any, device: str) -> None:
        assert device == "cuda:5"
        raise error("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch, "zeros", lost)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(cpu.socket, "gethostname", lambda: "node7")
    monkeypatch.setenv("RANK", "61")
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert cpu.missing_gpu() == (
        "rank 61 on node7 cannot use GPU 5 (CUDA error: unspecified launch failure): "
        "give --edgc-cpu to train on the CPU"
    )


def test_a_process_that_sees_too_few_gpus_is_told_what_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def invalid(*args: Any, device: str) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch, "zeros", invalid)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert "asks for GPU 5 and sees 1: give every process of a node all of its GPUs" in cpu.missing_gpu()


def test_a_gpu_that_works_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *args, device: None)
    assert cpu.missing_gpu() == ""

"""What a command runs on: processor, GPU, versions. Python 3.9 is enough."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def device_name(on_gpu: bool) -> str:
    """The GPU that torch uses, or the processor and its number of cores."""
    if not on_gpu:
        return f"{processor()}, {os.cpu_count()} cores"
    import torch

    return torch.cuda.get_device_name()


def installed(package: str) -> str | None:
    """A package's version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None

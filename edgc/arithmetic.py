"""The arithmetic in which EDGC computes, whatever the training script has set for its own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


def on_cpu(tensor: Tensor) -> bool:
    """Whether its values are there for the CPU to look at, without waiting for a device."""
    return tensor.device.type == "cpu"


@contextmanager
def own_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in this block without gradients and autocast, and products of fp32 values in fp32, on this device.

    Error feedback relies on sums and errors that add up to the gradients. Products in TF32 or bf16, which a script or
    an image may have switched on, would lose a part of gradients that no error holds. Torch functions of the host, as
    ``--edgc-cpu`` and ``torch.set_default_device`` have them, do not apply: they would be asked at each of thousands of
    small operations.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch._C.DisableTorchFunction())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(_exact_products(device))
        yield


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    backends: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    products = getattr(backends, "matmul", None)
    # before torch 2.9 there is a switch for GPUs alone
    name, exact = ("fp32_precision", "ieee") if hasattr(products, "fp32_precision") else ("allow_tf32", False)
    if not hasattr(products, name):
        yield
        return
    before = getattr(products, name)
    setattr(products, name, exact)
    try:
        yield
    finally:
        setattr(products, name, before)

"""Triton's kernels in its interpreter, on a CPU, and a count of what they load and store."""

import importlib.util
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.runtime import interpreter


def interpreted_kernels() -> ModuleType:
    """A copy of ``edgc.compress.kernels`` that is interpreted, whoever imports triton or the module itself, and how."""
    spec = importlib.util.find_spec("edgc.compress.kernels")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


class Accesses:
    """Counts, by address, how often interpreted kernels load and store each element of tensors (without holes).

    >>> with Accesses(matrix=matrix) as accesses:
    ...     kernels.project(matrix, factor)
    >>> accesses.loads["matrix"]  # one count an element, in the order of memory
    """

    def __init__(self, **tensors: Tensor):
        self.tensors = tensors
        self.loads = {name: torch.zeros(tensor.numel(), dtype=torch.int64) for name, tensor in tensors.items()}
        self.stores = {name: counts.clone() for name, counts in self.loads.items()}

    def __enter__(self) -> "Accesses":
        builder = interpreter.InterpreterBuilder
        # Those without a mask call these.
        load, store = self.originals = builder.create_masked_load, builder.create_masked_store

        def counting_load(builder: Any, pointers: Any, mask: Any, *args: Any) -> Any:
            self._count(self.loads, pointers, mask)
            return load(builder, pointers, mask, *args)

        def counting_store(builder: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
            self._count(self.stores, pointers, mask)
            return store(builder, pointers, value, mask, *args)

        builder.create_masked_load, builder.create_masked_store = counting_load, counting_store
        return self

    def __exit__(self, *_: object) -> None:
        builder = interpreter.InterpreterBuilder
        builder.create_masked_load, builder.create_masked_store = self.originals

    def _count(self, counts: dict[str, Tensor], pointers: Any, mask: Any) -> None:
        addresses, mask = np.broadcast_arrays(pointers.data, mask.data)
        places = torch.from_numpy(addresses[mask].astype(np.int64))
        for name, tensor in self.tensors.items():
            elements = (places - tensor.data_ptr()) // tensor.itemsize
            elements = elements[(elements >= 0) & (elements < tensor.numel())]
            counts[name] += torch.bincount(elements, minlength=tensor.numel())

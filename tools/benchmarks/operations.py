"""What torch operations do, counted from what they are handed: passes over gradients, launches, memory."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRITTEN_ONLY = {"copy_", "fill_", "zero_"}  # their first argument, without reading what was there


class Passes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes that operations read and write in tensors of at least ``least`` values, and all operations.

    Views are free. What an operation reads twice, or a library keeps in between, is not seen, nor are Triton's kernels
    and what other threads do.
    """

    def __init__(self, least: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.least = least
        self.read = self.written = 0
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_view(func) or func.namespace != "aten":
            return result
        self.operations += 1
        name = func._schema.name.partition("::")[2]
        only_shape = name in WRITTEN_ONLY or name.startswith("new_") or name.endswith("_like")
        changed: list[Tensor] = []
        schema = func._schema.arguments
        handed = {**{argument.name: value for argument, value in zip(schema, args, strict=False)}, **kwargs}
        for argument in schema:
            value = handed.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes:
                changed += self._large([value])
            if not (only_shape and argument is schema[0]) and not (writes and argument.is_out):
                self.read += sum(tensor.nbytes for tensor in self._large([value]))
        new = [tensor for tensor in self._large([result]) if not any(tensor is one for one in changed)]
        if "empty" not in name:
            self.written += sum(tensor.nbytes for tensor in [*changed, *new])
        return result

    def _large(self, values: Iterable[Any]) -> list[Tensor]:
        return [x for x in tree_leaves(list(values)) if isinstance(x, Tensor) and x.numel() >= self.least]


def is_view(func: Any) -> bool:
    """Whether what it returns is memory that it was handed, unchanged."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def counted(step: Callable[[], object], least: int) -> Passes:
    """What a step does with tensors of at least ``least`` values."""
    passes = Passes(least)
    with torch.no_grad(), passes:
        step()
    return passes


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operators make while this is entered; ``peak`` is the most at any time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            key, size = storage._cdata, storage.nbytes()
            if key not in given and key not in self._alive:
                self._alive[key] = size
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

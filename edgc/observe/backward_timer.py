"""The time of backward passes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from edgc.timing import Spans


class BackwardTimer:
    """Times the backward pass of every micro-batch through ``module`` while ``active()`` holds.

    The span begins when the gradient reaches the module's output and ends when autograd has finished the pass.
    """

    def __init__(self, module: nn.Module, active: Callable[[], bool], spans: Spans):
        self._active = active
        self._spans = spans
        module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output  # BERT returns two
        if isinstance(first, Tensor) and first.requires_grad and self._active():
            first.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: Tensor) -> None:
        start = self._spans.mark()
        # The engine calls back when the whole pass is done; modules and tensors offer no such hook.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._end(start))

    def _end(self, start: Any) -> None:
        self._spans.add(start)
        self._spans.close()

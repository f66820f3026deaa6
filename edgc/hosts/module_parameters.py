"""The parameters of a torch module whose gradients are averaged."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from edgc.config import ConfigError
from edgc.specs import Parameter


class ModuleParameters:
    """Those that required a gradient when the module was given, by the names that they have without torch.compile, so
    that a run may resume with it and without.

    ``module`` and ``ignored`` are those of ``EDGCState``. Raises ``ConfigError`` for a parameter whose gradient EDGC
    cannot average, and for a module without any.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()):
        self._module = module
        named = {p: name.replace("_orig_mod.", "") for name, p in module.named_parameters() if name not in ignored}
        self._ignored = {p for name, p in module.named_parameters() if name in ignored}
        self.names = {p: name for p, name in named.items() if p.requires_grad}
        self._frozen = {p for p in named if not p.requires_grad}
        if not self.names:
            raise ConfigError(f"{type(module).__name__} has no parameter that requires a gradient")
        tables = [one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
        _check_gradients(self.names, {one.weight for one in tables if one.sparse})
        embeddings = {one.weight for one in tables}
        others = [getattr(one, "weight", None) for one in module.modules() if one not in tables]
        tied = {weight for weight in others if isinstance(weight, nn.Parameter)}
        self.described = {
            name: describe(name, p, p in embeddings, p in embeddings - tied) for p, name in self.names.items()
        }

    @property
    def device(self) -> torch.device:
        """Of all of them. Raises ``ConfigError`` where they are on several."""
        first, *others = {parameter.device for parameter in self.names}
        if others:
            raise ConfigError("the module's parameters are on several devices: EDGC averages those of one")
        return first

    def signatures(self) -> list[str]:
        """The name, type and shape of each, in the order that all processes must have."""
        return [f"{name} ({p.dtype}, {tuple(p.shape)})" for p, name in self.names.items()]

    @property
    def most_frequent_itemsize(self) -> int:
        """Bytes of a value in the type that most values have."""
        values: Counter[int] = Counter()
        for parameter in self.names:
            values[parameter.itemsize] += parameter.numel()
        return values.most_common(1)[0][0]

    def named(self, gradients: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """Gradients by name. Raises RuntimeError for one of a parameter that is not among these."""
        named = {}
        for parameter, gradient in gradients.items():
            name = self.names.get(parameter)  # type: ignore[call-overload]
            if name is None:
                raise RuntimeError(
                    f"a gradient of shape {tuple(gradient.shape)} belongs to no parameter of the module that EDGC was "
                    "given, or to one that did not require a gradient then"
                )
            named[name] = gradient
        return named

    def gradients(self) -> dict[Tensor, Tensor]:
        """The ``grad`` of each.

        Raises RuntimeError where a parameter has no gradient, and where one has a gradient that was not there, or
        required none, when the module was given.
        """
        for name, parameter in self._module.named_parameters():
            if parameter.grad is None or parameter in self.names or parameter in self._ignored:
                continue
            if not parameter.requires_grad:  # a gradient from before it was frozen
                continue
            then = "required none" if parameter in self._frozen else "was not there"
            raise RuntimeError(
                f"{name} has a gradient, and {then} when EDGC was given the module: it would not be averaged. Build a "
                "new state for the module as it is now"
            )
        found: dict[Tensor, Tensor] = {p: p.grad for p in self.names if p.grad is not None}
        for parameter, name in self.names.items():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{name} has a sparse gradient, which EDGC does not average: make the embedding with sparse=False"
                )
        check_missing([name for p, name in self.names.items() if p not in found])
        return found


def check_missing(names: Sequence[str]) -> None:
    """Raises RuntimeError for parameters without a gradient."""
    if names:
        raise RuntimeError(
            f"parameters without a gradient in this step: {len(names)}, the first {min(names)}. EDGC needs the "
            "gradients of all parameters that required one when it was attached. Before you attach it, set "
            "requires_grad=False on parameters that steps do not use"
        )


def describe(name: str, parameter: nn.Parameter, embedding: bool, sparse_rows: bool) -> Parameter:
    """What ``edgc.plan.selection`` needs to know of a parameter."""
    marked = getattr(parameter, "is_embedding_or_output_parameter", False)
    return Parameter(name, tuple(parameter.shape), bool(embedding or marked), sparse_rows)


def _check_gradients(names: Mapping[nn.Parameter, str], sparse: Collection[Tensor]) -> None:
    """Raises ``ConfigError`` for a parameter whose gradient is not real, or not dense."""
    for parameter, name in names.items():
        if not parameter.is_floating_point():
            raise ConfigError(f"{name} is of {parameter.dtype}: EDGC averages gradients of real numbers")
        if hasattr(parameter, "placements"):  # a DTensor, whose class takes half a second to import
            raise ConfigError(f"{name} is a DTensor: EDGC averages gradients of whole parameters, not of shards")
        if parameter in sparse:
            raise ConfigError(f"{name} has sparse gradients, which EDGC does not average: build it with sparse=False")

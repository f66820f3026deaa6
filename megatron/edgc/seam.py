"""The seam to Megatron: every replacement of a function of Megatron's goes through a ``Seam``, which takes it back."""

from contextlib import ExitStack
from types import TracebackType
from typing import Any


class Seam:
    """What one training run replaces in Megatron. A context manager: on leaving, also by an exception, it restores
    everything in reverse order.

    Objects that Megatron builds for the run, such as bucket groups, end with the run and are not restored. Nor are the
    redirections of ``cpu.redirect``, which are made once for the process and before Megatron is imported.
    """

    def __init__(self) -> None:
        self._restore = ExitStack()

    def __enter__(self) -> "Seam":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore.close()

    def replace(self, owner: Any, attribute: str, replacement: Any) -> Any:
        """Set an attribute of a module, a class or an object; return what was there.

        Raises ``AttributeError`` if the owner has no such attribute.
        """
        found = getattr(owner, attribute)
        if attribute in vars(owner):  # not getattr's answer: of a static method that would be the bare function
            self._restore.callback(setattr, owner, attribute, vars(owner)[attribute])
        else:
            self._restore.callback(delattr, owner, attribute)
        setattr(owner, attribute, replacement)
        return found

"""Reduction engines behind one interface. A new idea is one small file here and one line in ``ENGINES``."""

from edgc.engines.base import Engine, MatrixSpec
from edgc.engines.powersgd import PowerSGD

# "dense" is no engine: where nothing is compressed, the host's own all-reduce is left in place.
ENGINES: dict[str, type[Engine]] = {"powersgd": PowerSGD}

__all__ = ["ENGINES", "Engine", "MatrixSpec", "PowerSGD"]

"""EDGC: entropy-driven dynamic gradient compression (arXiv 2511.10333). Needs torch and numpy, never Megatron."""

__version__ = "0.1.0"

"""Drives: what every host does around its reductions, and torch's DDP as a host. It knows no Megatron."""

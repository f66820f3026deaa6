"""EDGC for Megatron-core: this project's portion of the ``megatron`` namespace package."""

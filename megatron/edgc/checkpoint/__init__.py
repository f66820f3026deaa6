"""EDGC's state in Megatron's checkpoints."""

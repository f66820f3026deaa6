"""Shrinks: gradients and messages in few bytes, and what they leave to error feedback. No host, no decisions."""

"""Decides: entropy and costs in, ranks out. Numbers only; no torch, no collectives, no host."""

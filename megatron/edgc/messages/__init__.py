"""Compressed messages between pipeline stages."""

"""Measures: entropy, moments, times, events. It changes no gradient and sends nothing."""

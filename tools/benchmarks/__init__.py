"""Measurements of single steps, for ``bench_gpu.py`` and ``bench_reduce.py``; training runs do not belong here."""

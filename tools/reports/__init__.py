"""A dense and an EDGC run side by side, for ``report.py``; tables over many runs do not belong here."""

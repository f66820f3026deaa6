"""A dense run and EDGC's side by side, for ``report.py``; tables over many runs do not belong here."""

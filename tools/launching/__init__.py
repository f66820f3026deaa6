"""What is checked and known before training, for ``launch.py``, ``preflight.py`` and ``describe.py``. To import it,
Python 3.9 is enough: a package is imported by the function that needs it."""

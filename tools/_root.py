"""Puts the repository's root on Python's path, for a command that is started by its path: it then finds the rooms.

The root takes the place of this folder, which Python puts first: a command here may have the name of a package
(``evaluate``, which lm_eval imports). Python 3.9 is enough.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

if Path(sys.path[0]).resolve() == REPOSITORY / "tools":
    sys.path[0] = str(REPOSITORY)

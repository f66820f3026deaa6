"""Lists of runs, their results and pages, for ``frontier.py``; the report on a single run does not belong here."""

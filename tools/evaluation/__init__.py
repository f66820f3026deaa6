"""Scores of models in zero-shot tasks, for ``evaluate.py``; lm_eval is started by the command and not from here."""

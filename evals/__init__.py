"""Scores of a model on tasks: HellaSwag's scorer, which train.py and hellaswag.py share, and
lm-evaluation-harness. Nothing here trains, and nothing here compares runs: that is evidence/.
"""

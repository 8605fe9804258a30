"""Scores of a model on tasks: HellaSwag and lm-evaluation-harness.

train.py and hellaswag.py share HellaSwag's scorer. Nothing here trains, and nothing here compares
runs: that is evidence/.
"""

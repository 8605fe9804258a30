"""Evaluations of a model that is finished: lm-evaluation-harness. Nothing here trains."""

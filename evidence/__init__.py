"""Read what runs wrote: run folders, pairs of runs, verdicts, pictures, published tables.

report.py puts the parts together. The rule of a verdict is `decide` in common/stats.py. Nothing
here loads a model or imports PyTorch.
"""

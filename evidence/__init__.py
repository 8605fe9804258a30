"""What runs wrote, read back: run folders, pairs of runs, verdicts, pictures, published tables.
report.py puts them together; the rule of a verdict is common/stats.py's decide. Nothing here loads
a model or imports PyTorch.
"""

"""What runs wrote, read back: run folders, pairs of runs, verdicts, pictures, published tables. report.py puts them
together. Nothing here loads a model or imports PyTorch."""

"""What runs wrote, read back: arms, comparisons, verdicts, plots. Nothing here loads a model."""

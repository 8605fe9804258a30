"""The parts of a training run: data loader, optimiser, log, checkpoints, evaluation. train.py puts them together."""

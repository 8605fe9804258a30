"""The parts of a training run, which train.py puts together.

Data loader, optimiser, the report of a step, log, checkpoints, evaluation, and measurements on the
residual stream. Nothing here knows Hugging Face or decides what a norm is.
"""

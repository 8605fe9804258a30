"""The parts of a training run: data loader, optimiser, log, checkpoints, evaluation, and what is
measured on the residual stream. train.py puts them together. Nothing here knows Hugging Face or
decides what a norm is.
"""

"""Hugging Face checkpoints: config, weights, coupled classes of transformers."""

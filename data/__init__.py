"""Token shards, tokenizers and documents, and a folder with a prepare script for each data set.

Batches are made in training/dataloader.py.
"""

"""Token shards, tokenizers and documents, and one folder with a prepare script for each data set.
Batches are made in training/dataloader.py.
"""

"""Token shards, tokenizers, and one folder with a prepare script for each data set."""

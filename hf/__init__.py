"""Hugging Face models.

config: their config.json and ours; weights: their weights and ours; coupled: makes transformers
know the classes of modeling_coupled, which is copied into exported folders and knows nothing of
this repository. Importing any other file does not import transformers. Where the models come from
is the subject of common/hub.py.
"""

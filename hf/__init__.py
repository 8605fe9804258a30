"""Hugging Face models.

hub: where they come from; config: their config.json and ours; weights: their weights and ours;
coupled: CoupledNorm within transformers. Importing a file registers nothing and does not import
transformers.
"""

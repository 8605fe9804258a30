"""Hugging Face: where its models come from (hub), its config.json and ours (config), its weights
and ours (weights), and CoupledNorm within transformers (coupled). Importing a file registers
nothing and does not import transformers.
"""

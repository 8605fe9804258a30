"""CoupledNorm in a model that is already trained.

Which positions to couple and with which alpha (coupling, rms_stats), KL (kl), adapters (adapters),
text (text), teacher and student (student). distill.py puts them together. Nothing here trains a
model from scratch.
"""

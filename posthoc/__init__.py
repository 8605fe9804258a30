"""CoupledNorm in a model that is trained already: which positions to couple and with which alpha,
KL, adapters, text, teacher and student. distill.py puts them together. Nothing here trains from
scratch.
"""

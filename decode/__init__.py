"""Decoding token by token: a model's weights packed for it, the step, the arms that bench_decode.py
compares, their launch ledger, traces, and peers (transformers, gpt-fast). Training imports nothing
from here.
"""

"""Decoding token by token: packed weights, the step, and what bench_decode.py measures of it.

pack and step decode a model; arms, ledger, trace, report, last_token and the peers (transformers,
gpt-fast) compare, count and show. Training imports nothing from here.
"""

"""Programs that time and count, each run as `python -m bench.NAME`: training steps, kernels, folds,
bytes, and kernels compiled ahead of time. Nothing imports them but repro/ and tests.
bench_decode.py is at the root, with its parts in decode/.
"""

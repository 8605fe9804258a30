"""Programs that time and count, each run as `python -m bench.NAME`.

They measure training steps, kernels, folds, bytes, and kernels compiled ahead of time. Only repro/
and tests import them. bench_decode.py is at the root, with its parts in decode/.
"""

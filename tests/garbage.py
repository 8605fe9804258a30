"""Python's collector looks for cycles rarely: to be imported before anything else.

A tenth of the suite's CPU seconds were its ways through modules, graphs and models that stay.
"""

import gc

gc.set_threshold(100_000, 10, 10)  # containers, and younger collections; by default 700, 10, 10

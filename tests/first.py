"""What makes every test cheaper, imported before anything else: in pytest and in the server of
helpers.py.
"""

import gc

# Containers, then younger collections; by default 700, 10, 10. A tenth of the suite's CPU seconds
# were ways of Python's collector through modules, graphs and models that stay.
gc.set_threshold(100_000, 10, 10)

import torch  # noqa: E402

# Nobody reads how long the guards of a compiled graph take, for which dynamo empties the
# processor's cache each time. It takes the function when it is imported.
torch._C._dynamo.guards.profile_guard_manager = lambda manager, scope, times: 0.0

"""What every other part may use.

Errors and exit codes, files and tables that programs write, the machine and its precision,
statistics and paired timing, the style of pictures, processes and ranks. Nothing here knows a
model, a norm or a data set, and nothing here imports another part of this repository.
"""

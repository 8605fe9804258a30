"""Wrong, odd and extreme settings for every key of every program.

    python -m tests.fuzz                         # all programs; the table goes to results/cpu/fuzz
    python -m tests.fuzz train sample --pairs=5  # some programs
    python -m tests.fuzz train:1c9b07e2          # one case again, with its output

keys.py reads the keys from each program's own --help, so that a new key takes part at once.
cases.py makes values for them, programs.py has a short valid command of each program, world.py the
files that these commands read, execute.py runs a case in a forked process under limits of memory
and time, and verdict.py says what is a fault. regressions.py keeps the cases that were faults once.
"""

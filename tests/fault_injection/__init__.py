"""Kill a program, or fail it, at every call that changes a file, and see whether it recovers.

python -m tests.fault_injection             every point of every program
python -m tests.fault_injection --points=3  three points of each program and mode

preload.c    counts the calls of a process, and fails or kills it at one of them
launch.py    starts a program, with a fault or without
programs.py  the short runs under test
state.py     what a run leaves, in a form that can be compared
judge.py     one point: fault, look, repeat the command, compare
table.py     the table
__main__.py  all points
"""

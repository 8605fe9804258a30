"""Programs that time and count, each run as `python -m bench.NAME`. Nothing imports them but repro/ and tests."""

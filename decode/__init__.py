"""Decoding: packed weights, the step, its arms and ledgers. Training does not import it."""

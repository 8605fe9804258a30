"""The test suite: a package, so that processes that tests start find its functions by name."""

"""What fold takes from the packages beside it: top-level ones in a clone, parts of nanonorm where
it is installed.
"""

if __package__ == "fold":
    from common.environment import environment
    from common.errors import FoldError
    from kernels import rms_norm
else:
    from ..common.environment import environment
    from ..common.errors import FoldError
    from ..kernels import rms_norm

__all__ = ["FoldError", "environment", "rms_norm"]

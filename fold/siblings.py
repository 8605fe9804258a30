"""Import what fold needs from the other packages of the project.

In a clone these are top-level packages. In an installed wheel they are parts of nanonorm. This file
tells the two apart, and so do fold/hub.py and hf/hub.py, which not every use of fold needs.
"""

if __package__ == "fold":  # a clone
    from common.environment import environment
    from common.errors import FoldError
    from kernels import rms_norm
else:  # installed, as nanonorm.fold
    from ..common.environment import environment
    from ..common.errors import FoldError
    from ..kernels import rms_norm

__all__ = ["FoldError", "environment", "rms_norm"]

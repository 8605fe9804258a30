"""Import what fold needs from the other packages of the project.

In a clone these are top-level packages. In an installed wheel they are parts of nanonorm. This file
alone tells the two apart.
"""

if __package__ == "fold":  # a clone
    from common import hub
    from common.environment import environment
    from common.errors import ConfigError, FoldError, UserError
    from common.output import whole_folder
    from kernels import rms_norm
else:  # installed, as nanonorm.fold
    from ..common import hub
    from ..common.environment import environment
    from ..common.errors import ConfigError, FoldError, UserError
    from ..common.output import whole_folder
    from ..kernels import rms_norm

__all__ = [
    "ConfigError",
    "FoldError",
    "UserError",
    "environment",
    "hub",
    "rms_norm",
    "whole_folder",
]

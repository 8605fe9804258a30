"""MeanAbs: h / mean|h| over the channels, in place of the root of the mean square.

The example of docs/norms.md. A normal stream divided by its mean absolute value is 1.25 times as large as
one divided by its RMS, so this norm starts at another scale than RMSNorm.
"""

from norms import Norm, statistics_dtype


class MeanAbs(Norm):
    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))  # float32, also where h is bfloat16
        size = wide.abs().mean(-1, keepdim=True) + self.eps  # (B, T, 1)
        return self.affine(wide / size, h.dtype), None

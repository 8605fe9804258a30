"""The launches of a decoding step: PyTorch references, Triton kernels, and how launches overlap.

There is no model here: decode/ calls the launches in order.
"""

"""The launches of a decoding step: PyTorch references, Triton kernels, and how launches overlap. No
model here: decode/ calls them in order.
"""

"""The launches of a decoding step: PyTorch references, Triton kernels, how launches overlap. No model here."""

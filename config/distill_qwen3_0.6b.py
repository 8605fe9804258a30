"""CoupledNorm in Qwen3-0.6B, after training.

Reproduces: section 5.3 of Loretz & Hochreiter 2026 (DoRA r = 1024, alpha = 2048, KL alone, the
    first block not coupled). The paper does not say how long it distils, nor with which learning
    rate: those are ours.
    The data set (Nemotron, stem), the method and 1,000 steps of 8 * 8 * 1024 = 65,536 tokens are
    distill.py's defaults.
Time: not run yet. It needs one GPU; `--estimate` prints how much memory.
Loss: not known yet.

    python distill.py config/distill_qwen3_0.6b.py
    python distill.py config/distill_qwen3_0.6b.py --teacher=Qwen/Qwen3-8B \\
      --out_dir=out/distill/qwen3-8b
    python distill.py config/distill_qwen3_0.6b.py --teacher=meta-llama/Llama-3.2-1B-Instruct \\
      --coupled_first=4
"""

teacher = "Qwen/Qwen3-0.6B"
out_dir = "out/distill/qwen3-0.6b"
coupled_first = 1
# alpha is ours: by least squares, a number for each shared statistic. The paper has one number,
# 1.09 for Qwen and 1.1 for Llama: --alpha=1.09

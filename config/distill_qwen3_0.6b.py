"""CoupledNorm in Qwen3-0.6B, after training.

Reproduces: section 5.3 of Loretz & Hochreiter 2026 (DoRA r = 1024, alpha = 2048, KL alone, the
    first block not coupled). The paper does not say how long it distils, nor with which learning
    rate: those are ours.
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
dataset = "nvidia/Nemotron-Post-Training-Dataset-v2"
split = "stem"

method = "dora"
rank = 1024
adapter_alpha = 2048.0
coupled_first = 1
# alpha is ours: by least squares, a number for each shared statistic. The paper has one number,
# 1.09 for Qwen and 1.1 for Llama: --alpha=1.09

# 1,000 steps of 8 * 8 * 1024 = 65,536 tokens
block_size = 1024
batch_size = 8
gradient_accumulation_steps = 8
max_iters = 1000
learning_rate = 1e-4
warmup_iters = 20

"""About 30 M parameters on FineWeb-Edu, for comparing norms over several seeds.

Time and loss: results/ has no run of it yet. It needs one GPU.

    python data/fineweb_edu/prepare.py --max_tokens=1000000000
    python train.py config/small.py --norm_type=coupled --seed=8 --out_dir=out/small-coupled-8
"""

out_dir = "out/small"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 512

# 0.6 B tokens in steps of 32 * 8 * 512 = 131,072 tokens
max_iters = 4600
batch_size = 32
gradient_accumulation_steps = 8
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 200

eval_interval = 200

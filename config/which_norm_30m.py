"""The runs of repro/which_norm.sh 30m: 10.6 M parameters in blocks, 0.6 B tokens of FineWeb-Edu.

Reproduces: nothing published. repro/which_norm.toml is the plan, and sets shape, norm type,
    learning rate and seed of each run.
Time and loss: results/ has no run of it yet. It needs GPUs.

    python data/fineweb_edu/prepare.py --max_tokens=1000000000
"""

block_size = 512

# 0.6 B tokens in steps of 32 * 8 * 512 = 131,072 tokens
max_iters = 4600
batch_size = 32
gradient_accumulation_steps = 8
min_lr = 0.0
warmup_iters = 460
decay_per_step = 1e-4  # learning_rate times weight_decay

eval_interval = 1150
eval_tokens = 1048576
full_val = True
sample_tokens = 0

# pinned, so that all runs compute alike
dtype = "bfloat16"
compile = True
merge_micro_batches = 1

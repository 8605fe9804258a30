"""The runs of repro/which_norm.sh 124m: 85 M parameters in blocks, 2.5 B tokens of FineWeb-Edu.

Reproduces: nothing published. repro/which_norm.toml is the plan, and sets shape, norm type,
    learning rate and seed of each run.
Time and loss: results/ has no run of it yet. It needs nodes of GPUs (NPROC=8).

    python data/fineweb_edu/prepare.py
"""

# 2.5 B tokens in steps of 12 * 40 * 1024 = 491,520 tokens
max_iters = 5000
min_lr = 0.0
warmup_iters = 500
decay_per_step = 6e-5  # learning_rate times weight_decay

eval_interval = 1250
eval_tokens = 9830400
full_val = True
sample_tokens = 0

# pinned, so that all runs compute alike
dtype = "bfloat16"
compile = True
merge_micro_batches = 1

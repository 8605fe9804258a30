"""The runs of repro/which_norm.sh cpu: 0.8 M parameters in blocks, byte level, 2 M tokens.

Reproduces: nothing published. repro/which_norm.toml is the plan, and sets shape, norm type,
    learning rate and seed of each run.
Time: 1.5 minutes (4 blocks of 128 channels) and 3 minutes (16 of 64) a run on one core of a CPU
    with AMX; compiling an arm for the first time takes half a minute more.
Loss: a val loss of about 1.43 and 1.55 nats per byte with rms (results/cpu/init_std).
"""

data_dir = "data/stdlib"

block_size = 128

max_iters = 1000
batch_size = 16
gradient_accumulation_steps = 1  # 2,048 tokens a step
min_lr = 0.0
warmup_iters = 100
decay_per_step = 3e-4  # learning_rate times weight_decay

eval_tokens = 65536
full_val = True
sample_tokens = 0

# pinned, so that all runs compute alike
dtype = "bfloat16"
compile = True
merge_micro_batches = 1

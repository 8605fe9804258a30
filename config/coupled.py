"""GPT-2 124M on 10 B tokens of FineWeb-Edu, norm_type coupled.

nanoGPT's recipe (batch of 491,520 tokens, AdamW, cosine), stretched over one epoch of the 10 B token sample:
about 20,345 steps. Not run yet; at the 107 k tokens/s for each A100 that nanoGPT's users report, 8 of them would take
some 3.3 hours (estimate). Differs from its neighbours in norm_type and names alone.

    python data/fineweb_edu/prepare.py
    torchrun --standalone --nproc_per_node=8 train.py config/coupled.py
"""

out_dir = "out/gpt2-124m-coupled"
data_dir = "data/fineweb_edu"
norm_type = "coupled"

# 10 B tokens in steps of 12 * 1024 * 40 = 491,520 tokens
max_iters = 20345
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 40

n_layer = 12
n_head = 12
n_embd = 768
bias = False
dropout = 0.0

learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0

eval_interval = 250
eval_tokens = 20 * 12 * 40 * 1024
log_interval = 10

"""A 1 M parameter byte-level GPT on the sources of Python's standard library.

`make demo` trains it for 320 steps, as rms and as coupled.

Time: one to two minutes on a two-core CPU.
Loss: a val loss of about 1.25 nats per byte at the end (results/cpu/demo).

    python data/stdlib/prepare.py
    python train.py config/demo.py
"""

out_dir = "out/demo"
data_dir = "data/stdlib"
norm_type = "rms"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

max_iters = 1200
batch_size = 10
gradient_accumulation_steps = 2  # 2,560 tokens a step
learning_rate = 6e-3
min_lr = 0.0
warmup_iters = 50

eval_interval = 200
eval_tokens = 65536

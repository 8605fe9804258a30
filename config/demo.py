"""A 1 M parameter byte-level GPT on the sources of Python's standard library; `make demo` runs it.

Time: about two minutes on a two-core CPU.
Loss: a val loss of about 1.63 nats per byte at the end (results/cpu/demo).

    python data/stdlib/prepare.py
    python train.py config/demo.py
"""

out_dir = "out/demo"
data_dir = "data/stdlib"
norm_type = "coupled"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

max_iters = 500
batch_size = 10
gradient_accumulation_steps = 4  # 5,120 tokens a step
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 50

eval_interval = 100
eval_tokens = 65536

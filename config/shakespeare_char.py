"""A 10.7 M parameter character-level GPT on Tiny Shakespeare.

Reproduces: nanoGPT's settings of the same name; late in the run it overfits, as there.
Time: about three minutes on one GPU. On a CPU take --device=cpu --max_iters=500 --n_layer=4
    --n_embd=128 --n_head=4.

    python data/shakespeare_char/prepare.py
    python train.py config/shakespeare_char.py
"""

out_dir = "out/shakespeare-char"
data_dir = "data/shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2

max_iters = 5000
batch_size = 64
gradient_accumulation_steps = 1
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 100
beta2 = 0.99

eval_tokens = 110000

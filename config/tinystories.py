"""About 30 M weights in the blocks, on TinyStories; smaller shapes by repro/taper_table.sh.

Time: not run yet. It needs one GPU.
Loss: not known yet.

    hf download roneneldan/TinyStories --repo-type dataset --local-dir data/tinystories/text
    python data/prepare.py data/tinystories/text/data/train-*.parquet \\
      --val='data/tinystories/text/data/validation-*.parquet' --out_dir=data/tinystories
    python train.py config/tinystories.py --norm_type=taper --out_dir=out/tinystories-taper

The text comes as parquet files. norm_type is given on the command line; the learning rate is the
same for all norm types and sizes.
"""

out_dir = "out/tinystories"
data_dir = "data/tinystories"

n_layer = 10
n_head = 8
n_embd = 512
block_size = 512

# 0.33 B tokens in steps of 64 * 1 * 512 = 32,768 tokens, most of an epoch
max_iters = 10000
batch_size = 64
gradient_accumulation_steps = 1
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 500

eval_interval = 500

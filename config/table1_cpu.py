"""Table 1 at the scale of one CPU core: 0.84 M parameters, byte level, 2 M tokens.

Reproduces: the comparison of Loretz & Hochreiter 2026, Table 1, with seeds 8 to 15 as there.
Time: three to four minutes a run on one CPU core.
Loss: a val loss of 1.55 to 1.56 nats per byte at the end, of taper 1.80 (results/cpu/table1).

`repro/table1.sh cpu` makes the forty runs (five norm types, eight seeds) and the report. The
margins below are what we call equal; they were declared before any run.
"""

data_dir = "data/stdlib"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
init_std = 0.02

max_iters = 1000
batch_size = 16
gradient_accumulation_steps = 1  # 2,048 tokens a step
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 100

eval_interval = 100
eval_tokens = 65536
sample_tokens = 0
hellaswag_items = 1000

# pinned, so that every run of the study computes alike
dtype = "float32"
compile = False
merge_micro_batches = 1

delta_train_loss = 0.01
delta_val_loss = 0.01
delta_hellaswag_acc = 0.02
delta_hellaswag_acc_norm = 0.02
delta_tok_per_s = 0.02

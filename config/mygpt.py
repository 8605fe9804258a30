"""The 0.2 M parameter character-level GPT of the course mygpt, on Tiny Shakespeare.

Reproduces: the chapter "RMSNorm replaces LayerNorm". Batch size 16, learning rate 1e-3, 4 heads and
    AdamW at PyTorch's defaults are those of the course's repository (egde/mygpt), chapters 17 and
    18: 2,000 steps at a constant learning rate without clipping.
Time: about a minute on one CPU core.
Loss: a val loss of 2.13 (layer) and 2.12 (rms) nats per character at the end (results/cpu/mygpt).

`repro/mygpt.sh` runs it for layer and rms, in both initialisations.
"""

out_dir = "out/mygpt"
data_dir = "data/shakespeare_char"

vocab_size = 65
n_layer = 4
n_head = 4
n_embd = 64
block_size = 64
bias = True
attn_bias = False
init_std = 0.02  # of init=gpt2
init = "torch"  # unit-normal embeddings, so the first loss is near 41; "gpt2" is the other one

max_iters = 2000
batch_size = 16
gradient_accumulation_steps = 1
learning_rate = 1e-3
lr_schedule = "constant"
min_lr = 1e-3
warmup_iters = 0
weight_decay = 0.01
beta2 = 0.999
grad_clip = 0.0

eval_interval = 500
eval_tokens = 110000
log_interval = 50

# pinned, so that every run of the study computes alike
dtype = "float32"
compile = False
merge_micro_batches = 1

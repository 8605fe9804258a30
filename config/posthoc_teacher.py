"""A teacher for the conversion after training: 10 M parameters in Llama's shape, RMSNorm, bytes.

Time: 3.1 M tokens took about 40 minutes on one CPU core with units for bfloat16, on two without.
Loss: a val loss of 1.45 nats per byte at the end (results/cpu/posthoc).

repro/posthoc.sh prepares the data, and runs this and what follows it.
"""

out_dir = "out/posthoc/teacher-1"
data_dir = "out/posthoc/text_a"
norm_type = "rms"

n_layer = 8
n_head = 5
n_kv_head = 5
n_embd = 320
activation = "swiglu"
position = "rope"
tie_embeddings = False
block_size = 256
init_std = 0.02

max_iters = 1500
batch_size = 8
gradient_accumulation_steps = 1  # 2,048 tokens a step
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 100

dtype = "bfloat16"
compile = False
merge_micro_batches = 1

eval_tokens = 49152
sample_tokens = 200

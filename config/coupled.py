"""GPT-2 124M on 10 B tokens of FineWeb-Edu, norm_type coupled.

Reproduces: nanoGPT's recipe (batch of 491,520 tokens, AdamW, cosine), with the schedule over one
    epoch of the 10 B token sample: about 20,345 steps.
Time: not run yet. At 107 k tokens/s for each A100, as nanoGPT's users report, 8 of them would take
    about 3.3 hours (an estimate).
Loss: not known yet.

Only norm_type and the names differ from the other four configs of this size. What is not set here
(12 blocks, 768 channels, batch, steps, learning rates) is train.py's default.

    python data/fineweb_edu/prepare.py
    torchrun --standalone --nproc_per_node=8 train.py config/coupled.py
"""

out_dir = "out/gpt2-124m-coupled"
norm_type = "coupled"

eval_tokens = 20 * 12 * 40 * 1024

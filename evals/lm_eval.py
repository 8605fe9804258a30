"""Our models as lm-evaluation-harness wants them, and its own command line with them.

    python -m evals.lm_eval --model nanonorm --model_args spec=out/run \\
      --tasks arc_easy,piqa --num_fewshot 5 --limit 100 --output_path out/marks.json   (network)
    python -m evals.lm_eval --model nanonorm --model_args spec=out/run,dtype=float32 \\
      --tasks mine --include_path folder/with/yaml --device cpu

To import this module registers `nanonorm`, and needs the harness: pip install lm-eval (0.4.12 or
later). Options, tasks, tables and files are the harness's. Tasks that ask for likelihoods run;
those that generate text do not.

evals.lm_eval_model compares several models item by item. Here there is one model, and tasks are
exactly as the harness reads them. In lm-eval 0.4.13 that is wrong for gpqa, whose choices are
shuffled anew when they are marked; evals.lm_eval_model has them shuffled once.
"""

from collections import Counter
from typing import Any

import torch

from common.distributed import Ranks
from common.environment import Precision, faster_float32_products, find_device
from common.errors import UserError
from common.hub import import_transformers
from data.tokenizers import tokenizer_of
from evals.likelihood import encode_pairs, log_likelihoods
from load import load_model

# Before the harness does it, so that our kernels/ is not taken for another package.
import_transformers()

import lm_eval.models  # noqa: E402, F401  its own are registered only if there are no others
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402

BATCH_SIZE = 8  # for --batch_size auto


@register_model("nanonorm")
class NanonormLM(LM):
    """A GPT that answers the harness's questions for likelihoods.

    `seen` counts requests, and those that lost their beginning.

    Args:
        spec: as of load_model.
        dtype: of the computation, auto, float32 or bfloat16; auto is bfloat16 on CUDA.
        context: tokens that fit; 0: the model's block_size.
        batch_size: contexts at once, or auto.
        device: as of --device. The harness says cuda:0 where it was not told; that is auto.
        max_batch_size: not used; the harness passes it.
    """

    def __init__(
        self,
        spec: str,
        dtype: str = "auto",
        context: int = 0,
        batch_size: int | str = BATCH_SIZE,
        device: str = "auto",
        max_batch_size: int | None = None,
    ):
        super().__init__()
        is_open = device in ("auto", "cuda:0")
        self.precision = Precision(dtype, find_device("auto") if is_open else torch.device(device))
        model = load_model(spec)
        self.tokenizer = tokenizer_of(model)
        self.model = model.to(self.precision.device, self.precision.weights)
        if self.precision.device.type == "cpu":
            faster_float32_products(model.config.n_embd, model.config.head_channels)
        self.context = context or model.config.block_size
        self.batch_size = BATCH_SIZE if str(batch_size).startswith("auto") else int(batch_size)
        self.seen: Counter[str] = Counter()

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Score (context, continuation) of each request: nats, and whether it is greedy."""
        texts = encode_pairs(self.tokenizer, [request.args for request in requests], self.context)
        self.seen.update(requests=len(texts), requests_cut=sum(text.is_cut for text in texts))
        alone = Ranks(0, 1, self.precision.device)
        found = log_likelihoods(self.model, texts, alone, self.batch_size, self.precision.autocast)
        return list(zip(*map(torch.Tensor.tolist, found), strict=True))

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Refuse whole documents. Raises UserError."""
        raise UserError("a task needs the likelihood of whole documents: choose multiple choice")

    def generate_until(self, requests: list) -> list[str]:
        """Refuse to generate. Raises UserError."""
        raise UserError("a task needs generated text: choose multiple choice")

    def get_model_info(self) -> dict[str, Any]:
        """Describe the evaluation for the harness's file of results."""
        return {
            "model_device": str(self.precision.device),
            "model_dtype": str(self.precision.dtype).removeprefix("torch."),
            "model_context": self.context,
            **self.seen,
        }


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

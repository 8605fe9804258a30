"""Our models as lm-evaluation-harness wants them. To import this is to need the harness.

The import registers them there under the name `nanonorm`: that is what the harness 0.4.13 reads.
It reads no entry points.
"""

from difflib import get_close_matches
from typing import Any

import torch

from common.environment import Precision, faster_float32_products, find_device
from common.errors import ConfigError, UserError
from evals.likelihood import Scorer
from evals.lm_eval_tasks import GENERATES, import_lm_eval
from load import load_model

# With the harness's own models, which it registers only if there are no others.
lm_eval = import_lm_eval()
ARGUMENTS = ("spec", "dtype", "context")  # of --model_args
DTYPES = ("auto", "float32", "bfloat16")
BATCH_SIZE = 8  # for --batch_size auto


class HarnessModel(lm_eval.api.model.LM):
    """A scorer, with the methods that the harness calls."""

    def __init__(self, scorer: Scorer):
        super().__init__()
        self.scorer = scorer

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        return self.scorer.score([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        raise UserError(GENERATES)

    def generate_until(self, requests: list) -> list[str]:
        raise UserError(GENERATES)


@lm_eval.api.registry.register_model("nanonorm")
class NamedModel(HarnessModel):
    """The model of `--model nanonorm --model_args spec=out/run,dtype=float32,context=1024`.

    Args:
        spec: as of load_model.
        dtype: one of DTYPES; auto is bfloat16 on CUDA.
        context: tokens that fit; 0: the model's block_size.
        batch_size: as of --batch_size.
        device: as of --device. The harness says cuda:0 where it was not told; without CUDA that is
            the first device that there is.
        max_batch_size: not used; the harness passes it.
        unknown: other arguments.

    Raises:
        ConfigError: an argument is missing, unknown or out of range.
        CheckpointError, HFError: the model cannot be loaded.
    """

    def __init__(
        self,
        spec: str = "",
        dtype: str = "auto",
        context: int = 0,
        batch_size: int | str = 1,
        device: str = "auto",
        max_batch_size: int | None = None,
        **unknown: Any,
    ):
        for name in unknown:
            near = get_close_matches(name, ARGUMENTS, 1, 0) or ARGUMENTS
            raise ConfigError(
                f"model_args {name}: unknown, did you mean {near[0]}? There are: "
                f"{', '.join(ARGUMENTS)}"
            )
        if not spec:
            raise ConfigError("name the model: --model_args spec=MODEL, e.g. spec=out/run")
        if dtype not in DTYPES:
            raise ConfigError(f"model_args dtype={dtype}: must be one of {', '.join(DTYPES)}")
        precision = Precision(dtype, _device(device))
        model = load_model(str(spec))
        size = model.config.block_size
        if not isinstance(context, int) or not 0 <= context <= size:
            raise ConfigError(
                f"model_args context={context}: must be a number of tokens up to the model's {size}"
            )
        if precision.device.type == "cpu":
            faster_float32_products(model.config.n_embd, model.config.head_channels)
        super().__init__(Scorer(model, precision, _batch_size(batch_size), context))

    def get_model_info(self) -> dict[str, Any]:
        """Describe the evaluation for the harness's file of results."""
        scorer = self.scorer
        return {
            "model_device": str(scorer.precision.device),
            "model_dtype": str(scorer.precision.dtype).removeprefix("torch."),
            "model_context": scorer.context,
            "requests": scorer.seen["requests"],
            # They lost their beginning, because they did not fit the context.
            "requests_cut": scorer.seen["cut"],
        }


def _device(name: str) -> torch.device:
    """Find the device of the harness's option --device. Raises ConfigError."""
    if name == "cuda:0" and not torch.cuda.is_available():
        name = "auto"
    kind = name.split(":")[0]
    if kind not in ("auto", "cpu", "cuda", "mps"):
        raise ConfigError(f"device={name}: must be auto, cpu, cuda, cuda:N or mps")
    found = find_device(kind)
    return found if kind == name else torch.device(name)


def _batch_size(option: int | str) -> int:
    """Read the harness's option --batch_size. Raises ConfigError."""
    if str(option).startswith("auto"):
        return BATCH_SIZE
    if not str(option).isdigit() or int(option) < 1:
        raise ConfigError(f"batch_size={option}: must be auto or at least 1")
    return int(option)

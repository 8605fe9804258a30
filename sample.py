"""Generate text from a trained model.

    python sample.py out/demo --prompt="def " --max_new_tokens=300
    python sample.py out/demo/ckpt_last.pt --prompt=FILE:prompt.txt --temperature=0
    python sample.py out/mine --norm_file=my_norm.py
        a model whose norm is in a file

The first argument is the model: a run folder (its best checkpoint), a checkpoint file, a Hugging
Face folder or hub name, or `random:` and a published shape.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from common.environment import find_device
from common.errors import ConfigError, run_program
from common.inputs import check_regular
from configurator import key, parse_args
from data.tokenizers import decode, encode_open, tokenizer_of
from load import load_model
from norm_files import take_norm_file


@dataclass(frozen=True)
class SampleConfig:
    """Keys of sample.py."""

    prompt: str = key("\n", "text to continue, or FILE:path")
    num_samples: int = key(1, "number of continuations", least=1)
    max_new_tokens: int = key(500, "length of each, in tokens", least=1)
    temperature: float = key(
        0.8, "0 is greedy; below 1 sharpens, above 1 flattens", least=1e-3, most=1e3, zero=True
    )
    top_k: int = key(200, "sample among this many most likely tokens (0: all)", least=0)
    seed: int = key(1337, "of the random stream", least=0, most=(1 << 32) - 1)
    device: str = key(
        "auto", "auto: the first available of cuda, mps, cpu", ("auto", "cpu", "cuda", "mps")
    )


def read_prompt(prompt: str) -> str:
    """Return the text to continue, from its file if `prompt` names one."""
    if not prompt.startswith("FILE:"):
        return prompt
    path = Path(prompt.removeprefix("FILE:"))
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompt={prompt}: cannot be read as text ({type(error).__name__})"
        ) from None


def main(argv: list[str]) -> None:
    config, spec = parse_args(SampleConfig, take_norm_file(argv), __doc__, spec=True)
    text = read_prompt(config.prompt)
    device = find_device(config.device)
    model = load_model(spec).to(device)
    tokenizer = tokenizer_of(model)
    tokens = encode_open(tokenizer, text)
    if not tokens:
        raise ConfigError("prompt is empty: give at least one character")
    prompt = torch.tensor([tokens], device=device)  # (1, T)
    generator = torch.Generator(device).manual_seed(config.seed)
    for number in range(config.num_samples):
        if number:
            print("-" * 80)
        sequence = model.generate(
            prompt, config.max_new_tokens, config.temperature, config.top_k, generator
        )  # (1, T + max_new_tokens)
        print(decode(tokenizer, sequence[0].tolist()))


if __name__ == "__main__":
    run_program(main)

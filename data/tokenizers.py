"""The tokenizers that data and checkpoints name: GPT-2 BPE, single bytes, single characters, a Hugging Face one.

All have encode_ordinary(text) -> ids, decode(ids) -> text, and n_vocab.
"""

import numpy as np
import tiktoken

from data.shards import DataError

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> tiktoken.Encoding:
    """256 byte tokens and one end-of-text token (id 256), in tiktoken's own terms."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})


class CharTokenizer:
    """One token per character of a fixed alphabet, in sorted order; the alphabet is part of meta.json."""

    def __init__(self, chars: str):
        self.chars = chars
        self.ids = {char: index for index, char in enumerate(chars)}
        self.n_vocab = len(chars)

    def encode_ordinary(self, text: str) -> list[int]:
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise DataError(f"character {error.args[0]!r} is not in this model's alphabet of {self.n_vocab}") from None

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.chars[token] for token in tokens)


class HFTokenizer:
    """The tokenizer.json of a Hugging Face folder, without its special tokens."""

    def __init__(self, folder: str):
        try:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        except ImportError:
            raise DataError(f"the tokenizer of {folder} needs a package: pip install tokenizers") from None
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(f"{folder}/tokenizer.json cannot be read ({error}): put the model's tokenizer files "
                            "there") from None  # fmt: skip
        self.n_vocab = self.tokenizer.get_vocab_size()

    def encode_ordinary(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def token_bytes(tokenizer: tiktoken.Encoding | CharTokenizer | HFTokenizer) -> np.ndarray:
    """Length in UTF-8 bytes of each token (n_vocab,); the end-of-text token stands for no text, so 0."""
    if isinstance(tokenizer, HFTokenizer):
        raise DataError("the tokens of a Hugging Face tokenizer have no lengths in bytes here")
    if isinstance(tokenizer, CharTokenizer):
        return np.array([len(char.encode()) for char in tokenizer.chars])
    special = {tokenizer.encode_single_token(name) for name in tokenizer.special_tokens_set}
    return np.array([0 if token in special else len(tokenizer.decode_single_token_bytes(token))
                     for token in range(tokenizer.n_vocab)])  # fmt: skip


def load_tokenizer(meta: dict) -> tiktoken.Encoding | CharTokenizer | HFTokenizer:
    """The tokenizer of a data folder or checkpoint. Raises DataError if it is unknown or cannot be had."""
    name = meta.get("tokenizer")
    if name == "chars" and isinstance(meta.get("chars"), str):
        return CharTokenizer(meta["chars"])
    if name == "bytes":
        return byte_tokenizer()
    if name == "hf":
        return HFTokenizer(meta["path"])
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken downloads it at first use and raises whatever its HTTP library does
            raise DataError(
                f"the GPT-2 tokenizer could not be downloaded ({type(error).__name__}): connect once, or point "
                "TIKTOKEN_CACHE_DIR at a folder that has it"
            ) from None
    raise DataError(f"unknown tokenizer {name!r}: this data has no usable meta.json; prepare it again")

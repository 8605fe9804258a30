"""The tokenizers that data and checkpoints name: GPT-2 BPE, single bytes, single characters, a
Hugging Face one.

All have encode_ordinary(text) -> ids, decode(ids) -> text, and n_vocab.
"""

from typing import Any

import numpy as np
import tiktoken

from common.errors import DataError

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> tiktoken.Encoding:
    """256 byte tokens and one end-of-text token (id 256), in tiktoken's own terms."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return tiktoken.Encoding(
        "bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
    )


class CharTokenizer:
    """One token per character of a fixed alphabet, in sorted order; the alphabet is part of
    meta.json.
    """

    def __init__(self, chars: str):
        self.chars = chars
        self.ids = {char: index for index, char in enumerate(chars)}
        self.n_vocab = len(chars)

    def encode_ordinary(self, text: str) -> list[int]:
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise DataError(
                f"character {error.args[0]!r} is not in this model's alphabet of {self.n_vocab}"
            ) from None

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.chars[token] for token in tokens)


class HFTokenizer:
    """The tokenizer.json of a Hugging Face folder, without its special tokens."""

    def __init__(self, folder: str):
        try:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        except ImportError:
            raise DataError(
                f"the tokenizer of {folder} needs a package: pip install tokenizers"
            ) from None
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(
                f"{folder}/tokenizer.json cannot be read ({error}): put the model's tokenizer "
                "files there"
            ) from None
        self.n_vocab = self.tokenizer.get_vocab_size()

    def encode_ordinary(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def token_bytes(tokenizer: tiktoken.Encoding | CharTokenizer | HFTokenizer) -> np.ndarray:
    """Length in UTF-8 bytes of each token (n_vocab,); the end-of-text token stands for no text, so
    0.
    """
    if isinstance(tokenizer, HFTokenizer):
        raise DataError("the tokens of a Hugging Face tokenizer have no lengths in bytes here")
    if isinstance(tokenizer, CharTokenizer):
        return np.array([len(char.encode()) for char in tokenizer.chars])
    special = {tokenizer.encode_single_token(name) for name in tokenizer.special_tokens_set}
    return np.array(
        [
            0 if token in special else len(tokenizer.decode_single_token_bytes(token))
            for token in range(tokenizer.n_vocab)
        ]
    )


def hf_tokenizer(tokenizer: tiktoken.Encoding | CharTokenizer) -> Any:
    """The same tokenizer as a `tokenizers.Tokenizer`, which a Hugging Face folder stores as
    tokenizer.json.

    Both libraries merge the pair whose joint token has the lowest rank, and take a word that is a
    token whole. GPT-2's words are what ByteLevel cuts; for single bytes it makes no difference
    where words end. As all of Hugging Face's it reads "<|endoftext|>" in a text as that token,
    where encode_ordinary sees plain text. Raises DataError.
    """
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise DataError("writing a tokenizer needs a package: pip install tokenizers") from None
    if isinstance(tokenizer, CharTokenizer):
        made = Tokenizer(models.WordLevel(tokenizer.ids))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        return made
    # GPT-2's alphabet for bytes: those that print are themselves, the others take characters from
    # 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
    ranks = {
        tokenizer.decode_single_token_bytes(token): token for token in range(tokenizer.eot_token)
    }
    words = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = [
        (words[token[:cut]], words[token[cut:]])
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    made = Tokenizer(
        models.BPE(
            {words[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    # takes the next id, as there
    made.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return made


def load_tokenizer(meta: dict) -> tiktoken.Encoding | CharTokenizer | HFTokenizer:
    """The tokenizer of a data folder or checkpoint.

    Raises DataError if it is unknown or cannot be had.
    """
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
        # tiktoken downloads it at first use and raises whatever its HTTP library does
        except Exception as error:
            raise DataError(
                f"the GPT-2 tokenizer could not be downloaded ({type(error).__name__}): connect "
                "once, or point TIKTOKEN_CACHE_DIR at a folder that has it"
            ) from None
    raise DataError(
        f"unknown tokenizer {name!r}: this data has no usable meta.json; prepare it again"
    )

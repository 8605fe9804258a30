"""The tokenizers that data and checkpoints name.

They are GPT-2's BPE, single bytes, single characters, and that of a Hugging Face folder. All have
encode_ordinary(text) -> ids, decode(ids) -> text, and n_vocab; all but single characters have
eot_token, the id of end of text.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from common.errors import DataError
from common.inputs import read_regular
from common.output import parse_json

END_OF_TEXT = "<|endoftext|>"
MOST_BYTES = 1 << 28  # of a tokenizer.json; Gemma's has 33 MB


def byte_tokenizer() -> tiktoken.Encoding:
    """Return tiktoken's encoding of single bytes: 256 tokens, and end of text with id 256."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return tiktoken.Encoding(
        "bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
    )


class CharTokenizer:
    """One token for each character of a fixed alphabet, which meta.json stores."""

    def __init__(self, chars: str):
        self.chars = chars
        self.ids = {char: index for index, char in enumerate(chars)}
        self.n_vocab = len(chars)

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids. Raises DataError for a character that is not in the alphabet."""
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise DataError(
                f"character {error.args[0]!r} is not in this model's alphabet of {self.n_vocab}"
            ) from None

    def decode(self, tokens: list[int]) -> str:
        """Return the text."""
        return "".join(self.chars[token] for token in tokens)


@contextmanager
def panics_are_errors(text: str) -> Iterator[None]:
    """Turn a panic of the library `tokenizers`, which is no Exception, into a DataError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"the tokenizer fails on {text[:40]!r} ({error}): a pattern in its tokenizer.json "
            "takes too long; mend it, or shorten the text"
        ) from None


class HFTokenizer:
    """The tokenizer.json of a Hugging Face folder. The files next to it name BOS, EOS and padding.

    Attributes:
        before: ids that its template puts before a text.
        after: ids that it puts behind a text.
        special: {"bos_token_id": id, ...} of the tokens that are named and exist. EOS that is not
            named is what the template puts last behind a text.
        checksum: SHA-256 of what decides about ids: tokenizer.json and `special`.
    """

    def __init__(self, folder: str, n_model: int):
        from tokenizers import Tokenizer, models

        self.n_model = n_model  # ids that the model has
        try:
            content = read_regular(Path(folder, "tokenizer.json"), MOST_BYTES)
            with panics_are_errors(folder):
                self.tokenizer = Tokenizer.from_buffer(content)
            named = named_tokens(folder)
            added = [*map(_text, named.pop("added_tokens_decoder", {}).values())]
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(
                f"the tokenizer of {folder} cannot be read ({error}): put the model's "
                "tokenizer.json and tokenizer_config.json there"
            ) from None
        # The file may keep the limits of the last call before it was saved.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # transformers would add such a token, with an id of its own.
        for token in (*added, _text(named.get("bos_token")), _text(named.get("eos_token"))):
            if token is not None and self.tokenizer.token_to_id(token) is None:
                raise DataError(
                    f"{folder}: its tokenizer_config.json names {token!r}, which its "
                    "tokenizer.json does not have: open it with transformers' AutoTokenizer, and "
                    "write it anew by save_pretrained"
                )
        # Numbers of tokens may have gaps.
        self.n_vocab = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        named = {"eos_token": END_OF_TEXT} | named  # transformers' default for GPT-2, Qwen
        ids = {name: self._id(named.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self.special = {f"{name}_id": token for name, token in ids.items() if token is not None}
        self.bos_token = ids["bos_token"]
        self.eot_token = self.bos_token if ids["eos_token"] is None else ids["eos_token"]
        # What the template adds to a text of one token
        one = Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).encode("x")
        framed = self.tokenizer.post_process(one)
        place = framed.special_tokens_mask.index(0)
        self.before = framed.ids[:place]
        self.after = framed.ids[place + 1 :]
        if self.after:
            self.special.setdefault("eos_token_id", self.after[-1])
        self.checksum = hashlib.sha256(content + json.dumps(self.special).encode()).hexdigest()

    def _id(self, token: Any) -> int | None:
        """Return the id of a token as those files write it."""
        text = _text(token)
        return None if text is None else self.tokenizer.token_to_id(text)

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids, with those that the model's template adds: BOS, where it adds one.

        A text that has it in writing, as a chat template makes one, gets no second one. Raises
        DataError for an id that the model has not, and where the library fails.
        """
        with panics_are_errors(text):
            ids = self.tokenizer.encode(text).ids
        if self.before and text.startswith(self.tokenizer.id_to_token(self.before[0])):
            ids = ids[len(self.before) :]
        if max(ids, default=0) >= self.n_model:
            raise DataError(
                f"the tokenizer gives {max(ids)} for {text[:40]!r}, and the model has "
                f"{self.n_model} tokens: they are not of one model"
            )
        return ids

    def encode_open(self, text: str) -> list[int]:
        """Return the ids of a text that goes on: without those that the template puts behind it."""
        ids = self.encode_ordinary(text)
        return ids[: -len(self.after)] if self.after else ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def named_tokens(folder: str) -> dict[str, Any]:
    """Read which tokens the files beside a tokenizer.json name, as transformers does.

    special_tokens_map.json counts where tokenizer_config.json does not list the tokens itself.
    Raises ValueError, TypeError and what read_regular raises.
    """
    named: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = Path(folder, name)
        if path.exists() and "added_tokens_decoder" not in named:
            named |= parse_json(read_regular(path, MOST_BYTES))
    return named


def _text(token: Any) -> str | None:
    """Return the text of a token as those files write it: as text, or as a dictionary with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def token_bytes(tokenizer: tiktoken.Encoding | CharTokenizer | HFTokenizer) -> np.ndarray:
    """Return the length of each token in UTF-8 bytes, (n_vocab,).

    The end-of-text token stands for no text, so it has length 0. Raises DataError for a Hugging
    Face tokenizer.
    """
    if isinstance(tokenizer, HFTokenizer):
        raise DataError("the tokens of a Hugging Face tokenizer have no lengths in bytes here")
    if isinstance(tokenizer, CharTokenizer):
        return np.array([len(char.encode()) for char in tokenizer.chars])
    texts = map(tokenizer.decode_single_token_bytes, range(tokenizer.n_vocab))
    lengths = np.array([len(text) for text in texts])
    lengths[tokenizer.eot_token] = 0
    return lengths


def hf_tokenizer(tokenizer: tiktoken.Encoding | CharTokenizer) -> Any:
    """Return the same tokenizer as a `tokenizers.Tokenizer`, for a folder's tokenizer.json.

    Both libraries merge the pair whose joint token has the lowest rank, and take a word that is a
    token whole. ByteLevel cuts text into the same words as GPT-2's pattern; for single bytes it
    makes no difference where words end. Like all of Hugging Face's tokenizers, it reads
    "<|endoftext|>" in a text as that token, where encode_ordinary sees plain text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if isinstance(tokenizer, CharTokenizer):
        made = Tokenizer(models.WordLevel(tokenizer.ids))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        return made
    # GPT-2 writes each byte as a character: printable ones as themselves, the others as characters
    # from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    # Token as bytes -> rank, and token as bytes -> token in that alphabet.
    ranks = {
        tokenizer.decode_single_token_bytes(token): token for token in range(tokenizer.eot_token)
    }
    words = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    # Every way to make a token of two others.
    merges = []
    for token in ranks:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((words[left], words[right]))
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    # It takes the next id, as in tiktoken.
    made.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return made


def load_tokenizer(meta: dict) -> tiktoken.Encoding | CharTokenizer | HFTokenizer:
    """Load the tokenizer of a data folder or checkpoint.

    Args:
        meta: of read_meta; it names it.

    Raises:
        DataError: it is unknown, cannot be read or cannot be downloaded, or has changed.
    """
    name = meta.get("tokenizer")
    if name == "chars" and isinstance(meta.get("chars"), str):
        return CharTokenizer(meta["chars"])
    if name == "bytes":
        return byte_tokenizer()
    if name == "hf" and isinstance(meta.get("path"), str):
        tokenizer = HFTokenizer(meta["path"], meta.get("vocab_size", sys.maxsize))
        # Older meta.json has none.
        if meta.get("checksum", tokenizer.checksum) != tokenizer.checksum:
            raise DataError(
                f"the tokenizer of {meta['path']} has changed since the data were prepared: put "
                "the one of then there, or prepare the data again and train on them"
            )
        return tokenizer
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:
            # tiktoken downloads it at first use, and its HTTP library raises many kinds.
            raise DataError(
                f"the GPT-2 tokenizer could not be downloaded ({type(error).__name__}): connect "
                "once, or point TIKTOKEN_CACHE_DIR at a folder that has it"
            ) from None
    raise DataError(
        f"unknown tokenizer {name!r}: meta.json (or nanoGPT's meta.pkl) is missing in the data, or "
        "names none that is known here; prepare it again, or put the meta.pkl of a nanoGPT "
        "checkpoint into data/NAME, here or beside its run folder"
    )


def tokenizer_of(model: Any) -> tiktoken.Encoding | CharTokenizer | HFTokenizer:
    """Load the tokenizer of a GPT. Raises DataError, also if the model has fewer tokens than it."""
    tokenizer = load_tokenizer(model.meta)
    # One of Hugging Face may name tokens that no text becomes.
    if not isinstance(tokenizer, HFTokenizer) and tokenizer.n_vocab > model.n_vocab:
        raise DataError(
            f"the model has {model.n_vocab} tokens, its tokenizer {tokenizer.n_vocab}: "
            "they are not of one data set"
        )
    return tokenizer


def first_token(tokenizer: tiktoken.Encoding | CharTokenizer | HFTokenizer) -> int | None:
    """Return what stands for an empty context: BOS, else the end of a text; None for neither."""
    bos = getattr(tokenizer, "bos_token", None)
    return getattr(tokenizer, "eot_token", None) if bos is None else bos


def document_start(tokenizer: tiktoken.Encoding | CharTokenizer | HFTokenizer) -> list[int]:
    """Return what goes before the tokens of each document: end of text, if there is such a token.

    Nothing where encode_ordinary begins with what the tokenizer's template adds (BOS).
    """
    end = getattr(tokenizer, "eot_token", None)
    return [] if end is None or tokenizer.encode_ordinary("") else [end]


def encode_open(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that goes on, as a prompt: nothing that a template appends (EOS)."""
    return getattr(tokenizer, "encode_open", tokenizer.encode_ordinary)(text)


class Edges(NamedTuple):
    """The ids with which each document of a data set begins and ends; None for none."""

    begin: int | None
    end: int | None


def document_edges(tokenizer: Any) -> Edges:
    """Return what tells the documents apart that a tokenizer has prepared."""
    before = getattr(tokenizer, "before", [])
    after = getattr(tokenizer, "after", [])
    if before or after:
        begin = before[0] if before else None
        end = after[-1] if after else None
        return Edges(begin, end)
    return Edges(getattr(tokenizer, "eot_token", None), None)


def document_begins(shards: Iterable[np.ndarray], edges: Edges) -> np.ndarray:
    """Return where documents begin, (documents,), as places in the tokens of all shards, ascending.

    Args:
        shards: uint16 (n,) each, as data/shards.py reads them.
        edges: of the documents. Where one id begins and ends them, a document begins at the second
            of two, and the first place is left out.
    """
    places = [np.zeros(0, int)]
    offset = 0
    was_end = False  # the last token of the shard before
    for shard in shards:
        is_end = shard == edges.end
        is_begin = shard == edges.begin
        if edges.begin is None:
            found = np.flatnonzero(is_end) + 1
        elif edges.begin == edges.end:
            found = np.flatnonzero(is_begin & np.append(was_end, is_end[:-1]))
        else:
            found = np.flatnonzero(is_begin)
        places.append(offset + found)
        offset += len(shard)
        was_end = is_end[-1]
    return np.concatenate(places)


def decode(tokenizer: tiktoken.Encoding | CharTokenizer | HFTokenizer, tokens: list[int]) -> str:
    """Return the text of tokens. Those that the tokenizer does not have are shown as U+FFFD."""
    parts = []
    for is_known, group in groupby(tokens, lambda token: token < tokenizer.n_vocab):
        found = list(group)
        parts.append(tokenizer.decode(found) if is_known else "\ufffd" * len(found))
    return "".join(parts)

"""Text for distillation -> packed blocks of token ids, read lazily; no labels, for the teacher
gives them.

Local jsonl, jsonl.xz, parquet and txt files, or a data set of the Hugging Face hub, streamed. A row
has "text", or "messages", a chat that the teacher's own template turns into text.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from common.fingerprint import fingerprint
from data.documents import Document, TextOf, checked, input_files, plain_text, read_files
from data.tokenizers import END_OF_TEXT, HFTokenizer, load_tokenizer
from hf.hub import import_transformers


def text_of_rows(meta: dict) -> TextOf:
    """What a row holds; chats by the teacher's template, which is read at the first chat."""
    chat: Any = None

    def text_of(row: dict) -> Any:
        nonlocal chat
        if not isinstance(row.get("messages"), list):
            return plain_text(row)
        if chat is None:
            chat = load_chat_tokenizer(meta)
        return chat.apply_chat_template(row["messages"], tokenize=False)

    return text_of


def load_chat_tokenizer(meta: dict) -> Any:
    """transformers' tokenizer of the teacher's folder.

    Raises DataError where there is none, or no template in it.
    """
    if meta.get("tokenizer") == "hf":
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(meta["path"])
        if tokenizer.chat_template:
            return tokenizer
    raise DataError(
        "rows hold chats (messages), and the teacher's tokenizer has no chat template: give text, "
        "or a teacher that was trained on chats"
    )


def hub_documents(dataset: str, split: str, text_of: TextOf) -> Iterator[Document]:
    """Rows of a data set of the hub, streamed. Raises DataError if it cannot be had."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            f"{dataset}: streaming needs datasets: pip install datasets, or give --local=FILES"
        ) from None
    try:
        for row in load_dataset(dataset, split=split, streaming=True):
            yield checked(text_of(row))
    except DataError:
        raise
    except Exception as error:  # whatever its HTTP libraries raise
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DataError(
            f"dataset={dataset}: split {split!r} cannot be had ({what}): check name and network, "
            "or give --local=FILES"
        ) from None


def teacher_tokenizer(meta: dict, n_vocab: int) -> Any:
    """The teacher's tokenizer.

    Raises DataError if it has none, or tokens that the teacher does not know.
    """
    tokenizer = load_tokenizer(meta)
    if tokenizer.n_vocab > n_vocab:
        raise DataError(
            f"the tokenizer has {tokenizer.n_vocab} tokens, the teacher's vocabulary {n_vocab}: "
            "they are not of one model"
        )
    return tokenizer


def blocks(documents: Iterator[Document], tokenizer: Any, length: int) -> Iterator[Tensor]:
    """Token ids (length,), one document after another; tiktoken's end-of-text token goes before
    each.
    """
    start = (
        []
        if isinstance(tokenizer, HFTokenizer) or not hasattr(tokenizer, "encode_single_token")
        else [tokenizer.encode_single_token(END_OF_TEXT)]
    )
    ids: list[int] = []
    problems, useful = Counter[str](), False
    for document in documents:
        if not document.text:
            problems[document.problem] += 1
        else:
            useful = True
            ids += start + tokenizer.encode_ordinary(document.text)
        full = len(ids) // length * length
        yield from torch.tensor(ids[:full], dtype=torch.long).view(-1, length)
        ids = ids[full:]
    if problems and not useful:
        found = ", ".join(f"{count} times {problem}" for problem, count in problems.items())
        raise DataError(
            f'no row with text to distil on ({found}): a row wants "text", or "messages"'
        )


def shuffled(stream: Iterator[Tensor], size: int, seed: int) -> Iterator[Tensor]:
    """`stream` in an order drawn from a buffer of `size` blocks; a function of stream, size and
    seed.
    """
    draw, buffer = random.Random(seed), []
    for block in stream:
        buffer.append(block)
        if len(buffer) >= max(1, size):
            at = draw.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()
    draw.shuffle(buffer)
    yield from buffer


def random_blocks(n_vocab: int, length: int, seed: int) -> Iterator[Tensor]:
    """Any tokens, without end: for the speed of models that have no tokenizer."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(n_vocab, (length,), generator=draw)


def text_fingerprint(held: list[Tensor], lists_of_files: list[str]) -> str:
    """Name a text, for telling runs on different texts apart: its blocks of token ids that are
    `held`, and each file of comma-separated lists. Of a data set of the hub, which has no files
    here, the blocks alone.
    """
    names = [fingerprint("blocks", [ids.flatten().numpy() for ids in held])]
    for path in [path for text in lists_of_files for path in input_files(text)]:
        is_empty = path.stat().st_size == 0  # nothing to map
        data = np.zeros(0, np.uint8) if is_empty else np.memmap(path, np.uint8, mode="r")
        names.append(fingerprint(path.name, [data]))
    return " ".join(names)


def open_stream(config: Any, meta: dict, n_vocab: int, length: int, local: str) -> Iterator[Tensor]:
    """Blocks (length,) of the files `local`, or of the config's data set on the hub where that is
    "".
    """
    if config.dataset == "random" and not local:
        return random_blocks(n_vocab, length, config.seed)
    text_of = text_of_rows(meta)
    files = input_files(local)
    documents = (
        read_files(files, text_of)
        if files
        else hub_documents(config.dataset, config.split, text_of)
    )
    return blocks(documents, teacher_tokenizer(meta, n_vocab), length)

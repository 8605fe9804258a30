"""Read text for distillation as packed blocks of token ids, lazily. The teacher gives the labels.

The text is in local jsonl, jsonl.xz, parquet and txt files, or in a data set of the Hugging Face
hub, which is streamed. A row has "text", or "messages", a chat that the teacher's own template
turns into text.
"""

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from common.fingerprint import fingerprint
from common.hub import import_transformers
from data.documents import Document, TextOf, input_files, plain_text, read_files, read_hub
from data.tokenizers import document_start, load_tokenizer


def text_of_rows(meta: dict) -> TextOf:
    """Return a function from a row to its text.

    Chats become text by the teacher's template, which is read at the first chat.
    """
    chat_tokenizer = cache(partial(load_chat_tokenizer, meta))

    def text_of(row: dict) -> Any:
        if not isinstance(row.get("messages"), list):
            return plain_text(row)
        return chat_tokenizer().apply_chat_template(row["messages"], tokenize=False)

    return text_of


def load_chat_tokenizer(meta: dict) -> Any:
    """Load transformers' tokenizer of the teacher's folder.

    Raises DataError if there is no tokenizer, or no chat template in it.
    """
    if meta.get("tokenizer") == "hf":
        # An exported coupled model has code of its own, which the tokenizer does not need.
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(
            meta["path"], trust_remote_code=False
        )
        if tokenizer.chat_template:
            return tokenizer
    raise DataError(
        "rows hold chats (messages), and the teacher's tokenizer has no chat template: give text, "
        "or a teacher that was trained on chats"
    )


def teacher_tokenizer(meta: dict, n_vocab: int) -> Any:
    """Load the teacher's tokenizer.

    Raises DataError if there is none, or if it has tokens that the teacher does not know.
    """
    tokenizer = load_tokenizer(meta)
    if tokenizer.n_vocab > n_vocab:
        raise DataError(
            f"the tokenizer has {tokenizer.n_vocab} tokens, the teacher's vocabulary {n_vocab}: "
            "they are not of one model"
        )
    return tokenizer


def blocks(
    documents: Iterator[Document], tokenizer: Any, length: int, origin: str
) -> Iterator[Tensor]:
    """Pack documents one after another into blocks of token ids, (length,) each.

    Each begins with what the tokenizer's template adds (BOS); where that is nothing, the
    end-of-text token goes before each. Raises DataError, which names `origin`, if no row has text.
    """
    start = document_start(tokenizer)
    ids: list[int] = []  # of an incomplete block
    problems: Counter[str] = Counter()
    has_text = False
    for document in documents:
        if not document.text:
            problems[document.problem] += 1
        else:
            has_text = True
            ids += start + tokenizer.encode_ordinary(document.text)
        full = len(ids) // length * length
        yield from torch.tensor(ids[:full], dtype=torch.long).view(-1, length)
        ids = ids[full:]
    if problems and not has_text:
        found = ", ".join(f"{count} times {problem}" for problem, count in problems.items())
        raise DataError(
            f'{origin}: no row with text to distil on ({found}): a row needs "text", or "messages"'
        )


def shuffled(stream: Iterator[Tensor], size: int, seed: int) -> Iterator[Tensor]:
    """Yield `stream` in random order, drawn from a buffer of `size` blocks.

    The order is a function of stream, size and seed. A buffer smaller than the text mixes only what
    is near: with 4,096 blocks of a file in the order of its books, a student saw five of nine.
    """
    draw = random.Random(seed)
    buffer: list[Tensor] = []
    for block in stream:
        buffer.append(block)
        if len(buffer) >= max(1, size):
            at = draw.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()
    draw.shuffle(buffer)
    yield from buffer


def random_blocks(n_vocab: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield random tokens without end, to time models that have no tokenizer."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(n_vocab, (length,), generator=draw)


def text_fingerprint(held: list[Tensor], lists_of_files: list[str]) -> str:
    """Name a text, so that runs on different texts can be told apart.

    Args:
        held: blocks of its token ids that are held out; for a data set of the hub, which has no
            files here, they alone name it.
        lists_of_files: lists of files with commas between.
    """
    names = [fingerprint("blocks", [ids.flatten().numpy() for ids in held])]
    for text in lists_of_files:
        for path in input_files(text):
            # An empty file cannot be mapped.
            data = [np.memmap(path, np.uint8, mode="r")] if path.stat().st_size else []
            names.append(fingerprint(path.name, data))
    return " ".join(names)


def open_stream(
    config: Any, meta: dict, n_vocab: int, length: int, local: str, commit: str | None = None
) -> Iterator[Tensor]:
    """Yield blocks (length,) of the files `local`, or of the hub's data set if that is "".

    Args:
        config: a DistillConfig; dataset, split and seed are used.
        meta: names the teacher's tokenizer.
        n_vocab: the teacher's vocabulary.
        commit: of the data set; None for its newest.
    """
    if config.dataset == "random" and not local:
        return random_blocks(n_vocab, length, config.seed)
    text_of = text_of_rows(meta)
    files = input_files(local)
    if files:
        documents = read_files(files, text_of)
    else:
        documents = read_hub(config.dataset, text_of, split=config.split, revision=commit)
    origin = local or config.dataset
    return blocks(documents, teacher_tokenizer(meta, n_vocab), length, origin)

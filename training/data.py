"""From text to blocks of tokens.

Documents are read, split by a hash of their names into training and held-out text, tokenised, laid end to end and cut
into blocks. One document is `BOS text EOS`; a block may hold many. `position_ids` restart at each document, which is
how a model knows where the neighbours end.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from config import ConfigError, PretrainConfig, TextConfig
from sources import Document, is_held_out, read_documents, split_hash

IGNORE = -100  # the label that the loss leaves out
SHARD_CHARACTERS = 8 << 20  # of text that a streamed dataset tokenises and shuffles at a time


# ---- tokenizer ----


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token i < 256 is the byte i; 256, 257, 258 are BOS, EOS and padding.

    It is a BPE without merges over the 256 symbols by which `ByteLevel` writes bytes as text: printable Latin-1
    characters stand for themselves, the other bytes for the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (chr(0x100 + i) for i in itertools.count())
    symbols = {chr(byte) if byte in visible else next(hidden): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "<|eos|>" inside a text is seven bytes, not the end of it
    )


# ---- tokens ----


class PackedTokens:
    """Documents laid end to end, as blocks of `block_size` tokens.

    Neighbouring blocks share a token, the last of one being the first of the next. A block predicts all its tokens but
    the first, so that over all blocks each token is predicted exactly once, save the BOS of each document.
    """

    def __init__(self, documents: Iterable[list[int]], block_size: int, pad: int, isolate: bool = True):
        lengths, pieces = [], []
        for ids in documents:
            pieces.append(np.asarray(ids, dtype=np.int32))
            lengths.append(len(ids))
        self.ids = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
        self.starts = np.cumsum([0, *lengths])[:-1]
        self.block_size, self.pad, self.isolate = block_size, pad, isolate

    def __len__(self) -> int:
        return max(0, -(-(len(self.ids) - 1) // (self.block_size - 1)))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * (self.block_size - 1)
        real = self.ids[begin : begin + self.block_size]
        ids = np.full(self.block_size, self.pad, dtype=np.int64)
        ids[: len(real)] = real
        low, high = np.searchsorted(self.starts, [begin, begin + len(real)])
        starts = self.starts[low:high] - begin

        labels = np.full(self.block_size, IGNORE, dtype=np.int64)
        labels[1 : len(real)] = real[1:]
        labels[starts] = IGNORE  # nothing before a BOS says that it comes
        block = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.isolate:
            origin = np.zeros(self.block_size, dtype=np.int64)
            origin[starts] = starts
            block["position_ids"] = torch.from_numpy(np.arange(self.block_size) - np.maximum.accumulate(origin))
        return block


class BlockStream(IterableDataset):
    """Blocks without end, each epoch in another order; `skip` blocks in is where a resumed run goes on."""

    def __init__(self, shards: Callable[[], Iterable[PackedTokens]], seed: int, skip: int = 0):
        self.shards, self.seed, self.skip = shards, seed, skip

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        skip = self.skip
        for epoch in itertools.count():
            for number, shard in enumerate(self.shards()):
                order = np.random.default_rng([self.seed, epoch, number]).permutation(len(shard))
                for index in order[skip:]:
                    yield shard[index]
                skip = max(0, skip - len(shard))


@dataclass
class Corpus:
    """What a run trains on and what it is measured on."""

    shards: Callable[[], Iterable[PackedTokens]]
    held_out: PackedTokens
    held_out_texts: list[str]
    train_texts: Callable[[], Iterator[str]]
    summary: dict[str, Any]


def load_corpus(config: PretrainConfig, tokenizer: PreTrainedTokenizerBase, progress: bool = True) -> Corpus:
    """Reads, splits and tokenises what the recipe names."""
    pad = pad_token(tokenizer)

    def train_texts() -> Iterator[str]:
        return (d.text for d in read_documents(config.dataset, config) if not is_held_out(d.name, config))

    def pack(texts: Iterable[str]) -> PackedTokens:
        return PackedTokens(tokenize(texts, tokenizer), config.block_size, pad, config.isolate_documents)

    held_out_texts = read_held_out(config, config.streaming)
    if next(train_texts(), None) is None:
        raise ConfigError(
            f"the training split of {config.dataset!r} is empty: lower held_out_fraction, or add documents"
        )

    summary: dict[str, Any] = {
        "dataset": config.dataset,
        "held_out_documents": len(held_out_texts),
        "held_out_bytes": sum(len(text.encode()) for text in held_out_texts),
    }
    if config.streaming:
        shards = lambda: map(pack, group_by_size(train_texts(), SHARD_CHARACTERS))  # noqa: E731
    else:
        texts = list(train_texts())
        with tqdm(
            total=sum(map(len, texts)), desc="tokenise", unit="char", unit_scale=True, disable=not progress
        ) as bar:
            everything = [pack(advance(bar, texts))]
        shards = lambda: everything  # noqa: E731
        summary |= {
            "train_documents": len(texts),
            "train_bytes": sum(len(text.encode()) for text in texts),
            "train_tokens": len(everything[0].ids),
        }
    return Corpus(shards, pack(held_out_texts), held_out_texts, train_texts, summary)


def read_held_out(config: TextConfig, streaming: bool = False, whole: bool = False) -> list[str]:
    """At most `eval_bytes` of the text that nothing is trained on, in the order of the hash; or of all text."""
    source = config.eval_dataset or config.dataset
    candidates = read_documents(source, config)
    if config.eval_dataset is None and not whole:
        candidates = (document for document in candidates if is_held_out(document.name, config))
    if streaming:  # the first that come: the rest may be endless
        candidates = take_bytes(candidates, config.eval_bytes)
    in_hash_order = sorted(candidates, key=lambda document: split_hash(document.name))
    texts = [document.text for document in take_bytes(in_hash_order, config.eval_bytes)]
    if not texts:
        raise ConfigError(
            f"the held-out split of {source!r} is empty: raise held_out_fraction (now {config.held_out_fraction}), or "
            "name other text with eval_dataset"
        )
    return texts


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or EOS in its place; documents end in EOS, so that one must exist."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token, which documents are separated by")
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """BOS, or EOS in its place."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def tokenize(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """`BOS text EOS` of each text; EOS stands in for a BOS that the tokenizer lacks."""
    begin = first_token(tokenizer)
    for batch in group_by_size(texts, 1 << 18):
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, split_special_tokens=True)
        for ids in encoded["input_ids"]:
            yield [begin, *ids, tokenizer.eos_token_id]


def group_by_size(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    total = 0
    for text in texts:
        group.append(text)
        total += len(text)
        if total >= size:
            yield group
            group, total = [], 0
    if group:
        yield group


def take_bytes(documents: Iterable[Document], limit: int) -> Iterator[Document]:
    """Documents until `limit` bytes of UTF-8 are reached; the last one is cut to fit, between characters."""
    for document in documents:
        data = document.text.encode()
        if len(data) >= limit:
            yield Document(document.name, data[:limit].decode("utf-8", "ignore"))
            return
        limit -= len(data)
        yield document


def advance(bar: tqdm, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text
        bar.update(len(text))

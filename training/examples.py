"""From rows to examples: conversations packed into blocks, and classified texts and words.

An example is never cut into two blocks. One that is longer than a block loses its end, and the results
say how many did.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from config import ConfigError, FinetuneConfig
from data import IGNORE, first_token, pad_token
from sources import WHOLE_FILE, Row, column, is_held_out, read_rows


@dataclass
class Example:
    """Tokens, and what is learned at each (IGNORE: nothing), or one label of all."""

    ids: list[int]
    labels: list[int] | int


@dataclass
class Split:
    """The examples of one side of the split, and what became of the rows."""

    examples: list[Example] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"rows": 0, "shortened": 0, "dropped": 0})


def read_splits(config: FinetuneConfig, make: Callable[[str, Row], Example | None]) -> tuple[Split, Split]:
    """Training and held-out examples; `make` turns a row into one, or into None where nothing could be learned.

    Raises:
        ConfigError: a side has no example, or a row is not what the task needs.
    """
    train, held_out = Split(), Split()
    for source in dict.fromkeys((config.dataset, config.eval_dataset or config.dataset)):
        for name, row in read_rows(source, config):
            if WHOLE_FILE in row:
                raise ConfigError(f"dataset {source!r}: {name} is plain text; task {config.task} needs columns")
            is_test = source == config.eval_dataset or is_held_out(name, config)
            add(held_out if is_test else train, make(source, row), config.block_size)
    for side, split in (("training", train), ("held-out", held_out)):
        if not split.examples:
            raise ConfigError(
                f"the {side} split of {config.dataset!r} is empty ({split.counts['rows']} rows, none of them with "
                "anything to learn): change held_out_fraction, raise block_size, or add rows"
            )
    return train, held_out


def add(split: Split, example: Example | None, block_size: int) -> None:
    split.counts["rows"] += 1
    if example is not None and len(example.ids) > block_size:
        split.counts["shortened"] += 1
        example = shortened(example, block_size)
    if example is None:
        split.counts["dropped"] += 1
    else:
        split.examples.append(example)


def shortened(example: Example, size: int) -> Example | None:
    """The first `size` tokens; None if nothing is learned from them."""
    labels = example.labels if isinstance(example.labels, int) else example.labels[:size]
    if not isinstance(labels, int) and all(label == IGNORE for label in labels):
        return None
    return Example(example.ids[:size], labels)


# ---- conversations ----


def chat_maker(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> Callable[[str, Row], Example | None]:
    """Rows with messages go through the chat template; those with a prompt and a completion, both plain text, are put
    one after the other, with EOS at the end."""
    template = tokenizer.chat_template
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read chat_template {config.chat_template}: {error.strerror}") from error
        tokenizer.chat_template = template  # saved with the tokenizer, so that the model is used as it was trained

    def make(source: str, row: Row) -> Example | None:
        if config.messages_column in row:
            if template is None:
                raise ConfigError("the tokenizer has no chat template: give a file with one as chat_template")
            return conversation(source, row[config.messages_column], tokenizer, config.completion_only)
        if config.prompt_column not in row:
            raise ConfigError(
                f"dataset {source!r} has neither a column {config.messages_column!r} nor {config.prompt_column!r}; "
                f"its columns: {', '.join(row)}"
            )
        texts = row[config.prompt_column], column(source, row, config.completion_column)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"dataset {source!r}: prompt and completion must be text; give messages otherwise")
        prompt, completion = (plain_ids(tokenizer, text) for text in texts)
        head, tail = [first_token(tokenizer), *prompt], [*completion, tokenizer.eos_token_id]
        return Example(head + tail, [IGNORE] * len(head) + tail if config.completion_only else [IGNORE, *prompt, *tail])

    return make


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def conversation(
    source: str, messages: Any, tokenizer: PreTrainedTokenizerBase, completion_only: bool
) -> Example | None:
    """What the template makes of the messages; learned are the assistant's words and what ends them, or all."""
    is_chat = isinstance(messages, list) and all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
    )
    if not is_chat or not messages:
        raise ConfigError(f"dataset {source!r}: messages must be a list of {{role, content}}, got {str(messages)[:80]}")
    text = rendered(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    if not completion_only:
        return Example(ids, [IGNORE, *ids[1:]])
    learned = np.zeros(len(text), dtype=bool)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = rendered(tokenizer, messages[:i], add_generation_prompt=True) if i else ""
            through = rendered(tokenizer, messages[: i + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise ConfigError(
                    "the chat template writes the beginning of a conversation otherwise than the whole, so that the "
                    "assistant's words cannot be told: set completion_only: false, or give another chat_template"
                )
            learned[len(before) : len(through)] = True
    labels = [
        token if start < stop and learned[start] else IGNORE
        for token, (start, stop) in zip(ids, encoded["offset_mapping"])
    ]
    labels[0] = IGNORE  # nothing comes before it
    return Example(ids, labels) if any(label != IGNORE for label in labels) else None


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template is a program, and may say no in any way
        raise ConfigError(f"the chat template refuses a conversation: {' '.join(str(error).split())}") from error


class PackedExamples(Sequence):
    """Whole examples side by side in blocks of `block_size` tokens; `position_ids` restart at each, so that none sees
    its neighbours. Examples are taken longest first, each into the fullest block that has room (best fit)."""

    def __init__(self, examples: Sequence[Example], block_size: int, pad: int):
        self.block_size, self.pad, self.examples = block_size, pad, examples
        room: dict[int, list[int]] = {}  # tokens left -> blocks
        self.blocks: list[list[int]] = []
        for index in sorted(range(len(examples)), key=lambda i: -len(examples[i].ids)):
            length = len(examples[index].ids)
            left = min((size for size in room if size >= length), default=None)
            if left is None:
                block, left = len(self.blocks), block_size
                self.blocks.append([])
            else:
                block = room[left].pop()
                if not room[left]:
                    del room[left]
            self.blocks[block].append(index)
            room.setdefault(left - length, []).append(block)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = np.full(self.block_size, self.pad, dtype=np.int64)
        labels = np.full(self.block_size, IGNORE, dtype=np.int64)
        positions = np.zeros(self.block_size, dtype=np.int64)
        at = 0
        for example in (self.examples[i] for i in self.blocks[index]):
            end = at + len(example.ids)
            ids[at:end], labels[at:end], positions[at:end] = example.ids, example.labels, np.arange(end - at)
            at = end
        positions[at:] = np.arange(self.block_size - at)  # padding is a neighbour like any other
        return {
            name: torch.from_numpy(x)
            for name, x in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
        }


# ---- classes ----


class LabelNames:
    """Names of the classes, in the order of their numbers; integers of the data keep their own."""

    def __init__(self, values: Iterable[Any], source: str):
        found = set(values)
        if wrong := [value for value in found if not isinstance(value, int | str) or isinstance(value, bool)]:
            raise ConfigError(f"dataset {source!r}: label {wrong[0]!r} is neither text nor a whole number")
        if found and all(isinstance(value, int) for value in found):
            if min(found) < 0:
                raise ConfigError(f"dataset {source!r}: label {min(found)} is negative; classes are numbered from 0")
            self.names = [str(i) for i in range(max(found) + 1)]
        else:
            self.names = sorted(map(str, found))
        self.numbers = {name: number for number, name in enumerate(self.names)}

    def __call__(self, value: Any) -> int:
        return self.numbers[str(value)]

    def __len__(self) -> int:
        return len(self.names)


def label_names(config: FinetuneConfig) -> LabelNames:
    """All the classes that the rows name, those of both sides."""
    sources = dict.fromkeys((config.dataset, config.eval_dataset or config.dataset))
    of_words = config.task == "token_classification"

    def values() -> Iterator[Any]:
        for source in sources:
            for name, row in read_rows(source, config):
                if WHOLE_FILE in row:
                    raise ConfigError(f"dataset {source!r}: {name} is plain text; task {config.task} needs columns")
                value = column(source, row, config.label_column)
                if isinstance(value, list) != of_words:
                    needed = "a list of labels, one for every word" if of_words else "one label"
                    raise ConfigError(f"dataset {source!r}: column {config.label_column!r} must hold {needed}")
                yield from value if of_words else [value]

    names = LabelNames(values(), config.dataset)
    if len(names) < 2:
        raise ConfigError(
            f"dataset {config.dataset!r}: column {config.label_column!r} has {len(names)} class: need two"
        )
    return names


def sequence_maker(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase, label: LabelNames) -> Callable:
    """`BOS text [EOS pair] EOS`, or without the last EOS where it also stands for padding, as the head looks for it."""
    end = [] if pad_token(tokenizer) == tokenizer.eos_token_id else [tokenizer.eos_token_id]

    def make(source: str, row: Row) -> Example:
        names = [config.text_column] + ([config.text_pair_column] if config.text_pair_column else [])
        texts = [column(source, row, name) for name in names]
        for name, text in zip(names, texts):
            if not isinstance(text, str):
                raise ConfigError(f"dataset {source!r}: column {name!r} holds {type(text).__name__}, not text")
        ids = [first_token(tokenizer)]
        for i, text in enumerate(texts):
            ids += [tokenizer.eos_token_id] * (i > 0) + plain_ids(tokenizer, text)
        return Example(ids + end, label(row[config.label_column]))

    return make


def token_maker(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase, label: LabelNames) -> Callable:
    """`BOS words`, with a space between words; a word's label stands at its last token, where a causal model has read
    all of it."""

    def make(source: str, row: Row) -> Example | None:
        words, labels = column(source, row, config.tokens_column), column(source, row, config.label_column)
        if not isinstance(words, list) or not isinstance(labels, list) or len(words) != len(labels):
            raise ConfigError(
                f"dataset {source!r}: {config.tokens_column!r} and {config.label_column!r} must be lists of one length"
            )
        ids, learned = [first_token(tokenizer)], [IGNORE]
        for i, (word, value) in enumerate(zip(words, labels)):
            pieces = plain_ids(tokenizer, f" {word}" if i else str(word))
            ids += pieces
            learned += [IGNORE] * (len(pieces) - 1) + [label(value)] * bool(pieces)
        return Example(ids, learned) if any(x != IGNORE for x in learned) else None

    return make


def collate(examples: Sequence[Example], pad: int) -> dict[str, torch.Tensor]:
    """Examples of any lengths as one batch, padded on the right."""
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), pad)
    mask = torch.zeros_like(ids)
    of_words = not isinstance(examples[0].labels, int)
    labels = torch.full((len(examples), longest) if of_words else (len(examples),), IGNORE)
    for row, example in enumerate(examples):
        length = len(example.ids)
        ids[row, :length], mask[row, :length] = torch.tensor(example.ids), 1
        if of_words:
            labels[row, :length] = torch.tensor(example.labels)
        else:
            labels[row] = example.labels
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}

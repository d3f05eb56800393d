"""Logits processors that remember what they have read, in place of those that read the whole history at every step."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..cache import STATE_LAYER_TYPES


class IncrementalRepetitionPenalty(LogitsProcessor):
    """transformers' repetition penalty, from a table of the tokens seen: O(B V) a step and not O(B n).

        score = score * penalty  if score < 0 else  score / penalty      for every token of the history

    The first call and its checks are the stock processor's; from then on only new columns of `input_ids` are read.

    Args:
        stock: the processor it stands in for; its `penalty` and `prompt_ignore_length` hold.

    Source: CTRL, arXiv:1909.05858, section 4.1.
    """

    def __init__(self, stock: RepetitionPenaltyLogitsProcessor):
        self.stock = stock
        self.seen: Tensor | None = None  # [B, V + 1]; the last column takes what does not count
        self.length = 0
        ignored = stock.prompt_ignore_length
        self.ignored_until = 0 if ignored is None else int(ignored.max()) if isinstance(ignored, Tensor) else ignored

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.dim() != 2:
            return self.stock(input_ids, scores)
        vocab = scores.shape[1]
        if self.seen is None or input_ids.shape[1] < self.length or self.seen.shape != (len(input_ids), vocab + 1):
            result = self.stock(input_ids, scores)
            self.seen = torch.zeros(len(input_ids), vocab + 1, dtype=torch.bool, device=scores.device)
            self.length = 0
            self._read(input_ids, vocab)
            return result
        self._read(input_ids, vocab)
        penalty = self.stock.penalty
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        return torch.where(self.seen[:, :vocab], penalised, scores)

    def _read(self, input_ids: Tensor, vocab: int) -> None:
        new = input_ids[:, self.length :].clamp(max=vocab)
        if self.length < self.ignored_until:
            places = torch.arange(self.length, input_ids.shape[1], device=new.device)
            ignored = self.stock.prompt_ignore_length
            first = ignored.to(new.device).unsqueeze(1) if isinstance(ignored, Tensor) else ignored
            new = new.masked_fill(places < first, vocab)
        self.seen.scatter_(1, new, True)
        self.length = input_ids.shape[1]


class IncrementalNoRepeatNGram(LogitsProcessor):
    """transformers' ban on repeated n-grams, from an index of those seen: a lookup a step and not a scan.

    The index holds one entry per distinct n-gram of the history, which is what banning it takes.

    Args:
        stock: the processor it stands in for; its `ngram_size` holds.
    """

    def __init__(self, stock: NoRepeatNGramLogitsProcessor):
        self.size = stock.ngram_size
        self.length = 0
        self.followers: list[dict[tuple[int, ...], set[int]]] = []  # per row: n - 1 tokens -> what came after them
        self.tails: list[tuple[int, ...]] = []  # per row: the last n - 1 tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if len(self.tails) != len(input_ids) or input_ids.shape[1] < self.length:
            self.length = 0
            self.followers = [{} for _ in input_ids]
            self.tails = [() for _ in input_ids]
        for row, tokens in enumerate(input_ids[:, self.length :].tolist()):
            self._read(row, tokens)
        self.length = input_ids.shape[1]
        vocab = scores.shape[1]
        banned = [
            (row, token)
            for row, tail in enumerate(self.tails)
            for token in self.followers[row].get(tail, ())
            if token < vocab
        ]
        if not banned:
            return scores
        rows, tokens = torch.tensor(banned, device=scores.device).t()
        return scores.index_put((rows, tokens), scores.new_tensor(-float("inf")))

    def _read(self, row: int, tokens: list[int]) -> None:
        followers, tail, reach = self.followers[row], self.tails[row], self.size - 1
        for token in tokens:
            if len(tail) == reach:
                followers.setdefault(tail, set()).add(token)
            tail = (*tail, token)[-reach:] if reach else ()
        self.tails[row] = tail


class FlatGuidance(LogitsProcessor):
    """transformers' classifier-free guidance without its growing mask, for models whose layers are all linear.

        score = w * (log p(x | prompt) - log p(x | negative prompt)) + log p(x | negative prompt)

    Such a model has counted the padding of the negative prompt in its cache, and needs the mask of the new token only.

    Args:
        stock: the processor it stands in for.

    Source: arXiv:2306.17806, equation 7.
    """

    def __init__(self, stock: UnbatchedClassifierFreeGuidanceLogitsProcessor):
        self.stock = stock
        layer_types = stock.model.config.get_text_config().layer_types
        self.is_flat = stock.unconditional_context["use_cache"] and set(layer_types) <= set(STATE_LAYER_TYPES)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        context = self.stock.unconditional_context
        if self.is_flat and not context["first_pass"]:
            context["attention_mask"] = context["attention_mask"][:, :0]
        return self.stock(input_ids, scores)


INCREMENTAL: dict[type[LogitsProcessor], Callable[[LogitsProcessor], LogitsProcessor]] = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: FlatGuidance,
    RepetitionPenaltyLogitsProcessor: IncrementalRepetitionPenalty,
    NoRepeatNGramLogitsProcessor: IncrementalNoRepeatNGram,
}


def incremental(processor: LogitsProcessor) -> LogitsProcessor:
    """What stands in for a stock processor that would read the whole history at every step; or the processor."""
    return INCREMENTAL.get(type(processor), lambda same: same)(processor)


def incremental_processors(processors: LogitsProcessorList) -> Callable[[Tensor, Tensor], Tensor] | None:
    """One function (input_ids [B, n], scores [B, V]) -> scores that applies the list; `None` for an empty one.

    The stock list looks up every processor's signature at every step; here that is done once.
    """
    if not processors:
        return None
    if type(processors) is not LogitsProcessorList:
        return processors
    if any(len(inspect.signature(processor.__call__).parameters) > 2 for processor in processors):
        return processors  # it says which argument is missing
    steps = [incremental(one) for one in processors]

    def apply(input_ids: Tensor, scores: Tensor) -> Tensor:
        for step in steps:
            scores = step(input_ids, scores)
        return scores

    return apply

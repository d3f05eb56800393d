"""Processors that remember give what those give that read the whole history at every step."""

import pytest
import torch
from helpers import VOCAB, random_ids
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from hf_linattn.generation.processors import IncrementalNoRepeatNGram, IncrementalRepetitionPenalty


@pytest.mark.parametrize("ignored", [None, 4, 12, torch.tensor([0, 4, 11])], ids=["all", "4", "12", "rows"])
def test_incremental_repetition_penalty(ignored):
    stock = RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=ignored)
    ours = IncrementalRepetitionPenalty(RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=ignored))
    ids, scores = random_ids(3, 16, seed=5), torch.randn(16, 3, VOCAB - 4)  # some ids lie beyond the scores
    for length in (7, 8, 9, 12, 16, 10, 11):  # and going back starts over
        assert torch.equal(ours(ids[:, :length], scores[length - 1]), stock(ids[:, :length], scores[length - 1]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_incremental_no_repeat_ngram(size):
    stock = NoRepeatNGramLogitsProcessor(size)
    ours = IncrementalNoRepeatNGram(stock)
    ids, scores = random_ids(3, 40, seed=6) % 5, torch.randn(40, 3, 4)
    for length in (1, 2, 7, 8, 9, 30, 40, 12):
        assert torch.equal(ours(ids[:, :length], scores[length - 1]), stock(ids[:, :length], scores[length - 1]))

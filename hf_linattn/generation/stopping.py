"""Stopping criteria at a constant cost per token."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class Stopping:
    """Which rows go on, as transformers' list of criteria decides it.

    Length and end-of-sequence tokens are decided here, without tensors where the tokens are on the CPU and without
    waiting for the device where only the length counts. Every other criterion is called as it is, with all ids.

    Args:
        criteria: the list that `generate()` prepared.
        batch_size: B.
        device: where the tokens are.
        has_scores: whether the scores of all steps are kept, and so handed to criteria.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch_size: int, device: torch.device, has_scores: bool):
        self.pads_finished = any(hasattr(one, "eos_token_id") for one in criteria)
        self.unfinished = torch.ones(batch_size, dtype=torch.long, device=device)
        self.some_finished = False
        is_stock = type(criteria) is StoppingCriteriaList
        lengths = [one for one in criteria if is_stock and type(one) is MaxLengthCriteria]
        ends = [one for one in criteria if is_stock and type(one) is EosTokenCriteria]
        self.others = criteria
        if is_stock:
            self.others = StoppingCriteriaList([one for one in criteria if one not in lengths and one not in ends])
        self.max_length = min((one.max_length for one in lengths), default=None)
        self.reminders = [one for one in lengths if one.max_position_embeddings is not None]
        self.eos = torch.cat([one.eos_token_id.to(device).flatten() for one in ends]) if ends else None
        self.eos_set = set(self.eos.tolist()) if ends and device.type == "cpu" else None
        self.has_scores = has_scores

    @property
    def reads_ids(self) -> bool:
        """Whether a criterion looks at the ids before the last."""
        return bool(self.others)

    def __call__(self, tokens: Tensor, length: int, input_ids: Tensor | None, scores: list[Tensor] | None) -> bool:
        """Take note of the rows that end with `tokens` [B], the `length`-th column; true when all have ended."""
        if self.reminders and length > min(one.max_position_embeddings for one in self.reminders):
            for one in self.reminders:  # it warns once about a length beyond the trained positions
                one(tokens.new_empty(1, length), None)
            self.reminders = []
        ended = self._ended(tokens, input_ids, scores)
        all_ended = False
        if ended is not None:
            self.unfinished = self.unfinished & ~ended
            self.some_finished = True
            all_ended = not bool(self.unfinished.any())
        return all_ended or (self.max_length is not None and length >= self.max_length)

    def _ended(self, tokens: Tensor, input_ids: Tensor | None, scores: list[Tensor] | None) -> Tensor | None:
        """Rows [B] that ended with this step, other than by length; `None` where it is known that none did."""
        ended = None
        if self.eos_set is not None:
            flags = [token in self.eos_set for token in tokens.tolist()]
            ended = torch.tensor(flags) if any(flags) else None
        elif self.eos is not None:
            ended = torch.isin(tokens, self.eos)
        if self.others:
            more = self.others(input_ids, tuple(scores) if self.has_scores else None)
            ended = more if ended is None else ended | more
        return ended

"""The next token of every row, when each row has settings of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from .processors import incremental

if TYPE_CHECKING:
    from .requests import Request

# Processors that read scores only, each row by itself: rows with equal settings go through them together.
READS_NO_IDS = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.SuppressTokensLogitsProcessor,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
)
FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "suppress_tokens",
)


class Processors:
    """A request's logits processors, split where the last one stands that reads token ids.

    Attributes:
        by_row: those that need the ids of the row, and what stands before them.
        shared: those after it.
        key: equal for requests whose `shared` do the same; `None` without any.
    """

    def __init__(self, processors: LogitsProcessorList, config: GenerationConfig):
        split = max((i + 1 for i, one in enumerate(processors) if type(one) not in READS_NO_IDS), default=0)
        self.by_row: list[LogitsProcessor] = [incremental(one) for one in processors[:split]]
        self.shared: list[LogitsProcessor] = list(processors[split:])
        values = tuple(repr(getattr(config, name, None)) for name in FIELDS)
        self.key = (tuple(type(one) for one in self.shared), values) if self.shared else None


def choose_tokens(requests: Sequence[Request], logits: Tensor) -> tuple[Tensor, list[float | None]]:
    """One new token for each request.

    A request with a generator draws from it what `generate()` of that request alone would draw. One whose processors
    or probabilities fail gets its `error` set, and the others their tokens all the same.

    Args:
        requests: one per row.
        logits: [rows, vocab_size] of any dtype; they are processed in float32, as `generate()` does.

    Returns:
        tokens [rows], int64, on the device of `logits`; the log-probability of each after processing, where asked.
    """
    scores = logits.to(dtype=torch.float32, copy=True)
    for row, request in enumerate(requests):
        if request.processors.by_row:
            _isolate(request, _process_row, request, scores[row : row + 1])
    scores = _process_shared(requests, scores)

    tokens = scores.argmax(-1)
    sampled = [row for row, request in enumerate(requests) if request.do_sample]
    if sampled:
        probabilities = scores.softmax(-1)
        if len(sampled) > 1 and all(requests[row].generator is None for row in sampled):
            try:
                places = torch.tensor(sampled, device=scores.device)
                tokens[places] = torch.multinomial(probabilities[places], num_samples=1).squeeze(1)
                sampled = []
            except RuntimeError:
                pass  # some row has no probabilities to draw from: find it one by one
        for row in sampled:
            _isolate(requests[row], _draw, requests[row], probabilities[row : row + 1], tokens[row : row + 1])

    logprobs: list[float | None] = [None] * len(requests)
    wanted = [row for row, request in enumerate(requests) if request.return_logprobs]
    if wanted:
        chosen = scores.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist()
        for row in wanted:
            logprobs[row] = chosen[row]
    return tokens, logprobs


def _process_row(request: Request, scores: Tensor) -> None:
    ids, result = request.ids(scores.device), scores
    for processor in request.processors.by_row:
        result = processor(ids, result)
    scores.copy_(result)


def _process_shared(requests: Sequence[Request], scores: Tensor) -> Tensor:
    groups: dict[tuple, list[int]] = {}
    for row, request in enumerate(requests):
        if request.processors.key is not None:
            groups.setdefault(request.processors.key, []).append(row)
    for rows in groups.values():
        everything = len(rows) == len(requests)
        places = None if everything else torch.tensor(rows, device=scores.device)
        part = scores if everything else scores[places]
        for processor in requests[rows[0]].processors.shared:
            part = processor(None, part)
        if everything:
            return part
        scores[places] = part
    return scores


def _draw(request: Request, probabilities: Tensor, token: Tensor) -> None:
    token.copy_(torch.multinomial(probabilities, num_samples=1, generator=request.generator).squeeze(1))


def _isolate(request: Request, function, *arguments) -> None:
    """Run `function`; what it raises becomes the error of this request alone."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001  processors may be the user's and raise anything
        request.error = f"{type(error).__name__}: {' '.join(str(error).split())}"

"""Continuous batching: requests join and leave a batch of decoding rows between two steps.

What a request holds is a state of constant size (and keys and values where a model has full attention layers), so that
there are no pages to allot: a row of the batch is a row of mu and nu. A step reads one chunk of waiting prompts, seats
those that are read, and decodes one token of every seated request in one forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from ..cache import LinearAttentionCache
from ..cache.rows import Row, gather_rows
from .requests import Request, make_request
from .sampling import choose_tokens

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedTokenizerBase

SLOTS = 16
PREFILL_CHUNK = 512


class Event(NamedTuple):
    """What happened to a request in a step: one more token, or its end, or both."""

    request_id: str
    token: int | None  # `None` where it failed or was cancelled
    finished: bool
    count: int  # tokens of the request so far; a step may give it two, the first and one more
    request: Request  # everything of it, in `request.tokens`, `request.logprobs`, `request.error`


class _Reading(NamedTuple):
    """Prompts that are being read, as one left-padded batch; several only where one chunk holds them all."""

    requests: list[Request]
    ids: Tensor  # [n, T]
    mask: Tensor | None
    cache: LinearAttentionCache
    prefix_tokens: int


class ContinuousBatch:
    """A batch that requests join and leave while it decodes. Not thread-safe: `BatchManager` is, with one inside.

        batch = ContinuousBatch(model, slots=8)
        batch.submit([5, 3, 8], max_new_tokens=20, do_sample=True, seed=1)
        while batch.has_work:
            for event in batch.step():
                print(event.request_id, event.token, event.finished)

    A request gets the tokens that `generate()` of it alone would give, whoever shares the batch with it; with a `seed`
    also when it samples. A failure inside one request ends that request.

    Args:
        model: a causal model of this package, on its device.
        slots: rows that decode together at most.
        prefill_chunk: tokens of waiting prompts that a step reads at most before it decodes.
        generation_config: settings of requests that bring none; by default the model's.
        tokenizer: for requests with `stop_strings`.

    Raises:
        ValueError: `slots` or `prefill_chunk` below 1.
    """

    def __init__(
        self,
        model: GenerationMixin,
        slots: int = SLOTS,
        prefill_chunk: int = PREFILL_CHUNK,
        generation_config: GenerationConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        for name, value in (("slots", slots), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name}={value}; it must be at least 1")
        self.model, self.slots, self.prefill_chunk = model, slots, prefill_chunk
        self.generation_config, self.tokenizer = generation_config, tokenizer
        self._full_attention = "full_attention" in model.config.get_text_config().layer_types
        self._count = 0
        self._live: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._reading: _Reading | None = None
        self._ready: deque[tuple[Request, Row]] = deque()  # read, with a first token, and without a seat yet
        self._seated: list[Request] = []
        self._cache: LinearAttentionCache | None = None
        self._lengths: list[int] = []  # real tokens that each row has read
        self._tokens: Tensor | None = None  # [rows], what each row reads next; `None` after rows changed
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        """Whether another `step` would do something."""
        return bool(self._live or self._events)

    @property
    def waiting(self) -> int:
        """Requests whose prompt nobody has begun to read."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of the states of the seated rows."""
        return 0 if self._cache is None else self._cache.nbytes

    @property
    def live_ids(self) -> list[str]:
        """The requests that have not ended, as they came in; other samples of a prompt before its first."""
        return list(self._live)

    def submit(
        self,
        ids: Sequence[int] | Tensor,
        generation_config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        seed: int | None = None,
        cache: Cache | None = None,
        **options: Any,
    ) -> str:
        """Line up a request; returns its id.

        Args:
            ids: the prompt, or with a `cache` what comes after the text it has read.
            generation_config: its settings; by default those of the batch.
            request_id: by default `req_0`, `req_1`, ...; other samples of `num_return_sequences` are
                `{request_id}__child#0`, ...
            seed: draws what `torch.manual_seed(seed); model.generate(ids, do_sample=True, ...)` draws; other samples
                have the seeds that follow. Without it tokens come from the default generator.
            cache: a filled cache of one row to continue from; it stays as it is, and many requests may share it.
            options: fields of `GenerationConfig`; or `logits_processor`, `stopping_criteria`, `logprobs` (keep the
                log-probability of every token), `record_timestamps`.

        Raises:
            ValueError: in one line, for an empty prompt, an id out of the vocabulary, no new token allowed, a cache
                that does not fit, an option that needs `generate()`, a request id in use. Nothing else is affected.
        """
        with torch.inference_mode(False), torch.no_grad():
            request = make_request(
                self.model,
                self.new_id() if request_id is None else request_id,
                ids,
                self.generation_config if generation_config is None else generation_config,
                seed=seed,
                cache=cache,
                tokenizer=options.pop("tokenizer", self.tokenizer),
                **options,
            )
        self.enqueue(request)
        return request.request_id

    def new_id(self) -> str:
        """The next of `req_0`, `req_1`, ..."""
        self._count += 1
        return f"req_{self._count - 1}"

    def enqueue(self, request: Request) -> None:
        """Line up a request that `make_request` has built for this model."""
        family = [*request.children, request]
        for one in family:
            if one.request_id in self._live:
                raise ValueError(f"request_id {one.request_id!r} is in use: wait until it has finished")
        self._live |= {one.request_id: one for one in family}
        self._waiting.append(request)

    def cancel(self, request_id: str) -> bool:
        """End a request now, wherever it is; False if there is none of this id. The next step reports its end.

        A request whose prompt has not been read takes its other samples with it.
        """
        request = self._live.get(request_id)
        if request is None:
            return False
        if request in self._waiting:
            self._waiting.remove(request)
        for one in [request, *request.children]:
            if not one.is_finished:
                self._end(one, self._events, "cancelled")
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Event]:
        """Read one chunk of waiting prompts, seat the ones that are read, decode one token of every seated request."""
        events, self._events = self._events, []
        self._read(events)
        self._seat()
        self._decode(events)
        return events

    def _read(self, events: list[Event]) -> None:
        if self._reading is None or all(request.is_finished for request in self._reading.requests):
            self._reading = self._next_reading()
        reading = self._reading
        if reading is None:
            return
        done = reading.cache.get_seq_length() - reading.prefix_tokens
        chunk = min(self.prefill_chunk, reading.requests[0].chunk or self.prefill_chunk)
        part = reading.ids if len(reading.requests) > 1 else reading.ids[:, done : done + chunk]
        try:
            output = self.model(
                part.to(self.model.device),
                attention_mask=reading.mask,
                cache=reading.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        except Exception as error:
            self._fail(reading.requests, error, events)
            self._reading = None
            return
        if done + part.shape[1] < reading.ids.shape[1]:
            return
        self._reading = None
        family, rows = [], []
        for index, request in enumerate(reading.requests):
            row = Row(reading.cache, index, reading.prefix_tokens + len(request.prompt))
            for one in (request, *request.children):
                if not one.is_finished:
                    family.append(one)
                    rows.append(row)
            request.children = []
        places = torch.tensor([row.index for row in rows], device=output.logits.device)
        self._take(family, output.logits[places, -1], events)
        self._ready += [(request, row) for request, row in zip(family, rows) if not request.is_finished]

    def _next_reading(self) -> _Reading | None:
        """The next prompts in line for which there are seats: one, or as many as fit one chunk without much padding."""
        seats = self.slots - len(self._ready) - sum(not request.is_finished for request in self._seated)
        chosen: list[Request] = []
        while self._waiting and len(chosen) < seats:
            sizes = [len(request.prompt) for request in (*chosen, self._waiting[0])]
            area = max(sizes) * len(sizes)
            alone = self._waiting[0].prefix is not None or self._waiting[0].chunk is not None
            if chosen and (alone or area > self.prefill_chunk or area > 2 * sum(sizes)):
                break
            chosen.append(self._waiting.popleft())
            if alone:
                break
        if not chosen:
            return None
        for request in chosen:
            for one in (request, *request.children):
                if not one.is_finished:
                    one.begin()
        length = max(len(request.prompt) for request in chosen)
        padding = [length - len(request.prompt) for request in chosen]
        ids = torch.tensor([[0] * pad + request.prompt for pad, request in zip(padding, chosen)])
        mask = (torch.arange(length) >= torch.tensor(padding).unsqueeze(1)).to(self.model.device)
        prefix, chosen[0].prefix = chosen[0].prefix, None
        cache = LinearAttentionCache(self.model.config.get_text_config()) if prefix is None else prefix
        return _Reading(chosen, ids, mask.long() if any(padding) else None, cache, cache.get_seq_length())

    def _seat(self) -> None:
        """Drop the rows of finished requests and give seats to those that are ready: one gathering for both."""
        kept = [index for index, request in enumerate(self._seated) if not request.is_finished]
        self._ready = deque((request, row) for request, row in self._ready if not request.is_finished)
        new = [self._ready.popleft() for _ in range(min(self.slots - len(kept), len(self._ready)))]
        if len(kept) == len(self._seated) and not new:
            return
        rows = [Row(self._cache, index, self._lengths[index]) for index in kept] + [row for _, row in new]
        self._seated = [self._seated[index] for index in kept] + [request for request, _ in new]
        self._cache = gather_rows(rows) if rows else None
        self._lengths, self._tokens = [row.tokens for row in rows], None

    def _decode(self, events: list[Event]) -> None:
        if not self._seated:
            return
        device, longest = self.model.device, max(self._lengths)
        lengths = torch.tensor(self._lengths, device=device).unsqueeze(1)
        mask = None
        if self._full_attention and min(self._lengths) < longest:
            mask = (torch.arange(longest + 1, device=device) >= longest - lengths).long()
        tokens = self._tokens
        if tokens is None:
            tokens = torch.tensor([request.tokens[-1] for request in self._seated], device=device)
        try:
            output = self.model(
                tokens.unsqueeze(1),
                attention_mask=mask,
                position_ids=lengths,
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        except Exception as error:
            self._fail(self._seated, error, events)  # what the cache holds now is unknown: all its rows go
            return
        self._lengths = [length + 1 for length in self._lengths]
        self._tokens = self._take(self._seated, output.logits[:, -1], events)

    def _take(self, requests: list[Request], logits: Tensor, events: list[Event]) -> Tensor | None:
        """Choose a token [rows] for each request from `logits` [rows, vocab_size], and report them."""
        if not requests:
            return None
        tokens, logprobs = choose_tokens(requests, logits.to(self.model.device))
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs):
            try:
                if request.error is None:
                    request.add(token, logprob, tokens.device)
            except Exception as error:  # a criterion of the user
                request.error = _describe(error)
            if request.error is not None:
                self._end(request, events, request.error)
                continue
            if request.is_finished:
                del self._live[request.request_id]
            events.append(Event(request.request_id, token, request.is_finished, len(request.tokens), request))
        return tokens

    def _fail(self, requests: Sequence[Request], error: Exception, events: list[Event]) -> None:
        for request in requests:
            for one in (request, *request.children):
                if not one.is_finished:
                    self._end(one, events, _describe(error))

    def _end(self, request: Request, events: list[Event], error: str) -> None:
        request.finish(error)
        del self._live[request.request_id]
        events.append(Event(request.request_id, None, True, len(request.tokens), request))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

"""A continuous batch in a thread of its own: requests from any thread, results as they come."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from .batch_options import make_batch
from .batching import Event
from .requests import Request, make_request

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedTokenizerBase

logger = logging.get_logger(__name__)


@dataclass
class ThreadStatus:
    """What `transformers serve` asks of the thread."""

    fatal_error: Exception | None = None


class BatchManager:
    """What transformers' `ContinuousBatchingManager` offers, around a `ContinuousBatch`.

    Made by `model.init_continuous_batching(...)` or `model.continuous_batching_context_manager(...)`. Every method may
    be called from any thread. Results come as `GenerationOutput`: one when a request ends, one a token if it streams.
    An invalid request raises where it is added; one that fails later, or is cancelled, ends with its `error` set.

    Args:
        model: a causal model of this package.
        generation_config: settings of requests that bring none; by default the model's.
        continuous_batching_config: `max_requests_per_batch` (slots), `max_batch_tokens` (prompt tokens read between
            two decoding steps), `max_queue_size`, `return_logprobs` and `seed` (of the first request; those after it
            have the seeds that follow) are used.
        workload_hints: not needed.
        tokenizer: for requests with `stop_strings`.

    Raises:
        ValueError: an option of the config that a batch of states cannot honour; the message says what to do.
    """

    batch_processor = None  # transformers' paged scheduler, of which there is none
    warmed_up = False

    def __init__(
        self,
        model: GenerationMixin,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.model = model
        self.generation_config = generation_config or model.generation_config
        self.continuous_batching_config = continuous_batching_config or ContinuousBatchingConfig()
        self.background_thread_status = ThreadStatus()
        self._tokenizer = tokenizer
        self._batch = make_batch(model, self.generation_config, self.continuous_batching_config, tokenizer)
        self._thread: threading.Thread | None = None
        # everything below is read and written under this condition, which is notified when any of it changes
        self._changed = threading.Condition()
        self._incoming: deque[Request] = deque()
        self._cancelled: deque[str] = deque()
        self._taken: dict[str, Request] = {}  # in the batch or on the way to it
        self._outputs: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[Callable, asyncio.AbstractEventLoop]] = {}
        self._added = 0
        self._stopping = self._hard_stop = self._is_idle = False
        self._pauses: list[int] = []  # the threads that hold a pause

    def warmup(self) -> None:
        """Generate two tokens, so that kernels are compiled before the first request."""
        batch = make_batch(self.model)
        batch.submit([0], max_new_tokens=2, do_sample=False, eos_token_id=-1)
        while batch.has_work:
            batch.step()
        self.warmed_up = True

    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; requests added before wait for it."""
        if self.is_running():
            logger.warning("The manager is running already.")
            return
        self._stopping = self._hard_stop = self._is_idle = False
        self.background_thread_status.fatal_error = None
        self._thread = threading.Thread(target=self._run, name="continuous batching", daemon=True)
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the thread once every request has ended, or with `hard_stop` now, failing those that have not.

        `block` waits for it, `timeout` seconds at most. A stopped manager can be started again; there is nothing to
        keep for a next session.
        """
        if self._thread is None:
            logger.warning("The manager has not been started.")
            return
        if threading.get_ident() in self._pauses:
            raise RuntimeError("stop() inside pause() would wait for itself: leave the pause first")
        began = perf_counter()
        with self._changed:
            self._stopping, self._hard_stop = True, self._hard_stop or hard_stop
            self._changed.notify_all()
        if block:
            self.join(began, timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread to end, `timeout` seconds at most."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning(
                f"The generation thread has not ended {perf_counter() - stop_trigger_time:.1f} s after stop."
            )
        else:
            self._thread = None

    def destroy(self) -> None:
        """Stop, if it runs; safe to call again."""
        if self.is_running():
            self.stop(block=True)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the thread between two steps, so that the model can be used or changed; requests keep their states."""
        with self._changed:
            if not self.is_running():
                raise RuntimeError("nothing to pause: the generation thread is not running")
            self._pauses.append(threading.get_ident())
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle or not self.is_running())
        try:
            yield
        finally:
            with self._changed:
                self._pauses.remove(threading.get_ident())
                self._changed.notify_all()

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **options: Any,
    ) -> str | None:
        """Add a request; returns its id, or `None` (with a warning) where the thread is stopping or has died.

        Args:
            input_ids: the prompt.
            request_id: by default `req_0`, `req_1`, ...
            streaming: hand out a result at every token, not only at the end.
            record_timestamps: note the time of every token.
            options: everything that `ContinuousBatch.submit` takes, such as `temperature`, `seed` or `cache`.

        Raises:
            ValueError: see `ContinuousBatch.submit`.
            queue.Full: `max_queue_size` requests have been waiting for ten seconds.
        """
        with self._changed:
            number, self._added = self._added, self._added + 1
        config = self.continuous_batching_config
        if options.get("seed") is None and config.seed is not None:
            options["seed"] = config.seed + number
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        options = {"logprobs": config.return_logprobs, **options}
        options |= {name: value for name, value in given.items() if value is not None}
        name = f"req_{number}" if request_id is None else request_id
        try:
            with torch.inference_mode(False), torch.no_grad():
                request = make_request(
                    self.model,
                    name,
                    input_ids,
                    options.pop("generation_config", None) or self.generation_config,
                    tokenizer=options.pop("tokenizer", self._tokenizer),
                    streaming=streaming,
                    record_timestamps=record_timestamps,
                    **options,
                )
            is_lined_up = self._line_up(request)
        except (ValueError, queue.Full):
            self._drop_handler(name)
            raise
        if not is_lined_up:
            logger.warning("The generation thread is stopping or has died: the request is dropped.")
            self._drop_handler(name)
            return None
        return name

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str | None]:
        """`add_request` for each of `inputs`; their ids."""
        return [
            self.add_request(
                ids, None, max_new_tokens, streaming=streaming, record_timestamps=record_timestamps, **options
            )
            for ids in inputs
        ]

    def cancel_request(self, request_id: str) -> None:
        """End a request wherever it is; its last result says "cancelled". Nothing happens if there is none."""
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify_all()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest result, of one request or of any; `None` after `timeout` seconds, or if none can come."""

        def find() -> GenerationOutput | None:
            return next((one for one in self._outputs if request_id in (None, one.request_id)), None)

        with self._changed:
            self._changed.wait_for(lambda: find() is not None or not self.is_running(), timeout)
            found = find()
            if found is not None:
                self._outputs.remove(found)
            return found

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the thread has ended and all are handed out."""
        while True:
            result = self.get_result(timeout=0.1)
            if result is not None:
                yield result
            elif not self.is_running():
                return

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Results of one request as they come, until its last one or the thread's end."""
        while True:
            result = self.get_result(request_id, timeout=0.1)
            if result is not None:
                yield result
            if result.is_finished() if result is not None else not self.is_running():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], Any]) -> None:
        """Call `callback` on the running event loop with every result of a request, instead of queueing them.

        Results that came before are handed over first: a request may be added before its handler.
        """
        with self._changed:
            early = [output for output in self._outputs if output.request_id == request_id]
            for output in early:
                self._outputs.remove(output)
            self._handlers[request_id] = (callback, asyncio.get_running_loop())
            for output in early:
                self._hand_out(output)

    def _drop_handler(self, request_id: str) -> None:
        """The request was refused: forget who would have listened, unless another one has this id."""
        with self._changed:
            if request_id not in self._taken:
                self._handlers.pop(request_id, None)

    def _line_up(self, request: Request) -> bool:
        limit = self.continuous_batching_config.max_queue_size
        with self._changed:
            family = [request, *request.children]
            for one in family:
                if one.request_id in self._taken:
                    raise ValueError(f"request_id {one.request_id!r} is in use: wait until it has finished")
            if not self._changed.wait_for(lambda: not limit or self._queued() < limit, timeout=10):
                raise queue.Full(f"max_queue_size={limit} requests are waiting")
            if self._stopping or self.background_thread_status.fatal_error is not None:
                return False
            self._taken |= {one.request_id: one for one in family}
            self._incoming.append(request)
            self._changed.notify_all()
            return True

    def _queued(self) -> int:
        return len(self._incoming) + self._batch.waiting

    def _run(self) -> None:
        try:
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)
            while self._wait_for_work():
                self._deliver(self._batch.step())
        except Exception as error:
            logger.error(f"Error in the generation thread: {error}", exc_info=True)
            self.background_thread_status.fatal_error = error
        finally:
            self._fail_rest()

    def _wait_for_work(self) -> bool:
        """Take what other threads have left; False when it is time to end."""
        with self._changed:
            self._is_idle = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    not self._pauses and (self._incoming or self._cancelled or self._batch.has_work or self._stopping)
                )
            )
            self._is_idle = False
            while self._incoming:
                self._batch.enqueue(self._incoming.popleft())
            while self._cancelled:
                self._batch.cancel(self._cancelled.popleft())
            return not self._hard_stop and (self._batch.has_work or not self._stopping)

    def _deliver(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                if event.finished or event.request.streaming:
                    self._hand_out(event.request.output(None if event.finished else event.count))
            self._changed.notify_all()

    def _hand_out(self, output: GenerationOutput) -> None:
        finished, handler = output.is_finished(), self._handlers.get(output.request_id)
        if finished:
            self._taken.pop(output.request_id, None)
            self._handlers.pop(output.request_id, None)
        if handler is None:
            self._outputs.append(output)
            return
        callback, loop = handler
        try:
            loop.call_soon_threadsafe(callback, output)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._handlers.pop(output.request_id, None)

    def _fail_rest(self) -> None:
        """Nothing will come any more: say so to whoever waits, and let a later start begin with an empty batch."""
        reason = self.background_thread_status.fatal_error or "the manager was stopped before the request ended"
        with self._changed:
            for request in list(self._taken.values()):
                if not request.is_finished:
                    request.finish(str(reason))
                self._hand_out(request.output())
            self._incoming.clear()
            self._cancelled.clear()
            self._batch = make_batch(
                self.model, self.generation_config, self.continuous_batching_config, self._tokenizer
            )
            self._is_idle = True
            self._changed.notify_all()

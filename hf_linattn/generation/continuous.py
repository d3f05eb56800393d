"""transformers' entry points to continuous batching, for models whose generation state is constant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from .batch_options import make_batch
from .manager import BatchManager


class ContinuousBatchingMixin:
    """Continuous batching for causal models, under the names and signatures of transformers' `ContinuousMixin`.

    transformers keeps pages of keys and values; a linear attention layer has a state to keep, which
    `ContinuousBatch` seats and unseats row by row.
    """

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
        tokenizer: Any = None,
    ) -> BatchManager:
        """A manager, to be started; see `BatchManager` for the arguments and errors."""
        return BatchManager(self, generation_config, continuous_batching_config, workload_hints, tokenizer)

    @contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: Any = None,
        tokenizer: Any = None,
    ) -> Iterator[BatchManager]:
        """A manager that runs inside the `with` block, and is stopped after it when every request has ended.

        Args:
            block: wait for its thread to end, `timeout` seconds at most.
            persistent_manager: of no effect: a manager holds nothing worth keeping.
            warmup: generate two tokens first where kernels are compiled, on anything but a CPU.
        """
        manager = self.init_continuous_batching(
            generation_config, continuous_batching_config, workload_hints, tokenizer
        )
        if warmup and self.device.type != "cpu":
            manager.warmup()
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout)

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int] | Tensor],
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Generate for many prompts of any lengths; as rows of the batch finish, waiting prompts take their place.

        Args:
            inputs: prompts, lists of token ids.
            generation_config: settings of all prompts, or a list with those of each; by default the model's.
            continuous_batching_config: `max_requests_per_batch` rows decode together (16), `max_batch_tokens` of
                waiting prompts are read between two steps (512); `return_logprobs`; `seed` of the first prompt, those
                after it have the seeds that follow, so that what is drawn does not depend on the batch.
            record_timestamps: note the time of every token.
            progress_bar: show one.
            persistent_manager, warmup: of no effect: this runs in the calling thread.
            kwargs: what `ContinuousBatch.submit` takes for all prompts: `max_new_tokens`, `temperature`, `cache`, ...

        Returns:
            Results by request id `req_0`, `req_1`, ..., in the order of `inputs`; other samples of
            `num_return_sequences` (`req_0__child#0`, ...) stand before the first of their prompt.

        Raises:
            ValueError: before anything is generated, for an invalid prompt (named by its place) or option.
        """
        config = continuous_batching_config or ContinuousBatchingConfig()
        configs = list(generation_config) if isinstance(generation_config, (list, tuple)) else None
        if configs is not None and len(configs) != len(inputs):
            raise ValueError(f"generation_config has {len(configs)} entries for {len(inputs)} inputs")
        is_paged = kwargs.pop("cache_implementation", None) == "paged"
        prompts = list(inputs)
        if is_paged:
            generation_config, prompts, kwargs = _from_generate(self, generation_config, prompts, kwargs)
        options = {"logprobs": config.return_logprobs, "record_timestamps": record_timestamps, **kwargs}
        options = {name: value for name, value in options.items() if name != "max_new_tokens" or value is not None}
        seed = options.pop("seed", config.seed)

        batch = make_batch(self, None, config, options.pop("tokenizer", None))
        for index, prompt in enumerate(prompts):
            try:
                batch.submit(
                    prompt,
                    generation_config if configs is None else configs[index],
                    request_id=f"req_{index}",
                    seed=None if seed is None else seed + index,
                    **options,
                )
            except ValueError as error:
                raise ValueError(f"inputs[{index}]: {error}") from error
        order = batch.live_ids
        results = {}
        with tqdm(total=len(order), disable=not progress_bar, desc="generate", unit="request") as bar:
            while batch.has_work:
                finished = [event.request for event in batch.step() if event.finished]
                results |= {request.request_id: request.output() for request in finished}
                bar.update(len(finished))
        results = {request_id: results[request_id] for request_id in order}
        return _to_generate(self, generation_config, inputs, results) if is_paged else results


def _from_generate(model, config: GenerationConfig, inputs: list[list[int]], kwargs: dict[str, Any]):
    """What `generate(cache_implementation="paged")` passes on: a resolved config, and all that the caller gave."""
    mask, pad, eos = kwargs.get("attention_mask"), config.pad_token_id, config.eos_token_id
    if mask is not None:
        inputs = [[token for token, real in zip(ids, row) if real] for ids, row in zip(inputs, mask.tolist())]
    elif pad is not None and pad not in ([eos] if isinstance(eos, int) else eos or []):
        inputs = [[token for token in ids if token != pad] for ids in inputs]  # as generate() infers it
    if (config.num_return_sequences or 1) > 1:
        raise ValueError("num_return_sequences > 1 has no place in generate's paged result: use generate_batch()")
    if kwargs.get("max_length") is None and model.generation_config.max_length is None and not config.max_new_tokens:
        if config.max_length == model.generation_config._get_default_generation_params()["max_length"]:
            config.max_length = None  # resolved once more, so that it counts from the end of each prompt
    # what the config has taken up is not an option any more
    rest = {name: value for name, value in kwargs.items() if not hasattr(config, name) and value is not None}
    unknown = sorted(set(rest) - {"attention_mask", "input_ids", "tokenizer"})
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not with cache_implementation='paged'; use generate_batch()")
    return config, inputs, {name: value for name, value in rest.items() if name == "tokenizer"}


def _to_generate(model, config: GenerationConfig, inputs, results: dict[str, GenerationOutput]):
    """Results as `generate` stacks them: prompts as they came in, padding after rows that ended early."""
    longest = max((len(output.generated_tokens) for output in results.values()), default=0)
    pad, eos = config.pad_token_id, config.eos_token_id
    if pad is None:
        pad = eos if isinstance(eos, int) else (eos or [0])[0]
    for prompt, output in zip(inputs, results.values()):
        if output.error is not None:
            raise RuntimeError(f"{output.request_id}: {output.error}")
        output.prompt_ids = list(prompt)
        output.generated_tokens += [pad] * (longest - len(output.generated_tokens))
    return results

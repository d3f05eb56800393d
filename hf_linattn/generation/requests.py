"""One request of a continuous batch: its prompt, its settings, and what it has generated."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from ..cache import LinearAttentionCache
from ..cache.rows import share_prefix
from .columns import Columns
from .sampling import Processors

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedTokenizerBase

# Options of GenerationConfig that need more than one row a request, or outputs of every step: the values that go.
NEUTRAL: dict[str, tuple] = {
    "num_beams": (None, 1),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "guidance_scale": (None, 1),
    "token_healing": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "cache_implementation": (None, "dynamic", "dynamic_full", "paged"),
}


@dataclass(eq=False)
class Request:
    """What a continuous batch knows of a request; `make_request` builds it from what the user gave."""

    request_id: str
    prompt: list[int]
    limit: int  # new tokens at most
    eos_ids: frozenset[int]
    do_sample: bool
    processors: Processors | None  # `None` once finished, as the criteria
    criteria: StoppingCriteriaList | None
    generator: torch.Generator | None = None
    prefix: LinearAttentionCache | None = None
    chunk: int | None = None
    return_logprobs: bool = False
    record_timestamps: bool = False
    streaming: bool = False
    children: list[Request] = field(default_factory=list)

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    error: str | None = None
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    _ids: Columns | None = None

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    def begin(self) -> None:
        """Its turn has come: reading starts."""
        self.status = RequestStatus.PREFILLING
        self.lifespan = (time.perf_counter(), -1)
        for criterion in self.criteria:
            if isinstance(criterion, MaxTimeCriteria):  # waiting is not computing
                criterion.initial_timestamp = time.time()

    def add(self, token: int, logprob: float | None, device: torch.device) -> None:
        """Take one more token, and finish where it is the last."""
        self.status = RequestStatus.DECODING
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.record_timestamps:
            self.timestamps.append(time.perf_counter())
        if token in self.eos_ids or len(self.tokens) >= self.limit:
            self.finish()
        elif self.criteria and bool(self.criteria(self.ids(device), None).all()):
            self.finish()

    def finish(self, error: str | None = None) -> None:
        """Done, or failed with `error`; lets go of everything but the result."""
        self.error = error
        self.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self.lifespan = (self.lifespan[0], time.perf_counter())
        self._ids = self.prefix = self.generator = None
        self.processors = self.criteria = None
        self.children = []

    def ids(self, device: torch.device) -> Tensor:
        """Prompt and tokens [1, n], in a buffer to which only new tokens are written."""
        if self._ids is None:
            self._ids = Columns(torch.tensor([self.prompt], device=device), None)
        for token in self.tokens[self._ids.length - len(self.prompt) :]:
            self._ids.append(token)
        return self._ids.view

    def output(self, count: int | None = None) -> GenerationOutput:
        """What transformers hands out for a request: as it stands, or as it stood at `count` tokens, before its end."""
        at_end = count is None
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt,
            generated_tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            error=self.error if at_end else None,
            status=self.status if at_end else RequestStatus.DECODING,
            created_time=self.created_time,
            lifespan=self.lifespan if at_end else (self.lifespan[0], -1),
            timestamps=self.timestamps[:count] if self.record_timestamps else None,
        )


def make_request(
    model: GenerationMixin,
    request_id: str,
    ids: Sequence[int] | Tensor,
    generation_config: GenerationConfig | None = None,
    *,
    seed: int | None = None,
    cache: Cache | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    logprobs: bool = False,
    record_timestamps: bool = False,
    streaming: bool = False,
    **overrides: Any,
) -> Request:
    """Check what the user gave and resolve it as `generate()` would; see `ContinuousBatch.submit`.

    Raises:
        ValueError: one line that names what is wrong.
    """
    prompt = _check_prompt(ids, model.config.get_text_config().vocab_size)
    try:
        config = _resolve(model, generation_config, prompt, overrides)
        processors = model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=_prompt_for_processors(config, prompt, model.device),
            logits_processor=logits_processor,
            device=model.device,
        )
        criteria = model._get_stopping_criteria(config, stopping_criteria or StoppingCriteriaList(), tokenizer)
    except (ValueError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    eos = config.eos_token_id
    request = Request(
        request_id=request_id,
        prompt=prompt,
        limit=config.max_length - len(prompt),
        eos_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        do_sample=bool(config.do_sample),
        processors=Processors(processors, config),
        # length and end of sequence are counted without a tensor
        criteria=StoppingCriteriaList(
            one for one in criteria if not isinstance(one, (MaxLengthCriteria, EosTokenCriteria))
        ),
        generator=None if seed is None else torch.Generator(model.device).manual_seed(seed),
        prefix=None if cache is None else share_prefix(cache, model.config),
        chunk=config.prefill_chunk_size,
        return_logprobs=logprobs,
        record_timestamps=record_timestamps,
        streaming=streaming,
    )
    for number in range((config.num_return_sequences or 1) - 1):
        child = make_request(
            model,
            f"{request_id}__child#{number}",
            prompt,
            generation_config,
            seed=None if seed is None else seed + 1 + number,
            tokenizer=tokenizer,
            logits_processor=copy.deepcopy(logits_processor),
            stopping_criteria=copy.deepcopy(stopping_criteria),
            logprobs=logprobs,
            record_timestamps=record_timestamps,
            streaming=streaming,
            **{**overrides, "num_return_sequences": 1},
        )
        request.children.append(child)
    return request


def _check_prompt(ids: Sequence[int] | Tensor, vocab_size: int) -> list[int]:
    """The prompt as a list of ids, each in [0, vocab_size)."""
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.dim() not in (1, 2) or (ids.dim() == 2 and ids.shape[0] != 1):
            raise ValueError(f"a prompt is a list of ids or a tensor [T] or [1, T] of them, got {list(ids.shape)}")
        ids = ids.flatten().tolist()
    prompt = list(ids)
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token id")
    for token in prompt:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ValueError(f"a prompt is a list of ids, got {type(token).__name__} in it")
        if not 0 <= token < vocab_size:
            raise ValueError(f"the prompt holds {token}; ids must be in [0, vocab_size) = [0, {vocab_size})")
    return prompt


def _resolve(model, given: GenerationConfig | None, prompt: list[int], overrides: dict[str, Any]) -> GenerationConfig:
    """The settings that `generate()` would use, with lengths and special tokens prepared."""
    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    unknown = config.update(**overrides)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no option of GenerationConfig or of a request")
    default_max = config.max_length is None and model.generation_config.max_length is None
    default_min = config.min_length is None and model.generation_config.min_length is None
    config, _ = model._prepare_generation_config(config)
    if config.max_new_tokens is not None:
        default_max = True  # it takes precedence without a warning a request
    for name, allowed in NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in allowed:
            raise ValueError(f"{name}={value!r} does not go with continuous batching: use generate(), or leave it out")
    if isinstance(config.eos_token_id, int) and config.eos_token_id < 0:
        config.eos_token_id = None  # transformers' word for no end in continuous batching
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=model.device, batch_size=1)
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=default_max,
        has_default_min_length=default_min,
        model_input_name="input_ids",
        input_ids_length=len(prompt),
        inputs_tensor=None,
    )
    if config.max_length <= len(prompt):
        raise ValueError(f"max_length={config.max_length} leaves no new token for a prompt of {len(prompt)}")
    return config


def _prompt_for_processors(config: GenerationConfig, prompt: list[int], device: torch.device) -> Tensor | None:
    """The prompt as a tensor, for the processors that compare with it."""
    penalty, size = config.encoder_repetition_penalty, config.encoder_no_repeat_ngram_size
    return torch.tensor([prompt], device=device) if penalty not in (None, 1.0) or size else None

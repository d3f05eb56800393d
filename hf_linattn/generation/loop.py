"""The sampling loop of `generate()`, at a cost per token that does not depend on how many came before.

The stock loop copies the ids, the positions and the mask to append one token, adds to tuples of scores, and has
processors read the whole history again: all of it grows with length. Here ids live in a buffer, of which processors see
a view; positions and tokens of a step are tensors of one column; scores are lists; a mask is only kept where layers
with keys need it. Tokens, scores and random numbers are those of the stock loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache import STATE_LAYER_TYPES
from .assisted import AssistedDecodingMixin
from .columns import Columns
from .processors import incremental_processors
from .stopping import Stopping


class StepInputs:
    """What the model is called with at each step: constant but for the token, its position and, for keys, the mask."""

    def __init__(self, model: GenerationMixin, model_kwargs: dict[str, Any], most: int | None):
        self.model = model
        cache = model_kwargs["cache"]
        position_ids = model_kwargs.get("position_ids")
        mask = model_kwargs.get("attention_mask")
        is_hybrid = any(kind not in STATE_LAYER_TYPES for kind in model.config.get_text_config().layer_types)
        # a linear layer needs the mask of new tokens only, and those are real
        self.mask = Columns(mask, most) if mask is not None and is_hybrid else None
        self.position = None if position_ids is None else position_ids[..., -1:]
        self.makes_masks = is_hybrid and cache.is_compileable
        own = ("attention_mask", "position_ids", "inputs_embeds", "labels", "next_sequence_length")
        self.constant = {key: value for key, value in model_kwargs.items() if key not in own}

    def __call__(self, tokens: Tensor) -> dict[str, Any]:
        """Arguments to read `tokens` [B], the ids chosen last."""
        inputs = {"input_ids": tokens.unsqueeze(1), **self.constant}
        if self.position is not None:
            self.position = self.position + 1
            inputs["position_ids"] = self.position
        if self.mask is not None:
            self.mask.append(1)
            inputs["attention_mask"] = self.mask.view
        if self.makes_masks:
            # key/value layers at fixed addresses: transformers prepares their mask outside of the compiled call
            inputs = self.model.prepare_inputs_for_generation(inputs.pop("input_ids"), next_sequence_length=1, **inputs)
            if isinstance(inputs.get("attention_mask"), dict):
                for kind in STATE_LAYER_TYPES:
                    inputs["attention_mask"].pop(kind, None)
        elif tokens.device != self.model.device:
            moved = {key: inputs[key].to(self.model.device) for key in _STEP_TENSORS & inputs.keys()}
            inputs.update(moved)
        return inputs


_STEP_TENSORS = {"input_ids", "position_ids", "attention_mask"}


def why_stock_loop(model: GenerationMixin, model_kwargs: dict[str, Any]) -> str | None:
    """Why this generation goes through transformers' own loop, or `None` if it need not."""
    if model_kwargs.get("cache") is None or model_kwargs.get("use_cache") is False:
        return "there is no cache, so every step reads the whole history"
    if model.config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    for hook in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        known = [vars(cls).get(hook) for cls in (GenerationMixin, AssistedDecodingMixin)]
        if getattr(getattr(model, hook), "__func__", hook) not in known:
            return f"{hook} is overridden and may need the whole history"
    for name in ("token_type_ids", "mm_token_type_ids"):
        if model_kwargs.get(name) is not None:
            return f"{name} grow with the sequence"
    return None


def sample(
    model: GenerationMixin,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Greedy search or multinomial sampling after `input_ids` [B, P]; what `GenerationMixin._sample` is asked for.

    A streamer with a method `put_step(tokens [B], scores [B, V])` is handed the scores of each step as well.

    Returns:
        ids [B, n], or with `return_dict_in_generate` the stock output with the scores, logits, attentions and hidden
        states that the config asks for.
    """
    wants = _Wanted(generation_config)
    process = incremental_processors(logits_processor)
    stopping = Stopping(stopping_criteria, len(input_ids), input_ids.device, wants.scores is not None)
    pad = generation_config._pad_token_tensor
    pad = None if pad is None else pad.to(input_ids.device)
    most = stopping.max_length
    put_step = getattr(streamer, "put_step", None)
    # a compiled call writes its next logits to the same place: what others keep is a copy
    hands_out = put_step is not None or wants.scores is not None or wants.logits is not None
    forward = (
        model.get_compiled_call(generation_config.compile_config)
        if model._valid_auto_compile_criteria(model_kwargs, generation_config)
        else model.__call__
    )

    outputs = model._prefill(
        input_ids, generation_config, model_kwargs, is_first_iteration=not generation_config.is_assistant
    )
    if outputs.get("cache") is not None:
        model_kwargs["cache"] = outputs["cache"]
    step_inputs = StepInputs(model, model_kwargs, most)
    ids = Columns(input_ids, most)
    finished = False
    tokens = None
    with model._optimize_model_for_decode():
        while model._has_unfinished_sequences(finished, synced_gpus, device=input_ids.device):
            if outputs is None:
                outputs = forward(**step_inputs(tokens), return_dict=True)
            if finished:  # other processes go on, and need this one in their collective calls
                outputs = None
                continue
            logits = outputs.logits[:, -1].to(
                copy=hands_out or tokens is None, dtype=torch.float32, device=input_ids.device
            )
            scores = logits if process is None else process(ids.view, logits)
            wants.keep(scores, logits, outputs)
            outputs = None  # with the copy above this lets go of the logits of the whole prompt

            if generation_config.do_sample:
                tokens = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
            else:
                tokens = torch.argmax(scores, dim=-1)
            if stopping.some_finished and stopping.pads_finished:
                tokens = tokens * stopping.unfinished + pad * (1 - stopping.unfinished)
            ids.append(tokens)
            finished = stopping(tokens, ids.length, ids.view if stopping.reads_ids else None, wants.scores)
            if put_step is not None:
                put_step(tokens, scores)
            elif streamer is not None:
                streamer.put(tokens.cpu())
    if streamer is not None:
        streamer.end()
    return wants.result(ids.take(), model_kwargs.get("cache"))


class _Wanted:
    """The tensors of every step that the config asks for, in lists until the end."""

    def __init__(self, config: GenerationConfig):
        self.returns_dict = config.return_dict_in_generate

        def asked(flag: bool | None) -> list | None:
            return [] if self.returns_dict and flag else None

        self.scores: list[Tensor] | None = asked(config.output_scores)
        self.logits: list[Tensor] | None = asked(config.output_logits)
        self.attentions: list[tuple] | None = asked(config.output_attentions)
        self.hidden_states: list[tuple] | None = asked(config.output_hidden_states)

    def keep(self, scores: Tensor, logits: Tensor, outputs: Any) -> None:
        for kept, value in (
            (self.scores, scores),
            (self.logits, logits),
            (self.attentions, outputs.get("attentions")),
            (self.hidden_states, outputs.get("hidden_states")),
        ):
            if kept is not None:
                kept.append(value)

    def result(self, sequences: Tensor, cache: Cache | None) -> GenerateDecoderOnlyOutput | Tensor:
        if not self.returns_dict:
            return sequences
        lists = (self.scores, self.logits, self.attentions, self.hidden_states)
        scores, logits, attentions, hidden_states = (None if kept is None else tuple(kept) for kept in lists)
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=scores,
            logits=logits,
            attentions=attentions,
            hidden_states=hidden_states,
            cache=cache,
        )

"""Every way of calling generate(), each with what it must equal; `generation/test_mode_table.py` runs them all."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import decoders
import torch
from helpers import make_llama, make_model, merging_tokenizer, random_ids, tokenizer_of
from torch import Tensor
from transformers import (
    CompileConfig,
    DynamicCache,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import StoppingCriteriaList, TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer

NEW = 4
Result = tuple[Tensor, list[Tensor] | None]  # tokens, and what they were chosen by
Run = Callable[[Any, Tensor, Tensor], Result]


@dataclass
class Mode:
    """A way of calling generate().

    options: what is passed; or a function of the model that makes it.
    reference: what makes the same call without a cache; by default `use_cache=False`.
    run, expected: in place of a plain call of generate().
    single: one row at a time, as transformers has it.
    because: where the result is not exact though a Llama's is, or differs for both: why, in a few words.
    llama: what a Llama does, where that is too slow to try here.
    """

    name: str
    options: dict | Callable[[Any], dict] = field(default_factory=dict)
    reference: dict | None = None
    run: Run | None = None
    expected: Run | None = None
    single: bool = False
    eager: bool = False
    because: str = ""
    llama: str | None = None

    def actual(self, model, ids, mask) -> Result:
        if self.run is not None:
            return self.run(model, ids, mask)
        return generate(model, ids, mask, **self._options(model))

    def wanted(self, model, ids, mask) -> Result:
        if self.expected is not None:
            return self.expected(model, ids, mask)
        return generate(model, ids, mask, **(self._options(model) if self.reference is None else self.reference), **OFF)

    def _options(self, model) -> dict:
        return self.options(model) if callable(self.options) else self.options


OFF = {"use_cache": False}


def generate(model, ids, mask, tokens_only=False, **options) -> Result:
    """Tokens, scores and logits; the same random numbers at every call."""
    torch.manual_seed(0)
    defaults = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask}
    if "custom_generate" in options:
        return model.generate(ids, **{**defaults, **options})
    outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    out = model.generate(ids, **{**defaults, **outputs, **options})
    if tokens_only:
        return out.sequences, None
    extra = [out.sequences_scores] if "sequences_scores" in out else []
    return out.sequences, [*out.scores, *out.logits, *extra]


def sampled(**options) -> dict:
    return {"do_sample": True, **options}


def tokens(options) -> dict | Callable:
    """The same options for more tokens, which alone are compared."""
    return (lambda model: {**options(model), **LONGER}) if callable(options) else {**options, **LONGER}


LONGER = {"tokens_only": True, "max_new_tokens": 12}  # so that a draft is accepted now and then
ENDS = {"eos_token_id": list(range(1, 15)), "pad_token_id": 0}  # half of the tokens end a row

PROCESSORS = [
    Mode("greedy"),
    Mode("sampling", sampled()),
    Mode("temperature", sampled(temperature=1.3)),
    Mode("`top_k`", sampled(top_k=5)),
    Mode("`top_p`", sampled(top_p=0.8)),
    Mode("`min_p`", sampled(min_p=0.05)),
    Mode("`typical_p`", sampled(typical_p=0.7)),
    Mode("`epsilon_cutoff`", sampled(epsilon_cutoff=0.02)),
    Mode("`eta_cutoff`", sampled(eta_cutoff=0.02)),
    Mode("`top_h`", sampled(top_h=0.5)),
    Mode("`repetition_penalty`", {"repetition_penalty": 1.7}),
    Mode("`encoder_repetition_penalty`", {"encoder_repetition_penalty": 1.7}),
    Mode("`no_repeat_ngram_size`", {"no_repeat_ngram_size": 2}),
    Mode("`encoder_no_repeat_ngram_size`", {"encoder_no_repeat_ngram_size": 2}),
    Mode("`bad_words_ids`", {"bad_words_ids": [[3], [18], [4, 5]]}),
    Mode("`sequence_bias`", {"sequence_bias": [[[3], 4.0], [[4, 5], -9.0]]}),
    Mode("`suppress_tokens`", {"suppress_tokens": [1, 2, 3, 18]}),
    Mode("`begin_suppress_tokens`", {"begin_suppress_tokens": [1, 18, 24]}),
    Mode("`forced_eos_token_id`", {"forced_eos_token_id": 5}),
    Mode("`eos_token_id`", ENDS),
    Mode("`min_length`", {**ENDS, "min_length": 10}),
    Mode("`min_new_tokens`", {**ENDS, "min_new_tokens": 3}),
    Mode("`exponential_decay_length_penalty`", {**ENDS, "exponential_decay_length_penalty": (2, 1.5)}),
    Mode("`prefix_allowed_tokens_fn`", {"prefix_allowed_tokens_fn": lambda row, ids: list(range(1 + row, 15))}),
    Mode(
        "`stop_strings`",
        lambda model: {"stop_strings": ["r", "x", "e"], "tokenizer": tokenizer_of(), "pad_token_id": 0},
    ),
    Mode("`max_time`", {"max_time": 600.0}),
    Mode("`guidance_scale`", {"guidance_scale": 1.7}),
    Mode("`guidance_scale` with a negative prompt", lambda model: {"guidance_scale": 1.7, **NEGATIVE}),
    Mode("`watermarking_config` (green list)", sampled(watermarking_config=WatermarkingConfig(bias=3.0))),
    Mode("`watermarking_config` (SynthID)", lambda model: sampled(watermarking_config=synth_id())),
    Mode("`renormalize_logits`", sampled(renormalize_logits=True, top_k=5)),
    Mode("`remove_invalid_values`", {"remove_invalid_values": True}),
    Mode("a processor of your own", {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])}),
    Mode("a stopping criterion of your own", {"stopping_criteria": StoppingCriteriaList([lambda ids, _: done(ids)])}),
    Mode("`num_return_sequences`", sampled(num_return_sequences=3)),
]
STOPS = {"stop_strings": ["r", "x", "e"], "pad_token_id": 0}
NEGATIVE = {
    "negative_prompt_ids": random_ids(2, 4, seed=8),
    "negative_prompt_attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
}


def synth_id():
    return SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 7, 11], sampling_table_size=64)


def done(ids):
    return torch.full((len(ids),), ids.shape[1] >= 10)


BEAMS = [
    Mode("beam search", {"num_beams": 3}),
    Mode("beam search with several returns", {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5}),
    Mode("beam search with `early_stopping`", {"num_beams": 3, **ENDS, "eos_token_id": [3, 5], "early_stopping": True}),
    Mode("beam sampling", sampled(num_beams=3)),
]


def custom(function, **options) -> dict:
    return {"custom_generate": function, **options}


MOVED = "moved to a hub repository"
CUSTOM = [
    Mode("`custom_generate` with a callable", custom(decoders.greedy_loop, repetition_penalty=1.7)),
    Mode("contrastive search†", custom(decoders.contrastive_search)),
    Mode(
        "contrastive search†, one candidate at a time",
        custom(decoders.contrastive_search, one_by_one=True),
        custom(decoders.contrastive_search),
    ),
    Mode("DoLa†", custom(decoders.dola)),
    Mode("diverse group beams†", custom(decoders.group_beams, num_beams=4)),
    Mode("constrained beams†", custom(decoders.constrained_beams, num_beams=6)),
    Mode("`penalty_alpha`", {"penalty_alpha": 0.6, "top_k": 4}, because=MOVED),
    Mode("`dola_layers`", {"dola_layers": "low"}, because=MOVED),
    Mode("`num_beam_groups`", {"num_beams": 4, "num_beam_groups": 2}, because=MOVED),
    Mode("`force_words_ids`", {"num_beams": 4, "force_words_ids": [[3]]}, because=MOVED),
]


def universal(model) -> dict:
    """A draft model with another tokenizer; fresh every time, as sampling prunes its head in place."""
    assistant = make_model("conv", vocab_size=len(merging_tokenizer()))
    return {"assistant_model": assistant, "tokenizer": tokenizer_of(), "assistant_tokenizer": merging_tokenizer()}


def assisted(name, options, reference=None, **fields) -> Mode:
    return Mode(name, tokens(options), reference or LONGER, single=True, **fields)


def drafting_for_llama(model, ids, mask) -> Result:
    return generate(make_llama(), ids, mask, assistant_model=copy.deepcopy(model).float(), **LONGER)


ONE_BEST = sampled(top_k=1)  # so that speculative sampling must give the greedy tokens
ASSISTED = [
    assisted("`prompt_lookup_num_tokens`", {"prompt_lookup_num_tokens": 3}),
    assisted("`assistant_model`, linear", lambda model: {"assistant_model": make_model("conv", num_hidden_layers=1)}),
    assisted("`assistant_model`, a Llama", lambda model: {"assistant_model": make_llama()}),
    assisted("`assistant_model` with sampling", lambda model: {"assistant_model": make_llama(), **ONE_BEST}),
    Mode(
        "as the assistant_model of a Llama",
        run=drafting_for_llama,
        expected=lambda model, ids, mask: generate(make_llama(), ids, mask, **LONGER, **OFF),
        single=True,
    ),
    assisted("`assistant_tokenizer` (universal)", universal),
    assisted("`assistant_tokenizer` with sampling", lambda model: {**universal(model), **ONE_BEST}),
    assisted("`assistant_early_exit`", {"assistant_early_exit": 1}),
    assisted("prompt lookup in a static cache", {"prompt_lookup_num_tokens": 3, "cache_implementation": "static"}),
    assisted("`use_mtp`", {"use_mtp": True}, because="needs trained MTP layers"),
]


def compiled() -> dict:
    config = CompileConfig(backend="eager", fullgraph=True)
    config._compile_all_devices = True  # as on a GPU
    return {"cache_implementation": "static", "compile_config": config}


def paged(model, ids, mask) -> Result:
    """Continuous batching, under the name by which transformers knows it; it stacks its rows once more."""
    options = {"cache_implementation": "paged", "max_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, attention_mask=mask, **options)[0], None


def without_cache(model, ids, mask) -> Result:
    return generate(model, ids, mask, tokens_only=True, **OFF)


GPU, NO_KEYS = "needs a GPU", "quantises keys and values; a state has none"
CACHES = [
    Mode('`cache_implementation="dynamic"`', {"cache_implementation": "dynamic"}, {}),
    Mode('`cache_implementation="static"`', {"cache_implementation": "static"}, {}),
    Mode('`cache_implementation="static"`, compiled', lambda model: compiled(), {}, llama="works"),
    Mode('`cache_implementation="sliding_window"`', {"cache_implementation": "sliding_window"}, {}),
    Mode('`cache_implementation="hybrid"`', {"cache_implementation": "hybrid"}, {}),
    Mode('`cache_implementation="offloaded"`', {"cache_implementation": "offloaded"}, {}, because=GPU),
    Mode('`cache_implementation="offloaded_static"`', {"cache_implementation": "offloaded_static"}, {}, because=GPU),
    Mode(
        '`cache_implementation="quantized"`',
        {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
        {},
        because=NO_KEYS,
    ),
    Mode('`cache_implementation="paged"`, `generate_batch`', run=paged, expected=without_cache, llama="works"),
    Mode("`prefill_chunk_size`", {"prefill_chunk_size": 3}, {}),
    Mode("`use_cache=False`", {"use_cache": False}, {}),
]


def embedded(model, ids, mask) -> Result:
    got = generate(model, None, mask, inputs_embeds=model.get_input_embeddings()(ids))
    return torch.cat([ids, got[0]], 1), got[1]


class Collector(BaseStreamer):
    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value if value.dim() == 2 else value[:, None])

    def end(self):
        pass


def streamed(model, ids, mask) -> Result:
    streamer = Collector()
    generate(model, ids, mask, streamer=streamer)
    return torch.cat(streamer.parts, 1), None


def continued(only_new=False, repeats=1, **options) -> Run:
    """A cache filled with the first four tokens, then generate()."""

    def run(model, ids, mask) -> Result:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :4], attention_mask=mask[:, :4], cache=cache, use_cache=True)
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
        out, scores = generate(model, ids[:, 4:] if only_new else ids, mask, cache=cache, **options)
        return (torch.cat([ids[:, :4], out], 1) if only_new else out), scores

    return run


def traced(model, ids, mask, **options) -> Any:
    torch.manual_seed(0)
    options = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True, **options}
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)


def hidden(**options) -> Run:
    def run(model, ids, mask) -> Result:
        out = traced(model, ids, mask, **options)
        return out.sequences, [layer[:, -1] for step in out.hidden_states for layer in step]

    return run


def attentions(**options) -> Run:
    def run(model, ids, mask) -> Result:
        out = traced(model, ids, mask, **options)
        return out.sequences, [layer[:, :, -1] for step in out.attentions for layer in step]

    return run


def healing(model) -> dict:
    tokenizer = tokenizer_of(bos_token="<pad>")
    return {"token_healing": True, "tokenizer": tokenizer, "tokens_only": True}


BEAMS_3 = {"num_beams": 3}
INPUTS = [
    Mode("`inputs_embeds`", run=embedded),
    Mode("`streamer`", run=streamed, expected=without_cache),
    Mode("going on from a filled cache", run=continued()),
    Mode("going on by new tokens only", run=continued(only_new=True)),
    Mode("going on with beams", BEAMS_3, run=continued(repeats=3, **BEAMS_3)),
    Mode(
        "going on with prompt lookup",
        run=continued(prompt_lookup_num_tokens=3, **LONGER),
        expected=lambda model, ids, mask: generate(model, ids, mask, **LONGER, **OFF),
        single=True,
    ),
    Mode("`token_healing`", healing),
    Mode("`output_hidden_states`", run=hidden(), expected=hidden(**OFF), eager=True),
    Mode(
        "`output_attentions`",
        run=attentions(),
        expected=attentions(**OFF),
        eager=True,
        because="weights over the tokens of the call: a state has no keys",
    ),
]

MODES = [*PROCESSORS, *BEAMS, *CUSTOM, *ASSISTED, *CACHES, *INPUTS]

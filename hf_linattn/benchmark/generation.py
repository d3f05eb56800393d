"""What a generated token costs: at the millionth place against the thousandth, over the bare model, and in memory.

    python -m hf_linattn.benchmark.generation --model runs/demo --out generation.json

Everything that is compared runs in one process and takes turns; each round gives a ratio, and the median of the ratios
is reported. Times are those between two tokens of `generate()`, so that what happens once a call does not count. The
measurements of memory and of the loop's own cost use a small model, which hides less of them.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel, set_seed
from transformers.generation.streamers import BaseStreamer

from ..cache import LinearAttentionCache
from ..models import LinAttnConfig
from .record import read_json, record, write_json
from .timing import synchronize

PADDING = 5  # tokens in front of a padded row
SETTLING = 3  # tokens of a call that are not counted
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
BOUNDS = {  # what the package promises
    "batch 1": 1.15,
    "batch 8": 1.25,
    "batch 1, padded": 1.15,
    "batch 8, padded": 1.25,
    "repetition penalty": 1.5,
    "loop": 0.5,
    "memory": 16 * 2**20,
    "prefill": 1.1,
    "prompt lookup": 1.5,
}


class Clock(BaseStreamer):
    """Notes the time at every token."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def median_us(self) -> float:
        """Median microseconds from one token to the next."""
        times = self.times[1 + SETTLING :]
        return statistics.median(b - a for a, b in zip(times, times[1:])) * 1e6


def read_prompt(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, chunk: int, progress: Callable[..., Any] = tqdm
) -> tuple[LinearAttentionCache, list[float], list[int]]:
    """The cache after all of `ids` but the last token, seconds of every chunk, and resident bytes after each."""
    cache, seconds, resident = LinearAttentionCache(model.config), [], []
    process = psutil.Process()
    for start in progress(range(0, ids.shape[1] - 1, chunk), "read"):
        stop = min(start + chunk, ids.shape[1] - 1)
        synchronize(model.device)
        begin = time.perf_counter()
        model(
            ids[:, start:stop],
            attention_mask=None if mask is None else mask[:, :stop],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        synchronize(model.device)
        seconds.append(time.perf_counter() - begin)
        resident.append(process.memory_info().rss)
    return cache, seconds, resident


def continue_from(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache, tokens: int, **options) -> float:
    """Median microseconds a token of a generation that goes on from a filled cache (a copy of it)."""
    clock, rows = Clock(), ids.shape[0]
    cache = copy.deepcopy(cache)
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    model.generate(
        ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=clock,
        **options,
    )
    return clock.median_us


def by_position(
    model: PreTrainedModel, near: int, far: int, chunk: int, rounds: int, tokens: int, seed: int
) -> dict[str, Any]:
    """Microseconds a token after `far` tokens against those after `near`; and what reading `far` tokens took."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (1, far), generator=generator).to(model.device)
    padded = torch.ones_like(ids)
    padded[:, :PADDING] = 0
    prefill, caches = None, {}
    for name, mask in (("", None), (", padded", padded)):
        caches[near, name] = read_prompt(model, ids[:, :near], None if mask is None else mask[:, :near], chunk)[0]
        caches[far, name], seconds, resident = read_prompt(model, ids, mask, chunk)
        prefill = prefill or summarise_prefill(seconds, resident, far, chunk)
    cases = [(f"batch {rows}{name}", rows, name, {}) for name in ("", ", padded") for rows in (1, 8)]
    cases.append(("repetition penalty", 1, "", {"repetition_penalty": 1.1}))
    results = {}
    for case, rows, name, options in tqdm(cases, "positions"):
        samples: dict[int, list[float]] = {near: [], far: []}
        for turn in range(rounds + 1):
            for length in (near, far) if turn % 2 else (far, near):
                mask = padded[:, :length].expand(rows, -1) if name else None
                history = ids[:, :length].expand(rows, -1)
                value = continue_from(model, history, mask, caches[length, name], tokens, **options)
                if turn > 0:
                    samples[length].append(value)
        results[case] = {
            "near_us": statistics.median(samples[near]),
            "far_us": statistics.median(samples[far]),
            "ratio": statistics.median(b / a for a, b in zip(samples[near], samples[far], strict=True)),
            "samples_us": {"near": samples[near], "far": samples[far]},
        }
    return {"cases": results, "prefill": prefill}


def summarise_prefill(seconds: list[float], resident: list[int], length: int, chunk: int) -> dict[str, Any]:
    """Tokens a second, the last tenth of the chunks against the first, and how much memory grew between them."""
    tenth = max(1, len(seconds) // 10)
    whole = seconds[: length // chunk] or seconds  # the last chunk may be shorter
    return {
        "length": length,
        "chunk": chunk,
        "tokens_per_second": length / sum(seconds),
        "ratio": statistics.median(whole[-tenth:]) / statistics.median(whole[:tenth]),
        "resident_growth_bytes": resident[-1] - resident[min(tenth, len(resident) - 1)],
        "seconds": seconds,
    }


def loop_cost(model: PreTrainedModel, near: int, rounds: int, tokens: int, seed: int) -> dict[str, Any]:
    """Microseconds that a token takes beyond the bare model step, in our loop and in that of transformers."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (1, near), generator=generator).to(model.device)
    start = read_prompt(model, ids, None, near)[0]
    stock = mock.patch.object(type(model), "_sample", GenerationMixin._sample)

    def bare() -> float:
        cache, token = copy.deepcopy(start), ids[:, -1:]
        position = torch.full_like(token, near)
        times = []
        for _ in range(tokens):
            model(token, cache=cache, position_ids=position, use_cache=True, logits_to_keep=1, return_dict=True)
            synchronize(model.device)
            times.append(time.perf_counter())
        return statistics.median(b - a for a, b in zip(times[SETTLING:], times[SETTLING + 1 :])) * 1e6

    def ours() -> float:
        return continue_from(model, ids, None, start, tokens)

    def theirs() -> float:
        with stock:
            return continue_from(model, ids, None, start, tokens)

    samples: dict[str, list[float]] = {"bare": [], "ours": [], "stock": []}
    for turn in range(rounds + 1):
        values = {"bare": bare(), "ours": ours(), "stock": theirs()}
        if turn > 0:
            for name, value in values.items():
                samples[name].append(value)
    extra = {name: [a - b for a, b in zip(samples[name], samples["bare"], strict=True)] for name in ("ours", "stock")}
    return {
        "position": near,
        "bare_us": statistics.median(samples["bare"]),
        "ours_us": statistics.median(extra["ours"]),
        "stock_us": statistics.median(extra["stock"]),
        "ratio": statistics.median(a / b for a, b in zip(extra["ours"], extra["stock"], strict=True)),
        "samples_us": samples,
    }


def long_run(model: PreTrainedModel, near: int, far: int, seed: int) -> dict[str, Any]:
    """Resident memory and time of one generation of `far` tokens, at `near` and at the end."""

    class Watch(Clock):
        def __init__(self):
            super().__init__()
            self.process, self.count, self.resident = psutil.Process(), 0, {}
            self.marks = {near, far, *(far * i // 10 for i in range(1, 10))}
            self.bar = tqdm(total=far, desc="generate", unit="token", mininterval=1)

        def put(self, value: Tensor) -> None:
            if self.count in self.marks:
                self.resident[self.count] = self.process.memory_info().rss
                self.times.append(time.perf_counter())
                self.bar.update(self.count - self.bar.n)
            self.count += 1

    watch = Watch()
    torch.manual_seed(seed)
    ids = model.generate(
        torch.zeros(1, 1, dtype=torch.long, device=model.device),
        max_new_tokens=far,
        min_new_tokens=far,
        do_sample=True,
        streamer=watch,
    )
    watch.bar.close()
    growth = watch.resident[far] - watch.resident[near]
    return {
        "length": far,
        "resident_bytes": {str(key): value for key, value in watch.resident.items()},
        "ids_bytes": ids.nbytes,
        "growth_bytes": growth,
        "growth_without_ids_bytes": growth - ids.nbytes,
        "seconds_at": dict(zip(map(str, sorted(watch.marks)), (t - watch.times[0] for t in watch.times))),
    }


def prompt_lookups(model: PreTrainedModel, texts: dict[str, Tensor], rounds: int, tokens: int) -> dict[str, Any]:
    """`prompt_lookup` after each of several prompts that repeat themselves, and the median of their ratios."""
    texts = {name: prompt_lookup(model, ids.to(model.device), rounds, tokens) for name, ids in texts.items()}
    return {"ratio": statistics.median(each["ratio"] for each in texts.values()), "texts": texts}


def prompt_lookup(model: PreTrainedModel, ids: Tensor, rounds: int, tokens: int) -> dict[str, Any]:
    """Seconds of plain greedy decoding over those with prompt lookup, and tokens that each call of it yields."""
    samples: dict[str, list[float]] = {"greedy": [], "lookup": []}
    outputs, calls = {}, []
    for turn in range(rounds + 1):
        for name, options in (("greedy", {}), ("lookup", {"prompt_lookup_num_tokens": 10})):
            start = time.perf_counter()
            outputs[name] = model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)
            synchronize(model.device)
            if turn > 0:
                samples[name].append(time.perf_counter() - start)
    handle = model.register_forward_pre_hook(lambda module, inputs: calls.append(1))
    model.generate(ids, max_new_tokens=tokens, do_sample=False, prompt_lookup_num_tokens=10)
    handle.remove()
    return {
        "tokens": tokens,
        "tokens_per_call": tokens / len(calls),
        "same_tokens": bool(torch.equal(outputs["greedy"], outputs["lookup"])),
        "ratio": statistics.median(a / b for a, b in zip(samples["greedy"], samples["lookup"], strict=True)),
        "samples_s": samples,
    }


PARTS = ("positions", "loop", "memory", "prompt lookup")


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    repetitive: dict[str, Tensor],
    parts: Sequence[str] = PARTS,
    near: int = 1000,
    far: int = 1_000_000,
    chunk: int = 4096,
    rounds: int = 9,
    tokens: int = 48,
    seed: int = 0,
) -> dict[str, Any]:
    """Measures `parts`; the result is what the JSON file holds, each part with its own record.

    Args:
        model: a causal linear attention model.
        repetitive: ids [1, P] of texts that repeat themselves, by name, for prompt lookup.
        parts: of `PARTS`.
        near, far: the two places in a sequence that are compared, in tokens.
        chunk: tokens read at once.
        rounds: turns of each side, after one that warms up.
        tokens: tokens of a turn.
    """
    set_seed(seed)
    model = model.eval()
    small = AutoModelForCausalLM.from_config(LinAttnConfig.from_preset("seed", **SMALL)).to(model.device).eval()
    run = {
        "positions": lambda: by_position(model, near, far, chunk, rounds, tokens, seed),
        "loop": lambda: loop_cost(small, near, rounds, 4 * tokens, seed),
        "memory": lambda: long_run(small, near, far, seed),
        "prompt lookup": lambda: prompt_lookups(model, repetitive, rounds, 4 * tokens),
    }
    about = {"near": near, "far": far, "device": str(model.device), "dtype": str(model.dtype).removeprefix("torch.")}
    return {
        "kind": "generation",
        "bounds": BOUNDS,
        "small_model": SMALL,
        **{part: {"record": record(seed), **about, **run[part]()} for part in PARTS if part in parts},
    }


REPETITIVE = {
    "assertions": "".join(f"    self.assertEqual(value({i}), {i})\n" for i in (1, 2)) * 8,
    "numbers": "0, 1, 2, 3, " * 12,
    "statements": "    x = x + 1\n" * 20,
    "rule": "# " + "-" * 200,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint of this package")
    parser.add_argument("--near", type=int, default=1000)
    parser.add_argument("--far", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="torch threads; by default torch's own choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="generation.json")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="the others stay as --out has them"
    )
    arguments = vars(parser.parse_args(argv))
    out, path, device = (arguments.pop(name) for name in ("out", "model", "device"))
    if threads := arguments.pop("threads"):
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path).to(device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    repetitive = {name: tokenizer(text, return_tensors="pt")["input_ids"] for name, text in REPETITIVE.items()}
    before = read_json(out) if Path(out).exists() else {}
    write_json(out, {**before, **measure(model, repetitive, **arguments)})


if __name__ == "__main__":
    main()

"""Tokens a second for many requests of different lengths: one by one, in static batches, and in a continuous batch.

    python -m hf_linattn.benchmark.batching --model runs/demo --out batching.json

All three serve the same requests, whose prompt and output lengths are drawn with a seed, and take turns, so that
whatever slows the machine slows all. A static batch is `slots` requests in their order, padded on the left; each of its
rows goes on until its longest output ends, and what is past a request's own length does not count. The end of sequence
is switched off, so that every side generates the same number of tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import hf_linattn  # noqa: F401  registers the models

from .record import record, write_json
from .timing import synchronize

SIDES = ("one_by_one", "static", "continuous")


class Job(NamedTuple):
    """One request: the prompt's ids, and how many tokens to generate."""

    prompt: list[int]
    new_tokens: int


def draw_jobs(
    requests: int, prompt: tuple[int, int], new_tokens: tuple[int, int], vocab_size: int, seed: int
) -> list[Job]:
    """`requests` jobs with lengths uniform in the two closed ranges, and uniform ids."""
    g = torch.Generator().manual_seed(seed)

    def lengths(bounds: tuple[int, int]) -> list[int]:
        return torch.randint(bounds[0], bounds[1] + 1, (requests,), generator=g).tolist()

    return [
        Job(torch.randint(0, vocab_size, (read,), generator=g).tolist(), write)
        for read, write in zip(lengths(prompt), lengths(new_tokens))
    ]


def one_by_one(model: PreTrainedModel, jobs: Sequence[Job], slots: int, chunk: int) -> list[list[int]]:
    """generate() of each request alone."""
    outputs = []
    for job in jobs:
        ids = torch.tensor([job.prompt], device=model.device)
        # without a mask, generate() takes an id that happens to be the padding's for padding
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job.new_tokens, do_sample=False)
        outputs.append(out[0, len(job.prompt) :].tolist())
    return outputs


def static(model: PreTrainedModel, jobs: Sequence[Job], slots: int, chunk: int) -> list[list[int]]:
    """generate() of `slots` requests at a time, padded on the left."""
    outputs = []
    for start in range(0, len(jobs), slots):
        group = jobs[start : start + slots]
        length = max(len(job.prompt) for job in group)
        ids = torch.tensor([[0] * (length - len(job.prompt)) + job.prompt for job in group], device=model.device)
        padding = torch.tensor([length - len(job.prompt) for job in group], device=model.device)
        mask = (torch.arange(length, device=model.device) >= padding.unsqueeze(1)).long()
        longest = max(job.new_tokens for job in group)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
        outputs += [row[length : length + job.new_tokens].tolist() for row, job in zip(out, group)]
    return outputs


def continuous(model: PreTrainedModel, jobs: Sequence[Job], slots: int, chunk: int) -> list[list[int]]:
    """generate_batch() of all requests."""
    results = model.generate_batch(
        [job.prompt for job in jobs],
        [GenerationConfig(max_new_tokens=job.new_tokens, do_sample=False) for job in jobs],
        ContinuousBatchingConfig(max_requests_per_batch=slots, max_batch_tokens=chunk),
    )
    return [output.generated_tokens for output in results.values()]


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    requests: int = 64,
    prompt: tuple[int, int] = (16, 512),
    new_tokens: tuple[int, int] = (16, 256),
    slots: int = 16,
    prefill_chunk: int = 512,
    rounds: int = 3,
    seed: int = 0,
    progress: Callable[..., Any] = tqdm,
) -> dict[str, Any]:
    """Measures the three sides in turns; the result is what the JSON file holds.

    Args:
        model: a causal model of this package, on the device to measure.
        requests: how many.
        prompt, new_tokens: least and most tokens of a prompt and of an output.
        slots: rows that decode together, in static batches as in the continuous one.
        prefill_chunk: prompt tokens that the continuous batch reads between two steps.
        rounds: turns of each side; one more warms up and is not counted.
        seed: draws the requests.
    """
    jobs = draw_jobs(requests, prompt, new_tokens, model.config.vocab_size, seed)
    total = sum(job.new_tokens for job in jobs)
    sides = dict(zip(SIDES, (one_by_one, static, continuous)))
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    outputs: dict[str, list[list[int]]] = {}
    model.eval()
    end, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        for _ in progress(range(rounds + 1), "batching rounds"):
            for name, side in sides.items():
                synchronize(model.device)
                start = time.perf_counter()
                outputs[name] = side(model, jobs, slots, prefill_chunk)
                synchronize(model.device)
                seconds[name].append(time.perf_counter() - start)
    finally:
        model.generation_config.eos_token_id = end
    counted = {name: times[1:] for name, times in seconds.items()}
    for name in SIDES:
        if [len(tokens) for tokens in outputs[name]] != [job.new_tokens for job in jobs]:
            raise RuntimeError(f"{name} did not generate as many tokens as were asked for")
    return {
        "kind": "batching",
        "record": record(seed),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        "sizes": {
            "requests": requests,
            "prompt": list(prompt),
            "new_tokens": list(new_tokens),
            "slots": slots,
            "prefill_chunk": prefill_chunk,
            "generated": total,
        },
        "tokens_per_second": {name: statistics.median(total / s for s in times) for name, times in counted.items()},
        "continuous_over": {
            name: statistics.median(a / b for a, b in zip(counted[name], counted["continuous"])) for name in SIDES[:-1]
        },
        # rounding may part two texts where two logits are nearly equal
        "same_text_as_one_by_one": {
            name: sum(a == b for a, b in zip(outputs[name], outputs["one_by_one"])) / requests for name in SIDES[1:]
        },
        "samples_s": counted,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, nargs=2, default=[16, 512], help="least and most tokens of a prompt")
    parser.add_argument("--new_tokens", type=int, nargs=2, default=[16, 256], help="least and most tokens of an output")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prefill_chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", default="batching.json")
    arguments = vars(parser.parse_args(argv))
    out, name, device = arguments.pop("out"), arguments.pop("model"), arguments.pop("device")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, arguments.pop("dtype"))).to(device)
    write_json(out, measure(model, **arguments))


if __name__ == "__main__":
    main()

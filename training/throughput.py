"""What the training loop costs beside the arithmetic: pretrain.py's steps and bare ones, in turns, in one process.

    python training/throughput.py training/recipes/demo.yaml --max_steps 200 --output_dir runs/throughput

A bare step is forward, backward and AdamW on a batch that is there already. A step of pretrain.py also fetches its
batch, counts what it predicts, divides by it, clips, schedules, checks and logs. Both train a model of the recipe;
writes throughput.json.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from config import ConfigError, PretrainConfig, read_config
from data import BlockStream, load_corpus
from hf_linattn.benchmark.record import record, write_json
from hf_linattn.benchmark.timing import synchronize
from loop import Batch, Run, causal_loss, make_optimizer, make_schedule, new_state, run_script, start_accelerator, train
from models import load_tokenizer, new_model

SETTLING = 10  # steps that do not count


def main(argv: list[str]) -> None:
    config = read_config([*argv, "--tracker", "none", "--eval_steps", str(10**9), "--save_steps", str(10**9)])
    if config.max_steps <= SETTLING or config.gradient_accumulation_steps > 1 or config.model_config is None:
        raise ConfigError(f"needs model_config, more than {SETTLING} max_steps, and gradient_accumulation_steps: 1")
    accelerator = start_accelerator(config)
    tokenizer = load_tokenizer(config.tokenizer_name_or_path)
    corpus = load_corpus(config, tokenizer)
    models = []
    for _ in range(2):
        set_seed(config.seed)
        models.append(new_model(config.model_config, tokenizer).to(accelerator.device).train())
    optimizer = make_optimizer(models[0], config, accelerator.device)
    model, optimizer, scheduler = accelerator.prepare(models[0], optimizer, make_schedule(optimizer, config))
    stream = BlockStream(corpus.shards, config.seed)
    loader = accelerator.prepare(DataLoader(stream, config.batch_size, generator=torch.Generator()))
    turns = Turns(iter(loader), BareLoop(models[1], config, accelerator), accelerator.device)

    state = new_state(config)
    train(Run(accelerator, config, model, optimizer, scheduler, turns, causal_loss, lambda: {}, state))

    ours, bare = turns.ours[SETTLING:], turns.bare[SETTLING : len(turns.ours)]
    tokens = config.batch_size * config.block_size
    result = {
        "kind": "throughput",
        "record": record(config.seed),
        "device": str(accelerator.device),
        "config": asdict(config),
        "tokens_per_step": tokens,
        "tokens_per_second": {
            name: tokens / statistics.median(times) for name, times in (("pretrain", ours), ("bare", bare))
        },
        "pretrain_over_bare": statistics.median(b / a for a, b in zip(ours, bare)),
        "samples_s": {"pretrain": ours, "bare": bare},
    }
    write_json(Path(config.output_dir) / "throughput.json", result)
    speeds = result["tokens_per_second"]
    print(
        f"{speeds['pretrain']:,.0f} tokens/s, {speeds['bare']:,.0f} bare: {result['pretrain_over_bare']:.1%} of it "
        "(median over pairs of steps)"
    )


class BareLoop:
    """Steps without anything around them, on one batch over and over."""

    def __init__(self, model: torch.nn.Module, config: PretrainConfig, accelerator):
        self.model, self.optimizer = model, make_optimizer(model, config, accelerator.device)
        self.autocast = accelerator.autocast

    def step(self, batch: Batch) -> None:
        with self.autocast():
            loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Turns:
    """Batches for a loop; a bare step takes its turn before each. `ours` and `bare` are the seconds of the steps."""

    def __init__(self, batches: Iterator[Batch], loop: BareLoop, device: torch.device):
        self.batches, self.loop, self.device = batches, loop, device
        self.ours: list[float] = []
        self.bare: list[float] = []
        self.steps = self._take_turns()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self.steps)

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def _take_turns(self) -> Iterator[Batch]:
        batch = next(self.batches)
        while True:
            start = self.now()
            self.loop.step(batch)
            between = self.now()
            self.bare.append(between - start)
            batch = next(self.batches)
            yield batch
            self.ours.append(self.now() - between)


if __name__ == "__main__":
    run_script("throughput", main)

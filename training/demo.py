"""What a trained checkpoint does: long generation from a constant cache, and a Llama of its size beside it.

    python training/demo.py runs/demo

Reads the folder that pretrain.py wrote; adds results.json, table.md, figures/*.png and the model's card,
README.md, to it.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.panel import Panel
from rich.text import Text
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.generation.streamers import BaseStreamer

import hf_linattn  # noqa: F401  registers the models
from hf_linattn.benchmark.compare import CONTEXTS, cache_nbytes, compare
from hf_linattn.benchmark.plots import plot
from hf_linattn.benchmark.record import read_json, record, write_json
from hf_linattn.benchmark.tables import compare_table, render, train_table
from hf_linattn.model_card import write_card

PROMPT = "import os\nimport sys\n\ndef "
SHOWN = 700  # characters of the sample


class ProgressStreamer(BaseStreamer):
    """Moves a bar by one for each token that `generate` yields, and notes when each came."""

    def __init__(self, total: int):
        self.bar = tqdm(total=total, desc="generate", unit="token")
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # the first call brings the prompt
        if len(self.times) > 1:
            self.bar.update()

    def end(self) -> None:
        self.bar.close()


@torch.no_grad()
def generate(model, tokenizer, tokens: int, seed: int) -> dict[str, Any]:
    """Samples `tokens` tokens; the time per token near the start and near the end, the cache, and the text."""
    set_seed(seed)
    prompt = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    streamer = ProgressStreamer(tokens)
    output = model.generate(
        **prompt,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        temperature=0.8,
        streamer=streamer,
        return_dict_in_generate=True,
    )
    milliseconds = [(after - before) * 1e3 for before, after in pairwise(streamer.times)]
    tenth = max(1, len(milliseconds) // 10)
    return {
        "kind": "generate",
        "prompt": PROMPT,
        "tokens": len(milliseconds),
        "seconds": streamer.times[-1] - streamer.times[0],
        "ms_per_token": {
            "first tenth": statistics.median(milliseconds[:tenth]),
            "last tenth": statistics.median(milliseconds[-tenth:]),
        },
        "cache_bytes": cache_nbytes(output.cache),
        "text": tokenizer.decode(output.sequences[0], skip_special_tokens=True),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output_dir of pretrain.py")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens to generate")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="contexts to compare at")
    parser.add_argument("--rounds", type=int, default=5, help="turns a model and context in the comparison")
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads on CPU: one token is little work to share"
    )
    parser.add_argument("--out", type=Path, help="folder for the results; by default the run's own")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    run, out, console = arguments.run, arguments.out or arguments.run, Console()

    # 1. The checkpoint, as any user of transformers loads it.
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(run).to(device)
    tokenizer = AutoTokenizer.from_pretrained(run)

    # 2. Long generation: the cache does not grow, the last tokens cost what the first did.
    generated = generate(model, tokenizer, arguments.tokens, arguments.seed)
    console.print(Panel(Text(generated["text"][:SHOWN] + " ..."), title="sample (generated text, from the prompt on)"))
    times = generated["ms_per_token"]
    console.print(
        f"{generated['tokens']:,} tokens in {generated['seconds']:.1f} s; {times['first tenth']:.2f} ms a token in the "
        f"first tenth, {times['last tenth']:.2f} ms in the last; cache {generated['cache_bytes']:,} bytes"
    )
    if hasattr(model.config, "state_nbytes"):
        formula = "layers * batch * (4 Hk F (E + 1) + (K - 1) (Hq + 2 Hk) D * 4)"
        console.print(f"the formula, {formula}, gives {model.config.state_nbytes():,} bytes at any length")

    # 3. Beside a Llama of the same size.
    comparison = compare(model, arguments.contexts, rounds=arguments.rounds, seed=arguments.seed)
    training = read_json(run / "train_results.json")
    results = {
        "kind": "demo",
        "record": record(arguments.seed),
        "train": training,
        "generate": generated,
        "compare": comparison,
    }
    write_json(out / "results.json", results)
    (out / "table.md").write_text(render(results))
    figures = plot(results, out / "figures")
    card = write_card(out)

    console.print(Markdown(compare_table(comparison)))
    console.print(Markdown(train_table(training)))
    written = [out / "results.json", out / "table.md", *figures, card]
    console.print(f"wrote {', '.join(map(str, written))}", soft_wrap=True)


if __name__ == "__main__":
    main()

"""The command line: read a text once and ask about it; plan, measure and tell what they cost; serve and evaluate them.

hf-linattn env
hf-linattn read book.txt --model runs/demo --out book.state
hf-linattn ask book.state "def main():"
hf-linattn plan runs/demo --context 4096 65536
hf-linattn benchmark
hf-linattn card runs/demo
hf-linattn transformers serve runs/demo
hf-linattn lm-eval run --model hf --model_args pretrained=runs/demo --tasks lambada_openai
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from . import model_card
from .benchmark import plan, suite
from .cache import LinearAttentionCache, state_header
from .generation import FileStreamer

# What these commands of transformers import beyond this package's own requirements: the `serve` extra.
NEEDED = {"serve": ("accelerate", "fastapi", "openai", "pydantic", "uvicorn"), "chat": ("rich",)}


@torch.no_grad()
def read(model, ids: torch.Tensor, chunk: int, progress: bool = True) -> LinearAttentionCache:
    """Read `ids` [1, T] in pieces of `chunk` tokens; memory does not depend on T."""
    cache = LinearAttentionCache(model.config)
    with tqdm(total=ids.shape[1], desc="read", unit="token", disable=not progress) as bar:
        for piece in ids.split(chunk, dim=1):
            model(piece.to(model.device), cache=cache, logits_to_keep=1)
            bar.update(piece.shape[1])
    return cache


def run_read(arguments: argparse.Namespace) -> None:
    text = _read_text(arguments.text)
    if arguments.out.exists() and not arguments.force:
        raise ValueError(f"{arguments.out} is there already; --force replaces it")
    model, tokenizer = _load(arguments.model, arguments.device)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError(f"{arguments.text} has no tokens")
    cache = read(model, ids, arguments.chunk)
    cache.save(arguments.out, model)
    print(f"{ids.shape[1]:,} tokens read; the state in {arguments.out} takes {arguments.out.stat().st_size:,} bytes")


def run_ask(arguments: argparse.Namespace) -> None:
    name = arguments.model or state_header(arguments.state).get("model")
    if not name:
        raise ValueError(f"{arguments.state} does not say which model it is of: give --model")
    model, tokenizer = _load(name, arguments.device)
    cache = LinearAttentionCache.load(arguments.state, model)
    ids = tokenizer(arguments.prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
    if ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens: ask something")
    set_seed(arguments.seed)
    mask = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.long, device=model.device)
    model.generate(
        ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=arguments.tokens,
        do_sample=arguments.temperature > 0,
        temperature=arguments.temperature or None,
        streamer=FileStreamer(sys.stdout, tokenizer),
    )
    print()


def run_env(arguments: argparse.Namespace) -> None:
    from .benchmark.record import hardware, versions
    from .benchmark.text import table
    from .ops import backends

    devices = [arguments.device] if arguments.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    print(table(["package", "version"], [[name, version] for name, version in versions().items()], align="---"))
    machine = {name: value for name, value in hardware().items() if value}
    print(table(["machine", ""], [[name, str(value)] for name, value in machine.items()], align="---"))
    for device in devices:
        try:
            rows = [[case, *choice] for case, choice in backends.survey(device).items()]
        except (RuntimeError, AssertionError) as error:  # torch's ways to say that there is no such device
            raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
        print(table([f"linear attention on {device}", "backend", "because"], rows, align="---"))
    print(f"Another first choice: {backends.VARIABLE}=torch, native or triton; by name: linear_attention(backend=...)")


def run_transformers(argv: list[str]) -> None:
    """transformers' own command line with `argv`, in a process that knows our models: importing this package did it.

    transformers has no entry point for plugins, so its `transformers` command alone does not import us.
    """
    missing = [name for name in NEEDED.get(next(iter(argv), ""), ()) if find_spec(name) is None]
    if missing:
        raise ValueError(f"{argv[0]} needs {', '.join(missing)}: pip install 'hf-linattn[serve]'")
    from transformers.cli.transformers import app

    app(argv, prog_name="hf-linattn transformers")


def run_lm_eval(argv: list[str]) -> None:
    """lm-evaluation-harness's own command line with `argv`, likewise: it has no entry point for plugins either."""
    if find_spec("lm_eval") is None:
        raise ValueError("lm-eval needs the package lm-eval: pip install 'lm-eval[hf]'")
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["hf-linattn lm-eval", *argv]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


# Commands of other packages; their options are theirs to read.
PASSED_ON = {"transformers": run_transformers, "lm-eval": run_lm_eval}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _load(name: str, device: str | None):
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(name).to(device).eval()
    return model, AutoTokenizer.from_pretrained(name)


class Parser(argparse.ArgumentParser):
    """Bad usage is what any bad input is: one line, and exit code 1."""

    def error(self, message: str) -> None:
        raise ValueError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hf-linattn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("read", help="read a text file and save the state")
    command.add_argument("text", type=Path, help="a UTF-8 text file")
    command.add_argument("--model", required=True, help="a checkpoint: a folder or a hub id")
    command.add_argument("--out", type=Path, required=True, help="the state file to write")
    command.add_argument("--chunk", type=int, default=4096, help="tokens read at once (default: %(default)s)")
    command.add_argument("--force", action="store_true", help="replace the state file if it is there")
    command.add_argument("--device", help="cpu, cuda, ...; by default a GPU if there is one")
    command.set_defaults(run=run_read)
    command = commands.add_parser("ask", help="continue from a saved state")
    command.add_argument("state", type=Path)
    command.add_argument("prompt")
    command.add_argument("--model", help="the checkpoint, if it is not where `read` found it")
    command.add_argument("--tokens", type=int, default=200, help="tokens to generate (default: %(default)s)")
    command.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--device", help="cpu, cuda, ...; by default a GPU if there is one")
    command.set_defaults(run=run_ask)
    command = commands.add_parser("env", help="versions, machine, and which backend runs which case, and why")
    command.add_argument("--device", help="cpu, cuda, ...; by default the CPU, and a GPU if there is one")
    command.set_defaults(run=run_env)
    plan.add_arguments(commands.add_parser("plan", help="bytes and operations at a context, linear beside softmax"))
    suite.add_arguments(commands.add_parser("benchmark", help="measure speed and memory here: JSON, tables, figures"))
    model_card.add_arguments(commands.add_parser("card", help="render a model's card from its result files"))
    commands.add_parser("transformers", add_help=False, help="transformers' own commands (serve, chat, ...)")
    commands.add_parser("lm-eval", add_help=False, help="lm-evaluation-harness's own commands (run, ls, ...)")
    return parser


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in PASSED_ON:
            PASSED_ON[argv[0]](argv[1:])
        else:
            arguments = build_parser().parse_args(argv)
            arguments.run(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"hf-linattn: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()

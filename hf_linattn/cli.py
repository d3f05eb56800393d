"""The command line: convert models; read a text once and ask; plan, measure and tell costs; serve and evaluate.

hf-linattn env
hf-linattn linearize HuggingFaceTB/SmolLM2-135M runs/smol --keep-layers 0.25
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
import json
import sys
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from . import model_card
from .benchmark import plan, suite
from .benchmark.text import bytes_text
from .cache import LinearAttentionCache, state_header
from .conversion import ConversionWarning, linearize, new_parameters, write_checkpoint
from .conversion.checkpoint import check_free
from .generation import FileStreamer

CONTEXT = 32768  # tokens, at which `linearize` says what the cache takes

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


def run_linearize(arguments: argparse.Namespace) -> None:
    check_free(arguments.out)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", ConversionWarning)
        model = linearize(
            arguments.source,
            feature_map=arguments.feature_map,
            feature_map_kwargs=arguments.feature_map_kwargs,
            keep_layers=_keep_layers(arguments.keep_layers),
            window=arguments.window,
            dtype=arguments.dtype,
            gguf_file=arguments.gguf_file,
        )
    costs = plan.plan(model.config, [CONTEXT], dtype=str(model.dtype).removeprefix("torch."))
    tokenizer = write_checkpoint(
        model, arguments.out, arguments.source, arguments.gguf_file, max_shard_size=arguments.max_shard_size
    )
    print(f"{arguments.out}: {_layers_text(model.config.layer_types)}; feature map {model.config.feature_map}")
    state, new = model.state_dict(), new_parameters(model)
    parts = sorted({name.partition(".self_attn.")[2] for name in new})
    print(f"new: {sum(state[name].numel() for name in new):,} parameters ({', '.join(parts) or 'none'})")
    for note in notes:
        print(f"{'not carried' if note.category is ConversionWarning else 'note'}: {note.message}")
    if tokenizer is None:
        print(f"not carried: {arguments.source} has no tokenizer")
    linear, softmax = (bytes_text(costs["rows"][0][side]["cache_bytes"]) for side in ("linear", "softmax"))
    print(f"cache after {CONTEXT:,} tokens: {linear}; of full attention in every layer: {softmax}")
    if set(model.config.layer_types) != {"full_attention"}:
        print("Layers that are no longer softmax attention compute something else: only training recovers the quality.")


def _keep_layers(words: list[str]) -> list[int] | float | str:
    """`all`, a fraction, or indices."""
    try:
        if len(words) == 1 and not words[0].isdecimal():
            return float(words[0])
        return [int(word) for word in words]
    except ValueError:
        return " ".join(words)


def _layers_text(layer_types: list[str]) -> str:
    counts = Counter(layer_types)
    text = ", ".join(f"{count} {layer_type}" for layer_type, count in sorted(counts.items()))
    kept = [index for index, layer_type in enumerate(layer_types) if layer_type == "full_attention"]
    places = f" (layers {', '.join(map(str, kept))})" if 0 < len(kept) < len(layer_types) else ""
    return f"{len(layer_types)} layers, {text}{places}"


def _json_object(text: str) -> dict:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error.msg})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as '{{\"tied\": true}}'")
    return found


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
    command = commands.add_parser("linearize", help="turn a pretrained softmax model into a linear or hybrid one")
    command.add_argument("source", help="a Llama, Mistral, Qwen2, Qwen3 or relative: a folder or a hub id")
    command.add_argument("out", type=Path, help="the folder to write; not there yet, or empty")
    command.add_argument("--feature-map", default="hedgehog", help="phi of the linear layers (default: %(default)s)")
    command.add_argument("--feature-map-kwargs", type=_json_object, help="its options, as a JSON object")
    command.add_argument(
        "--keep-layers", nargs="+", default=[], help="layers that stay full attention: indices, a fraction, or all"
    )
    command.add_argument("--window", type=int, help="last keys that linear layers read by softmax (default: none)")
    command.add_argument("--dtype", choices=plan.DTYPES, help="of the weights written; by default the source's")
    command.add_argument("--gguf-file", help="a GGUF file in SOURCE, which is dequantised")
    command.add_argument("--max-shard-size", default="5GB", help="of a file of weights (default: %(default)s)")
    command.set_defaults(run=run_linearize)
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

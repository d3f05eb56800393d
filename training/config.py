"""What a run can be told: a dataclass for each script, read from a YAML recipe and the command line."""

import difflib
import json
from argparse import ArgumentError
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser


class ConfigError(ValueError):
    """A mistake of the user's that one line explains."""


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    """Checks that every field has the type that it is declared with, and at least the value in `LEAST`."""

    LEAST: ClassVar[dict[str, float]] = {}

    def __post_init__(self):
        types = get_type_hints(type(self))
        for each in fields(self):
            check_type(each.name, getattr(self, each.name), types[each.name])
        for name, least in self.LEAST.items():
            if getattr(self, name, least) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass
class TextConfig(Config):
    """Where text comes from."""

    dataset: str = option(
        "python_stdlib", "python_stdlib, or files (path, folder or glob of txt/jsonl/parquet), or a hub id"
    )
    dataset_config: str | None = option(None, "configuration name of a hub dataset")
    dataset_split: str = option("train", "split of a hub dataset to train on")
    text_column: str = option("text", "column of jsonl, parquet and hub datasets that holds the text")
    eval_dataset: str | None = option(
        None, "held-out data, given as dataset is; by default a part of the documents of dataset"
    )
    held_out_fraction: float = option(
        0.05, "part of the documents that is never trained on, chosen by a hash of their names"
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction is {self.held_out_fraction}; it must lie between 0 and 1")


@dataclass
class RunConfig(TextConfig):
    """How a model is trained and where the results go: what pretrain.py and finetune.py share."""

    # How.
    max_steps: int = option(1000, "optimizer steps")
    batch_size: int = option(8, "blocks a process and forward pass")
    gradient_accumulation_steps: int = option(1, "forward passes an optimizer step")
    block_size: int = option(512, "tokens in a block")
    learning_rate: float = option(1e-3, "peak of the schedule")
    schedule: Literal["cosine", "wsd", "constant"] = option(
        "cosine", "after the warm-up: a cosine; stable, then a decay (wsd); or constant"
    )
    min_learning_rate_ratio: float = option(0.1, "cosine and wsd end at this part of the peak")
    decay_fraction: float = option(0.2, "wsd: the last part of the steps, in which the rate decays")
    warmup_steps: int = option(100, "steps of linear warm-up")
    weight_decay: float = option(0.1, "AdamW decay of matrices; norms and biases have none")
    adam_beta1: float = option(0.9, "AdamW beta 1")
    adam_beta2: float = option(0.95, "AdamW beta 2")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    mixed_precision: Literal["no", "bf16", "fp16"] = option("no", "dtype of matrix products; weights stay float32")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    torch_compile: bool = option(False, "compile the model")
    cpu_threads: int = option(0, "torch threads a process when training on CPU; 0: share out the cores")
    seed: int = option(0, "seed of initialisation, data order and dropout")

    # Where to.
    output_dir: str = option("runs/train", "model, tokenizer, results, checkpoints and log go here")
    resume: str = option(
        "auto", "auto: from the last checkpoint in output_dir; restart: delete those; or a checkpoint folder"
    )
    save_steps: int = option(500, "steps between checkpoints")
    keep_checkpoints: int = option(2, "checkpoints to keep")
    eval_batch_size: int = option(8, "blocks a process and forward pass of an evaluation")
    eval_steps: int = option(500, "steps between evaluations")
    logging_steps: int = option(10, "steps between logged losses")
    tracker: Literal["none", "tensorboard", "trackio"] = option("tensorboard", "what curves are logged with")

    LEAST: ClassVar[dict[str, float]] = {
        "max_steps": 1, "batch_size": 1, "gradient_accumulation_steps": 1, "warmup_steps": 0, "block_size": 2,
        "eval_bytes": 1, "save_steps": 1, "keep_checkpoints": 1, "eval_steps": 1, "eval_batch_size": 1,
        "logging_steps": 1, "cpu_threads": 0, "lora_rank": 0,
        "learning_rate": 0, "weight_decay": 0, "max_grad_norm": 0, "min_learning_rate_ratio": 0, "decay_fraction": 0,
    }  # fmt: skip

    def __post_init__(self):
        if self.mixed_precision is False:  # YAML reads an unquoted `no` as false
            self.mixed_precision = "no"
        super().__post_init__()
        if self.decay_fraction > 1:
            raise ConfigError(f"decay_fraction is {self.decay_fraction}; it must be at most 1")


@dataclass
class PretrainConfig(RunConfig):
    """pretrain.py: a new model, or a checkpoint, on text."""

    model_config: dict | str | None = option(
        None, "new model: model_type and any field of its configuration; as JSON on the command line, over the recipe's"
    )
    model_name_or_path: str | None = option(
        None, "checkpoint to continue from, with its tokenizer, instead of a new model"
    )
    tokenizer_name_or_path: str | None = option(
        None, "tokenizer; by default the checkpoint's, or bytes for a new model"
    )
    streaming: bool = option(False, "read the dataset as it is needed instead of tokenising all of it first")
    eval_bytes: int = option(400_000, "evaluate on this much held-out text at most")
    isolate_documents: bool = option(True, "restart position_ids at each document, so that none sees its neighbours")
    baselines: bool = option(False, "also measure gzip and a byte 6-gram model on the held-out text")
    output_dir: str = option("runs/pretrain", "model, tokenizer, results, checkpoints and log go here")

    def __post_init__(self):
        if isinstance(self.model_config, str):
            self.model_config = json_object("model_config", self.model_config)
        super().__post_init__()
        if (self.model_config is None) == (self.model_name_or_path is None):
            raise ConfigError(
                "give either model_config (a new model) or model_name_or_path (one to continue), not both"
            )
        if self.model_config is not None and "model_type" not in self.model_config:
            raise ConfigError("model_config needs a model_type, for example linattn")


@dataclass
class LoraFields(RunConfig):
    """Runs that train all weights of a checkpoint, or adapters."""

    lora_rank: int = option(0, "train LoRA adapters of this rank on all projections; 0 trains all weights")
    lora_alpha: float = option(32.0, "LoRA: adapters are scaled by lora_alpha / lora_rank")
    lora_dropout: float = option(0.0, "LoRA: dropout in front of the adapters")
    merge_lora: bool = option(True, "LoRA: write the merged model too, beside the adapter")


@dataclass
class FinetuneConfig(LoraFields):
    """finetune.py: a checkpoint on conversations, or on classified texts or words."""

    task: Literal["chat", "sequence_classification", "token_classification"] = option("chat", "what is learned")
    model_name_or_path: str | None = option(None, "checkpoint to start from, with its tokenizer")
    messages_column: str = option("messages", "chat: column with a list of {role, content}")
    prompt_column: str = option("prompt", "chat, where there are no messages: column of what is asked")
    completion_column: str = option("completion", "chat, where there are no messages: column of the answer")
    chat_template: str | None = option(None, "chat: file with a Jinja template, instead of the tokenizer's own")
    completion_only: bool = option(True, "chat: learn the assistant's words alone; false: all words")
    text_pair_column: str | None = option(None, "sequence_classification: column of a second text")
    tokens_column: str = option("tokens", "token_classification: column with a list of words")
    label_column: str = option("label", "classification: column of the label, or of a list with one for every word")
    learning_rate: float = option(2e-4, "peak of the schedule")
    weight_decay: float = option(0.0, "AdamW decay of matrices; norms and biases have none")
    output_dir: str = option("runs/finetune", "model, tokenizer, results, checkpoints and log go here")

    def __post_init__(self):
        super().__post_init__()
        if self.model_name_or_path is None:
            raise ConfigError("give model_name_or_path: the checkpoint to start from")


@dataclass
class LinearizeConfig(LoraFields):
    """linearize.py: a converted model on text, with the model it was converted from as its teacher."""

    stage: Literal["transfer", "distill", "rank"] = option(
        "transfer",
        "transfer: feature maps learn the teacher's attention; distill: the student learns its predictions, or text; "
        "rank: find the layers whose softmax attention is missed most, and restore some",
    )
    model_name_or_path: str | None = option(None, "the student: a checkpoint that hf-linattn linearize wrote")
    teacher_name_or_path: str | None = option(None, "the model that it was converted from")
    transfer_loss: Literal["attention", "output", "hidden"] = option(
        "attention", "transfer: KL of attention weights, windows off; or the squared error of what comes out of the "
        "attention, or of the whole layer",
    )  # fmt: skip
    objective: Literal["kl", "cross_entropy"] = option(
        "kl", "distill: the teacher's predictions, or the next token of the text"
    )
    window_dropout: float = option(
        0.0, "distill: part of the forward passes in which a layer's window is off and the linear part works alone"
    )
    keep_fraction: float = option(0.25, "rank: part of all layers whose softmax attention is restored")
    streaming: bool = option(False, "read the dataset as it is needed instead of tokenising all of it first")
    eval_bytes: int = option(100_000, "evaluate on this much held-out text at most")
    isolate_documents: bool = option(True, "restart position_ids at each document, so that none sees its neighbours")
    weight_decay: float = option(0.0, "AdamW decay of matrices; norms and biases have none")
    output_dir: str = option("runs/linearize", "model, tokenizer, results, checkpoints and log go here")

    def __post_init__(self):
        super().__post_init__()
        if self.model_name_or_path is None:
            raise ConfigError("give model_name_or_path: the student, as hf-linattn linearize writes it")
        if self.teacher_name_or_path is None and (self.stage != "distill" or self.objective == "kl"):
            raise ConfigError("give teacher_name_or_path: the model that the student was converted from")
        for name in ("window_dropout", "keep_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must lie between 0 and 1")


@dataclass
class EvaluateConfig(TextConfig):
    """evaluate.py: a checkpoint on held-out text."""

    model_name_or_path: str | None = option(None, "checkpoint to evaluate, with its tokenizer")
    block_size: int = option(2048, "tokens in a block; what came before its first token is not seen")
    eval_bytes: int = option(400_000, "evaluate on this much text at most")
    eval_batch_size: int = option(8, "blocks a process and forward pass")
    whole: bool = option(False, "evaluate on all of dataset instead of its held-out part")
    mixed_precision: Literal["no", "bf16", "fp16"] = option("no", "dtype of matrix products; weights stay float32")
    baselines: bool = option(False, "also measure gzip on the text, and a byte 6-gram of the rest of dataset")
    cpu_threads: int = option(0, "torch threads a process on CPU; 0: share out the cores")
    seed: int = option(0, "written to the record; nothing is drawn")
    out: str | None = option(None, "JSON file to write; by default evaluation.json in the checkpoint's folder")

    LEAST: ClassVar[dict[str, float]] = {"block_size": 2, "eval_bytes": 1, "eval_batch_size": 1, "cpu_threads": 0}

    def __post_init__(self):
        if self.mixed_precision is False:
            self.mixed_precision = "no"
        super().__post_init__()
        if self.model_name_or_path is None:
            raise ConfigError("give model_name_or_path: the checkpoint to evaluate")
        if self.whole and self.baselines and self.eval_dataset is None:
            raise ConfigError(
                "baselines with whole: true would measure a 6-gram on what it was counted on; name other text with "
                "eval_dataset, or leave one of them out"
            )


Kind = TypeVar("Kind", bound=Config)


def read_config(argv: list[str], kind: type[Kind] = PretrainConfig) -> Kind:
    """`[recipe.yaml] [--field value ...]` to a checked configuration; the command line wins over the recipe."""
    recipe, overrides = {}, argv
    if argv and not argv[0].startswith("-"):
        recipe, overrides = read_recipe(argv[0], kind), list(argv[1:])
    parser = HfArgumentParser(kind, allow_abbrev=False, exit_on_error=False)
    parser.set_defaults(**recipe)
    # Not parse_args_into_dataclasses: a "train.args" file beside a script called train.py would be read too.
    try:
        known, unknown = parser.parse_known_args(overrides)
    except ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from error
    if unknown:
        if unknown[0].startswith("--"):
            check_keys("command line", [unknown[0].lstrip("-").split("=")[0].replace("-", "_")], kind)
        raise ConfigError(f"command line: do not know what to do with {unknown[0]!r}")
    values = vars(known)
    if isinstance(values.get("model_config"), str) and isinstance(recipe.get("model_config"), dict):
        values["model_config"] = recipe["model_config"] | json_object("model_config", values["model_config"])
    return kind(**values)


def read_recipe(path: str, kind: type[Config]) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ConfigError(f"{path} must hold `field: value` lines")
    check_keys(path, recipe, kind)
    return recipe


def check_keys(where: str, keys, kind: type[Config]) -> None:
    allowed = [f.name for f in fields(kind)]
    for key in keys:
        if key not in allowed:
            close = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"{where}: unknown key {key!r}{hint} Allowed: {', '.join(allowed)}")


def check_type(name: str, value: Any, expected: Any) -> None:
    """YAML can put any type anywhere, and argparse converts only strings."""
    if get_origin(expected) is Literal:
        if value not in get_args(expected):
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(get_args(expected))}")
        return
    accepted = int | float if expected is float else expected
    if not isinstance(value, accepted) or (isinstance(value, bool) and expected is not bool):
        raise ConfigError(f"{name} is {value!r}; it must be of type {getattr(expected, '__name__', expected)}")


def json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, not {text}")
    return value

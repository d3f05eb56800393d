"""The YAML block of a card: what the hub filters and ranks by."""

from dataclasses import dataclass
from pathlib import PurePath

from huggingface_hub import EvalResult, ModelCardData

from .evidence import BadResult, Evidence, Fields

LICENCE = "apache-2.0"


@dataclass(frozen=True)
class Head:
    """What a class of models is for, and how it is loaded."""

    what: str
    auto_class: str
    pipeline_tag: str


HEADS = {"ForCausalLM": Head("causal language model", "AutoModelForCausalLM", "text-generation")}
# Datasets that are not the hub's: what they are, of which language; {python} is the version that ran.
DATASETS = {"python_stdlib": ("the Python files of the standard library of Python {python}", "code")}


def head_of(train: Fields) -> Head:
    name = train["model"]["class"]
    for ending, head in HEADS.items():
        if name.endswith(ending):
            return head
    raise BadResult(f"{train['model'].where}class is {name!r}; cards are for classes that end in {', '.join(HEADS)}")


def is_linear(train: Fields) -> bool:
    """Whether the model is one of this package's."""
    return train["model"]["class"].startswith("LinAttn")


def from_hub(train: Fields) -> bool:
    return train["data"].get("origin") == "hub"


def dataset_title(train: Fields) -> str:
    """The training text in words."""
    name = train["data"]["dataset"]
    if name in DATASETS:
        return DATASETS[name][0].format(python=train["record"]["versions"]["python"])
    return without_folders(name)


def without_folders(path: str) -> str:
    """A path as it is told to others: one that is absolute loses its folders."""
    return PurePath(path).name if PurePath(path).is_absolute() else path


def model_name(train: Fields) -> str:
    return PurePath(train["config"]["output_dir"]).name


def metadata(evidence: Evidence) -> ModelCardData:
    """The metadata of the card; a data set or a licence stands there only where it is known to be the hub's or ours."""
    (part, *_) = evidence.of_kind("train")
    train = part.fields
    with evidence.reading(part):
        name, head = train["data"]["dataset"], head_of(train)
        return ModelCardData(
            language=DATASETS[name][1] if name in DATASETS else None,
            license=None if train["config"]["model_name_or_path"] else LICENCE,  # else it is the first checkpoint's
            library_name="transformers",
            pipeline_tag=head.pipeline_tag,
            tags=["linear-attention", "hf_linattn"] if is_linear(train) else None,
            datasets=[name] if from_hub(train) else None,
            model_name=model_name(train),
            eval_results=[quality(train, head)],
        )


def quality(train: Fields, head: Head) -> EvalResult:
    """The bits per byte of held-out text, for the hub's list of evaluations."""
    name = train["data"]["dataset"]
    return EvalResult(
        task_type=head.pipeline_tag,
        dataset_type=name if from_hub(train) or name in DATASETS else "local-files",
        dataset_name=dataset_title(train),
        dataset_split="held-out",
        metric_type="bits_per_byte",
        metric_name="bits per byte of held-out text",
        metric_value=round(train["bits_per_byte"]["after"], 3),
    )

"""What a card tells, in which order: a section has a small function for each kind of result that it can tell of."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..benchmark.tables import TITLES, render, settings_text
from ..benchmark.text import bytes_text, milliseconds_text, table
from .evidence import RESULTS, BadResult, Evidence, Fields, Part
from .limits import machine_text, write_limits
from .markdown import fenced, folded, link, quoted
from .metadata import LICENCE, dataset_title, from_hub, head_of, is_linear, model_name, without_folders

SAMPLE = 400  # characters of generated text
EVALUATIONS = 8  # rows of the table over training
LAYERS = {
    "kernel_linear_attention": "linear attention",
    "kernel_linear_attention_sliding": "linear attention with a window",
    "full_attention": "full attention",
}
# The figure that `benchmark.plots` draws of a kind of result, and what it shows.
FIGURES = {
    "train": ("training.png", "Held-out bits per byte over training"),
    "compare": ("compare.png", "Cache and time per token against context"),
    "benchmark decode": ("benchmark_decode.png", "A decoding step of the attention function against context"),
    "benchmark model": ("benchmark_model.png", "Speed and memory of models against length"),
    "benchmark op": ("benchmark_op.png", "Speed and memory of the attention function against length"),
}

Writer = Callable[[Part, Evidence], list[str]]


def what_it_is(part: Part, evidence: Evidence) -> list[str]:
    train = part.fields
    base = train["config"]["model_name_or_path"]
    start = f"trained on from `{without_folders(base)}`" if base else "trained from scratch"
    return [
        f"# {model_name(train)}",
        f"A {head_of(train).what} of {train['model']['parameters']:,} parameters ({layers_text(train)}), {start} on "
        f"{dataset_text(train)}.",
    ]


def layers_text(train: Fields) -> str:
    """The class, and how many layers of which kind where the recipe says it."""
    sizes, name = train["config"]["model_config"], f"`{train['model']['class']}`"
    if not sizes or "num_hidden_layers" not in sizes:
        return name
    usual = "kernel_linear_attention" if is_linear(train) else "full_attention"
    kinds = Counter(sizes.get("layer_types") or [usual] * sizes["num_hidden_layers"])
    each = [f"{count} {'layer' if count == 1 else 'layers'} of {LAYERS[kind]}" for kind, count in kinds.items()]
    return f"{name}, {' and '.join(each)}"


def dataset_text(train: Fields) -> str:
    name, title = train["data"]["dataset"], dataset_title(train)
    if from_hub(train):
        return f"[{name}](https://huggingface.co/datasets/{name})"
    return title if title != without_folders(name) else f"`{title}`"


def data_and_code(part: Part, evidence: Evidence) -> list[str]:
    """On what and with what the model was trained; which code ran where."""
    data, config = part.fields["data"], part.fields["config"]
    size = (
        f" ({data['train_documents']:,} documents, {data['train_bytes']:,} bytes, {data['train_tokens']:,} tokens)"
        if "train_bytes" in data
        else ""
    )
    apart = f"`{without_folders(config['eval_dataset'])}`" if config["eval_dataset"] else "the same source, kept apart"
    tokens = "A token is a byte. " if config["tokenizer_name_or_path"] is config["model_name_or_path"] is None else ""
    blocks = config["batch_size"] * config["gradient_accumulation_steps"]
    return [
        f"Training text: {dataset_text(part.fields)}{size}. Held-out text: {data['held_out_documents']:,} documents, "
        f"{data['held_out_bytes']:,} bytes, of {apart}. {tokens}Training: {config['max_steps']:,} steps of "
        f"{blocks:,} x {config['block_size']:,} tokens a process, AdamW with a learning rate of "
        f"{config['learning_rate']:g}, seed {config['seed']}, {part.fields['seconds']:,.0f} seconds.",
        runs_table(evidence),
        f"Versions: {versions_text(evidence)}.",
    ]


def runs_table(evidence: Evidence) -> str:
    """Commit, date and machine of every run."""
    rows = [
        [
            link(file),
            f"`{record['commit'][:12] + '-dirty' * record['commit'].endswith('-dirty')}`" if record["commit"] else "",
            record["date"][:10],
            machine_text(record["hardware"]),
            str(record["hardware"]["torch_threads"]),
        ]
        for file, record in evidence.records()
    ]
    unique = list(map(list, dict.fromkeys(map(tuple, rows))))
    return table(["file", "commit", "date", "machine", "torch threads"], unique, align="---").rstrip()


def versions_text(evidence: Evidence) -> str:
    """Each package, and every version of it that ran."""
    found: dict[str, dict[str, None]] = {}
    for _, record in evidence.records():
        for name, version in record["versions"].items():
            found.setdefault(name, {})[version] = None
    return ", ".join(f"{name} {' and '.join(versions)}" for name, versions in found.items())


def quality(part: Part, evidence: Evidence) -> list[str]:
    """Bits per byte beside the baselines and over training."""
    evaluations = part.fields["evaluations"]
    every = max(1, math.ceil((len(evaluations) - 1) / (EVALUATIONS - 1)))
    shown = [*evaluations[:-1:every], evaluations[-1]]
    return [
        "Bits per byte: what predicting the held-out text costs, over its length in UTF-8.",
        render(part.fields).rstrip(),
        *figure(part, evidence),
        table(["optimizer steps", "bits per byte"], [[f"{step:,}", f"{bits:.3f}"] for step, bits in shown]).rstrip(),
    ]


def sample(part: Part, evidence: Evidence) -> list[str]:
    """What the model writes."""
    # A byte model may write control characters, which would end a line here and not there.
    text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in part.fields["text"])
    return [
        f"The prompt, and the beginning of {part.fields['tokens']:,} tokens that were sampled after it:",
        fenced(text[:SAMPLE], "text"),
    ]


def beside_llama(part: Part, evidence: Evidence) -> list[str]:
    fields = part.fields
    return [
        f"This model and a Llama of the same size ({fields['models']['llama']['parameters']:,} parameters, random "
        f"weights), taking turns in one process ({fields['device']}, {fields['dtype']}); ratios are the Llama's over "
        "this model's:",
        render(fields).rstrip(),
        *figure(part, evidence),
    ]


def long_generation(part: Part, evidence: Evidence) -> list[str]:
    fields = part.fields
    first, last = (milliseconds_text(fields["ms_per_token"][tenth]) for tenth in ("first tenth", "last tenth"))
    return [
        f"Sampling {fields['tokens']:,} tokens took {fields['seconds']:.1f} seconds: {first} ms a token in the first "
        f"tenth, {last} ms in the last. The cache then held {bytes_text(fields['cache_bytes'])}."
    ]


def cost_of_a_token(part: Part, evidence: Evidence) -> list[str]:
    small = part.fields["small_model"]
    smaller = [name for name in ("loop", "memory") if name in part.fields]
    caption = f"What a generated token costs ({link(part.file)})"
    if smaller:
        caption += (
            f"; the rows on the {' and the '.join(smaller)} are of a smaller model (hidden size "
            f"{small['hidden_size']}, random weights)"
        )
    return [f"{caption}:", render(part.fields).rstrip()]


def captioned(caption: str) -> Writer:
    """A table under a line that says what it shows."""

    def write(part: Part, evidence: Evidence) -> list[str]:
        return [f"{caption} ({link(part.file)}):", render(part.fields).rstrip()]

    return write


def level(part: Part, evidence: Evidence) -> list[str]:
    """A level of `hf-linattn benchmark`, its tables folded."""
    if not part.fields.get("passes"):
        return []
    return [folded(f"{level_text(part)}, {part.file}", render(part.fields).rstrip()), *level_figure(part, evidence)]


def level_in_short(part: Part, evidence: Evidence) -> list[str]:
    """A level whose tables say nothing of a model: what was measured, where it stands, and its figure."""
    if not part.fields.get("passes"):
        return []
    return [f"{level_text(part)}: {link(part.file)}.", *level_figure(part, evidence)]


def level_text(part: Part) -> str:
    passes = ", ".join(part.fields["passes"])
    return f"{TITLES[part.fields['kind']]}, {passes} ({settings_text(part.fields)})"


def level_figure(part: Part, evidence: Evidence) -> list[str]:
    return figure(part, evidence) if part.file == "benchmark.json" else []  # other files would overwrite the figure


def modes(part: Part, evidence: Evidence) -> list[str]:
    """The table of ways to call `generate()`, folded."""
    rows = part.fields["rows"]
    text = (
        "Exact: the logits and tokens (of drafts the tokens) are those of the same call without a cache. †: "
        "transformers keeps this mode in a repository of the hub, and a local function stood in for it."
    )
    summary = f"{len(rows)} ways to call generate(), tried on small models of this architecture ({part.file})"
    return [folded(summary, f"{text}\n\n{render(part.fields).rstrip()}")]


def how_to_use(part: Part, evidence: Evidence) -> list[str]:
    train, head = part.fields, head_of(part.fields)
    place = without_folders(train["config"]["output_dir"])
    generated = evidence.of_kind("generate")
    prompt = generated[0].fields["prompt"] if generated else "Once"
    lines = ["import hf_linattn  # registers the model's classes"] if is_linear(train) else []
    lines += [
        f"from transformers import {head.auto_class}, AutoTokenizer",
        "",
        f"model = {head.auto_class}.from_pretrained({quoted(place)})",
        f"tokenizer = AutoTokenizer.from_pretrained({quoted(place)})",
        f'inputs = tokenizer({quoted(prompt)}, return_tensors="pt")',
        "output = model.generate(**inputs, max_new_tokens=200, do_sample=True, temperature=0.8)",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
    ]
    return [
        f"`{place}` is where the commands below leave the model; on the hub, put the name of its repository instead.",
        fenced("\n".join(lines), "python"),
    ]


def how_it_was_made(part: Part, evidence: Evidence) -> list[str]:
    """The command of every run, the first made first."""
    commands = dict.fromkeys(f"{record['command']}  # {file}" for file, record in evidence.records())
    return [
        fenced("\n".join(commands), "bash"),
        f"`hf-linattn card` renders this card from {', '.join(map(link, evidence.files))}; no number in it was typed "
        "by hand.",
    ]


def licence(part: Part, evidence: Evidence) -> list[str]:
    base = part.fields["config"]["model_name_or_path"]
    if base:
        return [f"The weights go back to `{without_folders(base)}`, whose licence holds for them."]
    return [f"{LICENCE.capitalize()}."]


@dataclass(frozen=True)
class Section:
    """A heading, and who writes under it for each kind of result; without any of these results it is left out."""

    heading: str
    writers: dict[str, Writer]
    lead: str = ""  # the line below the heading


SECTIONS = (
    Section("", {"train": what_it_is}),
    Section("Limits", {"train": write_limits}),
    Section("Data, code and machine", {"train": data_and_code}),
    Section("Quality", {"train": quality, "generate": sample}),
    Section(
        "Memory and speed",
        {
            "compare": beside_llama,
            "generate": long_generation,
            "generation": cost_of_a_token,
            "batching": captioned("Serving many requests"),
            "throughput": captioned("What the training loop costs beside the bare steps"),
        },
    ),
    Section(
        "Memory and speed of the code",
        {
            "benchmark model": level,
            "benchmark decode": level,
            "benchmark op": level_in_short,
            "benchmark kernels": captioned("Kernels against the definition in float64"),
            "benchmark shapes": captioned("The attention function at published shapes"),
        },
        "Not of this model: `hf-linattn benchmark` compares models with random weights, and the attention function "
        "alone, at sizes of their own.",
    ),
    Section("How to load and generate", {"train": how_to_use, "modes": modes}),
    Section("How it was made", {"train": how_it_was_made}),
    Section("Licence", {"train": licence}),
)


def write_sections(evidence: Evidence) -> str:
    """The card's text; ValueError of one line if no model is described, or a field is missing or of a wrong kind."""
    described = [kind for kind in SECTIONS[0].writers if evidence.of_kind(kind)]
    if not described:
        raise BadResult(
            f"{evidence.folder / RESULTS}: kind {evidence.files[RESULTS]['kind']!r} describes no model; a card needs a "
            f"result of kind {' or '.join(SECTIONS[0].writers)}"
        )
    blocks = []
    for section in SECTIONS:
        written = []
        for kind, writer in section.writers.items():
            for part in evidence.of_kind(kind):
                with evidence.reading(part):
                    written += writer(part, evidence)
        if written:
            head = [f"## {section.heading}" if section.heading else "", section.lead]
            blocks += [block for block in (*head, *written) if block]
    return "\n\n".join(blocks)


def figure(part: Part, evidence: Evidence) -> list[str]:
    """The picture of a result, if it is there."""
    name, shows = FIGURES[part.fields["kind"]]
    path = f"figures/{name}"
    return [f"![{shows}]({path})"] if (evidence.folder / path).is_file() else []

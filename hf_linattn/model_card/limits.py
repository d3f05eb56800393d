"""What a model cannot do and what its measurements cannot say, as far as the files tell."""

from collections.abc import Callable

from ..benchmark.text import bytes_text, percent_text
from .evidence import Evidence, Fields, Part
from .metadata import is_linear


def too_little(part: Part, evidence: Evidence) -> str:
    """How large the model is, and how much it was trained on."""
    parameters, tokens = part.fields["model"]["parameters"], part.fields["tokens_seen"]
    line = (
        f"It has {parameters:,} parameters and was trained on {tokens:,} tokens, {tokens / parameters:.2g} a parameter"
    )
    if there := part.fields["data"].get("train_tokens"):
        line += f" and {percent_text(tokens / there)} of its training text"
    return f"{line}."


def against_baselines(part: Part, evidence: Evidence) -> str:
    """Which baselines the model does not reach."""
    own, baselines = part.fields["bits_per_byte"]["after"], part.fields["baselines"]
    if not baselines:
        return "No baseline was measured on the held-out text, so that nothing says what its bits per byte are worth."
    figures = {name: each["bits_per_byte"] for name, each in baselines.items()}
    ahead = [f"{name} ({bits:.3f} bits per byte)" for name, bits in figures.items() if bits <= own]
    if not ahead:
        return f"It was compared with {' and '.join(baselines)} alone: no other model read the same held-out text."
    return (
        f"It does not reach {' or '.join(ahead)}: it needs {own:.3f}. It is an example of how the code is run, and of "
        "no other use."
    )


def one_sample(part: Part, evidence: Evidence) -> str:
    """What the figure of quality stands on."""
    data = part.fields["data"]
    return (
        f"The figure of quality is of one held-out text ({data['held_out_documents']:,} documents, "
        f"{data['held_out_bytes']:,} bytes) and one seed: it says nothing of other text and nothing of the spread. No "
        "second text was kept apart: if the recipe was chosen by this figure, the figure flatters it."
    )


def not_remembered(part: Part, evidence: Evidence) -> str:
    """How far back training reached, beside the longest context that anything was measured at."""
    block, longest = part.fields["config"]["block_size"], longest_context(evidence)
    line = f"It was trained and evaluated on blocks of {block:,} tokens."
    if longest > block:
        line += (
            f" Speed and memory were measured up to a context of {longest:,} tokens; whether it remembers anything "
            "from farther back than a block was not."
        )
    return line


def fixed_state(part: Part, evidence: Evidence) -> str:
    """What linear attention is worst at."""
    if not is_linear(part.fields):
        return ""
    return (
        "The state of a linear layer has a fixed size and cannot hold everything: finding one exact thing far back "
        "(copying, looking up a key among many) is where linear attention is weakest, and was not measured here."
    )


def where_measured(part: Part, evidence: Evidence) -> str:
    machines = {machine_text(record["hardware"]) for _, record in evidence.records()}
    measured = f"All was measured on {'; '.join(sorted(machines))}"
    if evidence.devices() <= {"cpu"}:
        return f"{measured}. Nothing was measured on a GPU."
    return f"{measured} (devices: {', '.join(sorted(evidence.devices()))})."


def code_unknown(part: Part, evidence: Evidence) -> str:
    """Files whose commit does not say what code ran."""
    files = {file for file, record in evidence.records() if (record["commit"] or "-dirty").endswith("-dirty")}
    return (
        f"The code behind {', '.join(sorted(files))} is no commit: it had changes or was not in git." if files else ""
    )


def slower_than_llama(part: Part, evidence: Evidence) -> str:
    """Where the Llama beside the model is faster."""
    ratios = {row["context"]: row["llama_over_model"]["ms_per_token"] for row in part.fields["rows"]}
    slower = [f"{context:,}" for context, ratio in ratios.items() if ratio < 1]
    line = "The Llama that it is compared with has random weights: they compare size and time, not quality."
    return f"{line} It generates faster than this model after {' and '.join(slower)} tokens." if slower else line


def modes_that_differ(part: Part, evidence: Evidence) -> str:
    """Ways to call `generate()` that are refused here, or give something else than the same call without a cache."""
    rows, differ = part.fields["rows"], {}
    for row in rows:
        ours = (answer for name, answer in row.items() if name not in ("mode", "llama"))
        if no := next((answer for answer in ours if answer.startswith(("refused", "inexact"))), None):
            differ[row["mode"]] = no
    each = "; ".join(f"{mode} ({answer})" for mode, answer in differ.items())
    return (
        f"Of {len(rows)} ways to call `generate()`, these do not work as they do for a Llama: {each}." if each else ""
    )


def unfinished(part: Part, evidence: Evidence) -> str:
    """A benchmark that was cut short, or only tried the code."""
    if part.fields["quick"]:
        return f"The figures of {part.file} are of a quick run that only tries the code."
    skipped = "; ".join(f"{name}: {reason}" for name, reason in part.fields["skipped"].items())
    return f"Not everything that {part.file} was to hold was measured ({skipped})." if skipped else ""


def kernels_outside_bounds(part: Part, evidence: Evidence) -> str:
    """Cases in which a kernel of the GPU is not as exact as it should be."""
    failed = [row["case"] for row in part.fields["rows"] if not row["within"]]
    return f"Kernels are outside their error bounds on {part.fields['device']}: {', '.join(failed)}." if failed else ""


# What each kind of result gives away, in the order in which a card says it.
LIMITS: dict[str, tuple[Callable[[Part, Evidence], str], ...]] = {
    "train": (too_little, against_baselines, one_sample, not_remembered, fixed_state, where_measured, code_unknown),
    "compare": (slower_than_llama,),
    "modes": (modes_that_differ,),
    "benchmark": (unfinished,),
    "benchmark kernels": (kernels_outside_bounds,),
}

# The longest context at which each kind of result measured something of this model.
LENGTHS: dict[str, Callable[[Fields], int]] = {
    "compare": lambda fields: max(row["context"] for row in fields["rows"]),
    "generate": lambda fields: fields["tokens"],
    "generation": lambda fields: fields["positions"]["far"] if "positions" in fields else 0,
}


def write_limits(part: Part, evidence: Evidence) -> list[str]:
    """All limits as one list."""
    lines = []
    for kind, limits in LIMITS.items():
        for each in evidence.of_kind(kind):
            with evidence.reading(each):
                lines += [limit(each, evidence) for limit in limits]
    return ["\n".join(f"- {line}" for line in lines if line)]


def longest_context(evidence: Evidence) -> int:
    return max((length(part.fields) for kind, length in LENGTHS.items() for part in evidence.of_kind(kind)), default=0)


def machine_text(hardware: Fields) -> str:
    """A machine in words: processor, cores, memory, GPUs."""
    memory = hardware["memory_gib"]
    parts = [hardware["cpu"], f"{hardware['cores']} cores"]
    parts += [bytes_text(memory * 2**30)] if memory else []
    gpus = hardware["gpus"]
    parts += [f"{gpus.count(name)} {name}" for name in dict.fromkeys(gpus)]
    return ", ".join(parts)

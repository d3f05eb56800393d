"""Which feature map, and what around it? Two studies on equal terms, every variant with the same steps and data.

    python training/study.py recall
    python training/study.py bytes
    python training/study.py recall --scale full        the published sizes, for a GPU

Each variant is trained once at every learning rate with the first seed; the best rate, chosen on data that nothing is
reported on, is then repeated with the other seeds. A finished run is a file, so that a study that was stopped goes on
where it was. Writes results.json and figures to model_cards/<study> (or --out).
"""

import argparse
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm.auto import tqdm

import byte_lm
import recall
from config import ConfigError
from hf_linattn.benchmark.plots import plot
from hf_linattn.benchmark.record import cores, read_json, record, write_json
from hf_linattn.benchmark.tables import render
from loop import run_script
from variants import Variant, all_variants

STUDIES: dict[str, ModuleType] = {"recall": recall, "bytes": byte_lm}


@dataclass(frozen=True)
class Job:
    """One model to train."""

    study: str
    scale: Any
    variant: Variant
    learning_rate: float
    seed: int

    def settings(self) -> dict[str, Any]:
        """All that decides what comes out, as JSON has it."""
        fields = self.variant.fields(self.scale.layers, self.scale.longest)
        return json.loads(json.dumps({**asdict(self), "fields": fields}))

    def path(self, folder: Path) -> Path:
        name = self.variant.name.replace(" + ", "+").replace(" ", "_")
        return folder / f"{name}-lr{self.learning_rate:g}-seed{self.seed}.json"


def do(job: Job, folder: Path, threads: int, device: str, made: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    result = STUDIES[job.study].run(job.scale, job.variant, job.learning_rate, job.seed, device)
    seconds = round(time.perf_counter() - start, 1)
    result = {"settings": job.settings(), "record": {**made, "seed": job.seed}, "seconds": seconds, **result}
    write_json(job.path(folder), result)
    return result


def finished(job: Job, folder: Path) -> dict[str, Any] | None:
    """The run of an earlier call; one with other settings in its place is an error."""
    path = job.path(folder)
    if not path.exists():
        return None
    try:
        result = read_json(path)
        same = result["settings"] == job.settings()
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a run of a study ({error}): remove it") from error
    if not same:
        raise ConfigError(f"{path} was made with other settings: remove it, or name another folder with --runs")
    return result


def do_all(
    jobs: list[Job], folder: Path, processes: int, device: str, made: dict[str, Any], bar: tqdm
) -> dict[Job, dict[str, Any]]:
    """The results of all jobs, from their files where they are done."""
    results = {job: result for job in jobs if (result := finished(job, folder)) is not None}
    bar.update(len(results))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        threads = max(1, cores() // processes)
        waiting = {pool.submit(do, job, folder, threads, device, made): job for job in jobs if job not in results}
        try:
            for future in as_completed(waiting):
                results[waiting[future]] = future.result()
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
    return {job: results[job] for job in jobs}  # in this order: of equal learning rates the first is taken


def best(results: dict[Job, dict[str, Any]], study: ModuleType) -> dict[Variant, Job]:
    """The job of each variant with the best score."""

    by_variant: dict[Variant, list[Job]] = {}
    for job in results:
        by_variant.setdefault(job.variant, []).append(job)
    return {variant: max(jobs, key=lambda job: study.score(results[job])) for variant, jobs in by_variant.items()}


def run_study(
    name: str, scale_name: str, folder: Path, processes: int, device: str, only: Iterable[str] = ()
) -> dict[str, Any]:
    """Both stages, and everything that was measured in one dictionary."""
    study = STUDIES[name]
    scale = study.SCALES[scale_name]
    variants = [
        v for v in all_variants(scale.mixes, scale.narrow) if not only or v.feature_map is None or v.feature_map in only
    ]
    first, *others = scale.seeds
    rates = scale.learning_rates
    made = record()  # of the code as it is now; the working tree may change while the study runs
    with tqdm(total=len(variants) * (len(rates) + len(others)), desc=name, unit="run", smoothing=0) as bar:
        jobs = [Job(name, scale, v, lr, first) for v in variants for lr in rates]
        grid = do_all(jobs, folder, processes, device, made, bar)
        chosen = best(grid, study)
        rest = [Job(name, scale, v, chosen[v].learning_rate, seed) for v in variants for seed in others]
        repeats = do_all(rest, folder, processes, device, made, bar)
    seconds = round(sum(run["seconds"] for run in [*grid.values(), *repeats.values()]))
    rows = []
    for variant in variants:
        job = chosen[variant]
        tried = {f"{each.learning_rate:g}": run["validation"] for each, run in grid.items() if each.variant == variant}
        runs = {first: grid[job]} | {other.seed: run for other, run in repeats.items() if other.variant == variant}
        rows.append(
            {
                "name": variant.name,
                **asdict(variant),
                "learning_rate": job.learning_rate,
                "validation": tried,
                "runs": [
                    {"seed": seed, **without(runs[seed], "settings", "record", "seconds")} for seed in sorted(runs)
                ],
                "commits": sorted({str(run["record"]["commit"]) for run in runs.values()}),
            }
        )
    return {
        "kind": f"{name} study",
        "record": made,
        "scale_name": scale_name,
        "scale": asdict(scale),
        "trained": len(grid) + len(repeats),
        "seconds": seconds,  # of all these, one after another
        "rows": rows,
    }


def without(result: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in names}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--scale", choices=recall.SCALES, default="cpu", help="how large (default: %(default)s)")
    parser.add_argument("--maps", nargs="+", default=[], help="these feature maps only; softmax is always there")
    parser.add_argument("--processes", type=int, help="runs at a time; by default one a core, or one on a GPU")
    parser.add_argument("--runs", type=Path, help="folder of the finished runs; by default runs/studies/STUDY-SCALE")
    parser.add_argument("--out", type=Path, help="folder of the results; by default model_cards/STUDY")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exit ends the pool too
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = arguments.processes or (1 if device == "cuda" else cores())
    runs = arguments.runs or Path("runs/studies") / f"{arguments.study}-{arguments.scale}"
    out = arguments.out or Path("model_cards") / arguments.study
    result = run_study(arguments.study, arguments.scale, runs, processes, device, arguments.maps)
    write_json(out / "results.json", result)
    figures = plot(result, out / "figures")
    print(render(result))
    print(f"wrote {out / 'results.json'}, {', '.join(map(str, figures))}")


if __name__ == "__main__":
    run_script("study", main)

"""Ranks of one machine, on gloo: scripts that run as several processes, and what they leave for the tests.

A script calls `join()` first and `leave(results)` last; a test calls `launch` and gets the results of every rank.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).parents[2]
FOLDER = "HF_LINATTN_TEST_FOLDER"


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(script: str, ranks: int, folder: Path, *arguments: str) -> list[dict]:
    """Run the module `script` of this folder as `ranks` processes; what each of them left."""
    folder.mkdir(parents=True, exist_ok=True)
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "training"))),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        FOLDER: str(folder),
    }
    command = [sys.executable, "-m", f"tests.distributed.{script}", *arguments]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [text for process, text in zip(processes, said) if process.returncode]
    assert not failed, failed[0][-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def join() -> tuple[int, int, Path]:
    """Become a rank: its number, how many there are, and the folder they share."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size(), Path(os.environ[FOLDER])


def leave(results: dict) -> None:
    """Hand `results` to the test."""
    torch.save(results, Path(os.environ[FOLDER]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


def whole(tensor: Tensor | None) -> Tensor | None:
    """The tensor that the ranks hold parts of, as a plain one."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return None if tensor is None else tensor.detach().clone()

"""Compile kernels.c once with the machine's C compiler, keep the library in a cache folder, load it from there.

The library's name is a hash of everything it depends on (source, compiler, flags, kind of processor), so a new version
of any makes a new file. The folder is `HF_LINATTN_CACHE`, by default `hf_linattn` in `XDG_CACHE_HOME` or `~/.cache`;
where it cannot be written, or others could write to it, the library is compiled anew by each process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
# No -ffast-math: NaN and infinity must come through, and linking with it would change the process's rounding of
# subnormal numbers.
FLAGS = ("-O3", "-std=gnu11", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
TARGETS = (("-march=native",), ("-mcpu=native",), ())
SECONDS = 120  # after which a compiler counts as hanging


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why, in one line."""


def compiler() -> str | None:
    """The C compiler: `CC`, or else cc, gcc or clang, whichever is on the path first."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


@functools.cache
def missing() -> str | None:
    """Why there are no kernels on this machine, in one line, or `None`. The first call may compile them."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels, compiled first if need be."""
    if os.name != "posix":
        raise BuildError(f"the kernels are built on Linux and macOS, not on {platform.system()}")
    path = compiler()
    if path is None:
        raise BuildError(f"no C compiler ({os.environ.get('CC') or 'cc, gcc or clang'} is not on the path)")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = _private_folder() or Path(scratch)
            built = folder / f"kernels-{_fingerprint(path)}.so"
            if not built.exists():
                _compile(path, built)
            return ctypes.CDLL(str(built))
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(" ".join(str(error).split())) from error


def _compile(path: str, built: Path) -> None:
    """Compile for this processor if the compiler knows how, else for its family; whole or not at all."""
    handle, part = tempfile.mkstemp(suffix=".so", dir=built.parent)
    os.close(handle)
    try:
        for target in TARGETS:
            command = [path, *FLAGS, *target, "-shared", "-fPIC", str(SOURCE), "-o", part, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode == 0:
                os.replace(part, built)
                return
        lines = done.stderr.splitlines()
        error = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"{path} does not compile the kernels: {' '.join(error.split())}")
    finally:
        Path(part).unlink(missing_ok=True)


def _fingerprint(path: str) -> str:
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    parts = (SOURCE.read_text(), path, version, *FLAGS, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What tells processors apart that share a cache folder over a network."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.split(":")[0].strip().lower() in ("flags", "features")}))


def _private_folder() -> Path | None:
    """The cache folder, made if need be; `None` unless it is ours alone to write to."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("HF_LINATTN_CACHE") or Path(root) / "hf_linattn")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    is_ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_ours and os.access(folder, os.W_OK) else None

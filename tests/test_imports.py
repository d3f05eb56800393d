"""Which part may import which, read from the source; and what `import hf_linattn` may not do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_linattn"

# Each floor imports its own and those before it.
FLOORS = [
    {"ops"},
    {"cache"},
    {"layers"},
    {"generation"},
    {"models"},
    {"conversion"},
    {"benchmark", "model_card"},
    {"cli", "__main__"},
]
FLOOR = {part: i for i, floor in enumerate(FLOORS) for part in floor}
TOP = "__init__"  # the public names: imports anything, and only what a user runs imports it
USES_PUBLIC_NAMES = {"benchmark", "model_card", "cli", "__main__"}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: tuple[str, ...]) -> str:
    """("hf_linattn", "ops", "chunk") -> "ops"; the package itself -> "__init__"."""
    return module[1] if len(module) > 1 else TOP


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """(line, dotted name) of every import in the file, inside functions too, relative ones resolved."""
    module, found = module_of(path), []
    package = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple((node.module or "").split(".")) if node.module else ()
            # `from hf_linattn import ops` names a part; `from .chunk import f` names a module already
            is_package = base == ("hf_linattn",)
            found += [(node.lineno, (*base, alias.name) if is_package else base) for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            if node.args and isinstance(node.args[0], ast.Constant):
                name = node.args[0].value
                level = len(name) - len(name.lstrip("."))
                base = package[: len(package) - level + 1] if level else ()
                found.append((node.lineno, base + tuple(name.lstrip(".").split("."))))
    return found


def relative(path):
    return str(path.relative_to(ROOT))


def test_there_is_something_to_read():
    assert PACKAGE / "ops" / "__init__.py" in SOURCES
    assert any(imports(path) for path in SOURCES)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_each_floor_imports_only_floors_below(path):
    part = part_of(module_of(path))
    if part == TOP:
        return
    assert part in FLOOR, f"{relative(path)}: give {part!r} a floor in {Path(__file__).name}"
    for line, name in imports(path):
        where = f"{relative(path)}:{line} imports {'.'.join(name)}"
        assert name[0] not in ("training", "tests"), where
        if name[0] != "hf_linattn":
            continue
        other = part_of(name)
        if other in FLOOR:
            assert FLOOR[other] <= FLOOR[part], f"{where}: {other!r} stands above {part!r}"
        else:  # a public name, taken from the package itself
            assert part in USES_PUBLIC_NAMES, f"{where}: import it from the part that defines it"


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").rglob("*.py")), ids=relative)
def test_ops_import_only_torch(path):
    allowed = {"torch", "hf_linattn", *sys.stdlib_module_names}
    if "triton" in path.relative_to(PACKAGE / "ops").parts[:1]:
        allowed |= {"triton"}
    for line, name in imports(path):
        assert name[0] in allowed, f"{relative(path)}:{line} imports {'.'.join(name)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=relative)
def test_public_names_do_not_come_from_training(path):
    for line, name in imports(path):
        assert name[0] not in ("training", "tests"), f"{relative(path)}:{line} imports {'.'.join(name)}"


IMPORT = """
import sys

def forbid(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        raise SystemExit(f"network: {event} {arguments}")

sys.addaudithook(forbid)
import transformers.models.qwen3.modeling_qwen3  # loads what transformers and torch load, triton included
theirs = set(sys.modules)
print("-- theirs", file=sys.stderr, flush=True)  # torchao, which transformers imports where it is, says what it lacks
import hf_linattn
ours = {name for name in sys.modules if name.startswith("hf_linattn.ops.triton")}
print(*sorted({name.split(".")[0] for name in set(sys.modules) - theirs} | ours))
"""


def test_importing_does_no_work():
    """No plotting, data or kernel library loads beyond what transformers does, no socket connects, nothing is said."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stderr.endswith("-- theirs\n")
    *printed, names = run.stdout.splitlines()
    assert printed == []
    assert "hf_linattn" in names.split()
    assert {"matplotlib", "datasets", "triton", "hf_linattn.ops.triton"}.isdisjoint(names.split())

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_linattn.benchmark import record as module
from hf_linattn.benchmark.record import SCHEMA_VERSION, command, commit, read_json, record, write_json


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with record.py tracked in it, which `commit` then takes for its own."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    (tmp_path / "record.py").write_text("1\n")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "record.py"))
    return tmp_path, git


def test_commit_is_head_and_says_when_files_differ(repository):
    folder, git = repository
    (folder / "other").write_text("")
    git("add", "other")
    git("commit", "-q", "-m", "other")
    assert commit() is None  # a repository that this file is not part of is somebody else's
    git("add", "record.py")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD").strip()
    assert commit() == head
    (folder / "untracked").write_text("")
    assert commit() == head
    (folder / "record.py").write_text("2\n")
    assert commit() == f"{head}-dirty"


def test_no_commit_outside_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(module, "__file__", str(tmp_path / "record.py"))
    assert commit() is None


def test_command_runs_again_from_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "x.py"), "--name", "two words"])
    assert command("accelerate launch") == "accelerate launch scripts/x.py --name 'two words'"
    monkeypatch.setattr(sys, "argv", ["/elsewhere/x.py"])
    assert command() == "python x.py"
    monkeypatch.setattr(sys, "argv", ["x.py", "--out", str(tmp_path / "here" / "a.json"), "/elsewhere/b.json"])
    assert command() == "python x.py --out here/a.json b.json"  # no folder of this machine


def test_command_that_was_installed(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/anywhere/bin/hf-linattn", "benchmark", "--quick"])
    assert command() == "hf-linattn benchmark --quick"


def test_an_interrupt_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    write_json(tmp_path / "r.json", {"a": 1})
    real = Path.write_text

    def interrupted(path, text, **options):
        real(path, text[:3], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "r.json", {"a": 2})
    assert read_json(tmp_path / "r.json") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_file_says_the_version_of_its_schema(tmp_path):
    write_json(tmp_path / "r.json", {"kind": "x"})
    assert json.loads((tmp_path / "r.json").read_text()) == {"schema_version": SCHEMA_VERSION, "kind": "x"}
    (tmp_path / "old.json").write_text('{"kind": "x"}')  # written before there were versions
    assert read_json(tmp_path / "r.json") == read_json(tmp_path / "old.json") == {"kind": "x"}


def test_all_committed_results_are_readable():
    paths = sorted((Path(__file__).parents[2] / "model_cards").rglob("*.json"))
    assert len(paths) >= 8
    assert all(read_json(path)["kind"] for path in paths)


@pytest.mark.parametrize(
    "content, words",
    [
        (b'{"schema_version": 2, "kind": "x"}', "schema_version is 2; this release reads 1"),
        (b'{"schema_version": "new"}', "schema_version is 'new'; this release reads 1"),
        (b'{"kind": "x", "rows": [1, 2', "not a whole JSON file (Expecting"),
        (b"", "not a whole JSON file (Expecting value"),
        (b"\xff\xfe{}", "not a whole JSON file ('utf-8' codec"),
        (b"[1, 2]", "holds a list; a result is a JSON object"),
    ],
)
def test_a_file_that_is_no_result_is_one_line_that_names_it(tmp_path, content, words):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_json(path)
    assert str(error.value).startswith(f"{path}: {words}")
    assert "\n" not in str(error.value)


def test_command_of_a_module(monkeypatch):
    spec = type("Spec", (), {"name": "hf_linattn.benchmark.ops"})
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["/anywhere/ops.py", "--rounds", "3"])
    assert command() == "python -m hf_linattn.benchmark.ops --rounds 3"


def test_record_and_its_file(tmp_path):
    result = record(seed=3)
    assert result["seed"] == 3
    assert result["versions"]["torch"] == torch.__version__
    assert result["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert result["hardware"]["torch_threads"] == torch.get_num_threads()
    assert result["hardware"]["cores"] >= 1
    assert len(result["hardware"]["gpus"]) == torch.cuda.device_count()
    assert str(Path.home()) not in result["command"]
    write_json(tmp_path / "new" / "folder" / "r.json", result)
    assert read_json(tmp_path / "new" / "folder" / "r.json") == result
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["r.json"]

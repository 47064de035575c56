"""`make` sets everything up once, and says in one sentence what is missing before it fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import bootstrap
from labkit.bootstrap import Missing, environment_python, install_steps, run_step, set_up, torch_build

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
PYTHON = Path("python")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A stand-in for a virtual environment that is there and works."""
    python = environment_python(tmp_path / ".venv")
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return tmp_path / ".venv"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of the steps that would have run pip."""
    titles: list[str] = []
    monkeypatch.setattr(bootstrap, "run_step", lambda title, _command, _log: titles.append(title.partition(" (")[0]))
    monkeypatch.setattr(bootstrap, "check_disk", lambda _environment, _build: None)
    return titles


@needs_make
def test_a_python_that_is_too_old_is_named(root: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.8.2"\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(["make", "setup", f"PYTHON={old}"], cwd=root, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"labkit: needs Python 3.11 or later, and {old} is Python 3.8.2: install a newer one" in done.stderr


@needs_make
def test_an_absent_python_is_named(root: Path) -> None:
    done = subprocess.run(["make", "setup", "PYTHON=no-such-python"], cwd=root, capture_output=True, text=True)
    assert done.returncode != 0
    assert "labkit: there is no no-such-python on the PATH: install Python 3.11 or later." in done.stderr


@needs_make
def test_make_alone_tells_what_it_can_do(root: Path) -> None:
    done = subprocess.run(["make"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and all(f"make {target}" in done.stdout for target in ("lab", "test", "run"))


def test_the_second_setup_has_nothing_to_do(environment: Path, steps: list[str]) -> None:
    set_up(environment, "cuda")
    assert steps == ["PyTorch", "JupyterLab, the tests and labkit"]
    set_up(environment, "cuda")
    assert len(steps) == 2
    set_up(environment, None)  # without TORCH the build that is here stays
    assert len(steps) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's build is the CPU build")
def test_another_build_or_other_constraints_are_a_reason_to_install_again(
    environment: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path
) -> None:
    set_up(environment, "cuda")
    set_up(environment, "cpu")
    assert steps[2] == "PyTorch, the CPU build"
    assert torch_build(None, environment) == "cpu"
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    set_up(environment, None)
    with (tmp_path / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    set_up(environment, None)
    assert len(steps) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's build is the CPU build")
def test_the_cpu_build_comes_from_pytorchs_index_and_the_rest_from_pypi(root: Path) -> None:
    (_, first), (_, rest) = install_steps(PYTHON, "cpu", "")
    assert first[:4] == ["python", "-m", "pip", "install"]
    assert first[first.index("--index-url") + 1] == "https://download.pytorch.org/whl/cpu"
    assert "--no-deps" in first and "-c" not in first
    assert [word.partition("==")[0] for word in first[-2:]] == ["torch", "torchvision"]
    assert "--index-url" not in rest and rest[-1] == f"{root}[test]"
    assert rest[rest.index("-c") + 1] == str(root / "constraints.txt")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's build is the CPU build")
@pytest.mark.parametrize(
    ("build", "installed", "swapped"),
    [("cpu", "2.14.1", True), ("cuda", "2.14.1+cpu", True), ("cpu", "2.14.1+cpu", False), ("cuda", "2.14.1", False)],
)
def test_a_build_is_swapped_only_for_another(build: str, installed: str, swapped: bool) -> None:
    (_, first), _rest = install_steps(PYTHON, build, installed)
    assert ("--force-reinstall" in first) == swapped


def test_an_unknown_build_is_refused(environment: Path) -> None:
    with pytest.raises(Missing, match="TORCH=rocm is not known; take TORCH=cpu"):
        set_up(environment, "rocm")


def test_too_small_a_disk_is_named_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=1.2e9))
    with pytest.raises(Missing, match=r"has 1\.2 GB free and setting up takes \d+ GB: free some"):
        set_up(tmp_path / ".venv", "cpu")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("WARNING: Retrying after connection broken by NewConnectionError", "no network: the package index could not"),
        ("OSError: [Errno 28] No space left on device", "the disk filled up"),
        ("ERROR: No matching distribution found for torch==9", "pip could not install the packages: No matching"),
    ],
)
def test_a_failing_pip_is_explained_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, sentence: str
) -> None:
    log = tmp_path / "setup.log"
    with pytest.raises(Missing, match=sentence.replace("[", r"\[")) as raised:
        run_step("PyTorch", [sys.executable, "-c", f"print({said!r}); raise SystemExit(1)"], log)
    assert len(str(raised.value).splitlines()) == 1
    assert said in log.read_text()
    assert capsys.readouterr().out == "labkit: PyTorch\n"


def test_the_setup_script_needs_nothing_installed(root: Path) -> None:
    command = [sys.executable, "-I", "-S", str(root / "labkit" / "bootstrap.py"), "--dry-run", "--torch=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.defpath})
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2

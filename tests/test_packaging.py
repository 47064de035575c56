"""The project's own files agree with each other, and its code with its rules."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

CONDA_NAMES = {"torch": "pytorch", "jupyter-client": "jupyter_client"}
# what PyTorch's CUDA build brings along and pins itself
CUDA = re.compile(r"nvidia-|cuda-|triton")


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    about: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return about


@pytest.fixture(scope="module")
def ranges(project: dict[str, Any]) -> dict[str, SpecifierSet]:
    return {canonicalize_name(item.name): item.specifier for item in map(Requirement, project["dependencies"])}


@pytest.fixture(scope="module")
def exact(root: Path) -> dict[str, str]:
    lines = (root / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_conda_environment_has_the_packages_and_ranges_of_pyproject(
    root: Path, project: dict[str, Any], ranges: dict[str, SpecifierSet]
) -> None:
    listed = yaml.safe_load((root / "environment.yml").read_text())["dependencies"]
    conda = {item.name: item.specifier for item in map(Requirement, [one for one in listed if isinstance(one, str)])}
    assert conda.pop("python") == SpecifierSet(project["requires-python"])
    assert conda.pop("pip") == SpecifierSet()
    assert conda == {CONDA_NAMES.get(name, name): specifier for name, specifier in ranges.items()}
    assert listed[-1] == {"pip": ["-e .[test]"]}


def test_constraints_pin_every_dependency_within_its_range(project: dict[str, Any], exact: dict[str, str]) -> None:
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for requirement in map(Requirement, wanted):
        version = exact[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_constraints_suit_every_platform(root: Path, exact: dict[str, str]) -> None:
    text = (root / "constraints.txt").read_text()
    assert not [name for name in exact if CUDA.match(name)]
    assert "://" not in text and "+cpu" not in text and " @ " not in text
    assert "labkit" not in exact


def test_every_package_that_labkit_imports_is_a_dependency(root: Path, ranges: dict[str, SpecifierSet]) -> None:
    distributions = packages_distributions()
    imported = {}
    for path in (root / "labkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules = [node.module]
            for module in modules:
                imported[module.partition(".")[0]] = path
    for package in imported.keys() - sys.stdlib_module_names - {"labkit"}:
        names = {canonicalize_name(name) for name in distributions.get(package, [package])}
        assert names & ranges.keys(), f"{imported[package]} imports {package}, which pyproject.toml does not name"


def test_help_comes_without_torch_or_jupyter() -> None:
    code = """
import sys
from labkit.cli import main
main(["--help"])
heavy = {"torch", "IPython", "papermill", "nbformat", "matplotlib", "psutil", "numpy"} & sys.modules.keys()
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "labkit COMMAND --help" in done.stdout


def test_every_command_that_help_lists_can_be_asked_for_help() -> None:
    from labkit.cli import available

    for name in available():
        done = subprocess.run([sys.executable, "-m", "labkit", name, "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and f"labkit {name}" in done.stdout, done.stdout + done.stderr


def test_an_unknown_command_is_refused_in_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-m", "labkit", "dance"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("labkit: there is no command 'dance'; there are: ")
    assert len(done.stderr.splitlines()) == 1


# fmt: off
ROOMS = [
    "words", "record", "collectives", "mesh", "ranks", "models", "data", "precision", "memory", "parallel", "train",
    "verify", "plan", "show", "learn", "bench", "cli",
]
# fmt: on


def test_a_room_imports_only_from_rooms_before_it(root: Path) -> None:
    for path in (root / "labkit").rglob("*.py"):
        room = path.relative_to(root / "labkit").parts[0].removesuffix(".py")
        if room not in ROOMS:  # the package itself, and what runs before anything is installed
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("labkit"):
                modules = [node.module] if node.module != "labkit" else [f"labkit.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names if alias.name.startswith("labkit.")]
            else:
                continue
            for other in [module.split(".")[1] for module in modules if module.split(".")[1:]]:
                allowed = other not in ROOMS or ROOMS.index(other) <= ROOMS.index(room)
                assert allowed, f"{path.relative_to(root)}, line {node.lineno}: {room} may not import {other}"


def test_no_text_names_a_place_on_one_machine(root: Path) -> None:
    ours = [path for folder in ("labkit", "tests", "notebooks", ".ci") for path in (root / folder).rglob("*")]
    texts = [path for path in ours if path.suffix in {".py", ".md", ".ipynb", ""} and path.is_file()]
    texts += [path for path in root.iterdir() if path.is_file() and path.suffix in {".md", ".toml", ".txt", ".yml", ""}]
    local = re.compile(r"(?<![\w.])/(?:root|work|home)/\w")
    for path in texts:
        if path.name == "test_packaging.py" or "__pycache__" in path.parts:
            continue
        found = local.search(path.read_text(errors="ignore"))
        assert not found, f"{path.relative_to(root)} names {found.group()}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_what_the_readme_and_its_fellows_link_to_is_there(root: Path, name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (root / name).read_text())
    assert [link for link in links if "://" not in link and not (root / link).exists()] == []


def test_every_command_that_the_readme_names_is_there(root: Path) -> None:
    from labkit.cli import available

    text = (root / "README.md").read_text()
    assert set(re.findall(r"(?:^|`)labkit ([a-z]+)", text, re.MULTILINE)) <= set(available())
    makefile = (root / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE))


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"]], ids=["lint", "format"])
def test_code_is_clean_for_ruff(root: Path, command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command, "."], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_labkit_is_clean_for_strict_mypy(root: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(line[:300] for line in done.stdout.splitlines()) + done.stderr

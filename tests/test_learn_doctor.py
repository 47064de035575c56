"""`labkit doctor` names what is missing, with a remedy for each line."""

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.learn import doctor, machine_checks, software_checks
from labkit.learn.doctor import describe, diagnose, doctor_command
from labkit.learn.finding import Finding

GOOD = {"a": lambda: Finding("a", "ok", "fine")}
NOTED = {"b": lambda: Finding("b", "note", "slow", "be patient")}
BAD = {"c": lambda: Finding("c", "missing", "absent", "install it")}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Callable[[], Finding]]], None]:
    return lambda checks: monkeypatch.setattr(doctor, "CHECKS", checks)


def test_every_check_works_here_and_the_machine_that_runs_the_tests_is_ready() -> None:
    findings = list(diagnose())
    names = "Python packages kernel browser data memory disk cores threads GPUs ranks"
    assert set(names.split()) <= {finding.name for finding in findings}
    assert [describe(finding) for finding in findings if finding.status == "missing"] == []
    assert all(finding.found for finding in findings)


def test_two_ranks_really_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_checks.check_gloo().status == "ok"
    monkeypatch.setattr(machine_checks, "_add_up", lambda: 4.0)
    finding = machine_checks.check_gloo()
    assert finding.status == "missing" and "[4.0, 4.0]" in finding.found

    def fail() -> float:
        raise ValueError("no loopback")

    monkeypatch.setattr(machine_checks, "_add_up", fail)
    finding = machine_checks.check_gloo()
    assert finding.status == "missing" and "no loopback" in finding.found and finding.remedy


@pytest.mark.parametrize(
    ("checks", "code", "last"),
    [
        (GOOD | NOTED, 0, "Ready: the lessons run on this machine."),
        (GOOD | BAD, 1, "Not ready: c."),
    ],
)
def test_the_exit_code_and_the_last_line_say_whether_lessons_run(
    only: Callable[[object], None],
    capsys: pytest.CaptureFixture[str],
    checks: dict[str, Callable[[], Finding]],
    code: int,
    last: str,
) -> None:
    only(checks)
    assert doctor_command([]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_each_line_that_is_not_fine_has_its_remedy(
    only: Callable[[object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    only(NOTED | BAD)
    doctor_command([])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        ["note", "b", "slow"],
        ["->", "be", "patient"],
        ["MISSING", "c", "absent"],
        ["->", "install", "it"],
    ]


def test_json_says_the_same(only: Callable[[object], None], capsys: pytest.CaptureFixture[str]) -> None:
    only(GOOD | BAD)
    assert doctor_command(["--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ready"] is False
    assert said["findings"][1] == {"name": "c", "status": "missing", "found": "absent", "remedy": "install it"}


def test_a_check_that_breaks_is_a_finding(only: Callable[[object], None]) -> None:
    def broken() -> Finding:
        raise OSError("strange")

    only({"d": broken} | GOOD)
    first, second = diagnose()
    assert first.status == "missing" and "OSError: strange" in first.found and second.status == "ok"


def test_absent_packages_wrong_ranges_and_untested_versions_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"good": "1.0", "old": "0.5", "newer": "1.1", "torch": "2.14.1+cpu"}

    def version(name: str) -> str:
        if name not in here:
            raise PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(software_checks, "version", version)
    monkeypatch.setattr(software_checks, "constraints", lambda: {"newer": "1.0", "torch": "2.14.1"})
    for requirements, status, found in (
        (["good", "torch>=2"], "ok", "all 2 as tested"),
        (["good", "absent>=1"], "missing", "absent is absent"),
        (["old>=1"], "missing", "old 0.5 (>=1)"),
        (["newer>=1"], "note", "other versions than were tested: newer 1.1 (1.0)"),
        (["good", "absent; extra == 'test'"], "ok", "all 1 as tested"),
    ):
        monkeypatch.setattr(software_checks, "requires", lambda _name, listed=requirements: listed)
        finding = software_checks.check_packages()
        assert (finding.status, finding.found) == (status, found)


@pytest.mark.parametrize(("free_gb", "status"), [(1.0, "missing"), (3.0, "note"), (8.0, "ok")])
def test_free_memory_is_judged(monkeypatch: pytest.MonkeyPatch, free_gb: float, status: str) -> None:
    memory = SimpleNamespace(total=16e9, available=free_gb * 1e9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(machine_checks, "_container_memory", lambda: (None, 0))
    assert machine_checks.check_memory().status == status
    memory.available = 8e9
    monkeypatch.setattr(machine_checks, "_container_memory", lambda: (10_000_000_000, int((10 - free_gb) * 1e9)))
    finding = machine_checks.check_memory()
    assert finding.status == status and finding.found == f"{free_gb:.1f} of 10.0 GB free"


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    assert machine_checks._container_memory(tmp_path) == (4000000000, 1000000000)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_checks._container_memory(tmp_path) == (None, 0)
    assert machine_checks._container_memory(tmp_path / "none") == (None, 0)


def test_a_full_disk_and_little_shared_memory_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for free_gb, disk, shared in ((0.05, "missing", "note"), (1.0, "note", "ok"), (50.0, "ok", "ok")):
        monkeypatch.setattr("shutil.disk_usage", lambda _folder, free=free_gb: SimpleNamespace(free=free * 1e9))
        assert machine_checks.check_disk().status == disk
        assert machine_checks.check_shared_memory(tmp_path).status == shared


def test_one_core_is_noted_but_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, status in ((1, "note"), (2, "ok")):
        monkeypatch.setattr(machine_checks, "usable_cores", lambda count=cores: count)
        assert machine_checks.check_cores().status == status


def test_without_a_display_the_remedy_is_the_printed_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software_checks, "has_display", lambda: False)
    finding = software_checks.check_browser()
    assert finding.status == "note" and "prints the address" in finding.remedy


def test_damaged_data_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert software_checks.check_data().status == "ok"
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    finding = software_checks.check_data()
    assert finding.status == "missing" and "git checkout data" in finding.remedy

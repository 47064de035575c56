"""`labkit doctor`: what this machine can do for the workbook and what is missing, each line with its remedy."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from labkit.learn.finding import Finding
from labkit.learn.machine_checks import MACHINE_CHECKS
from labkit.learn.software_checks import SOFTWARE_CHECKS
from labkit.words import _

CHECKS: dict[str, Callable[[], Finding]] = {**SOFTWARE_CHECKS, **MACHINE_CHECKS}


def diagnose(checks: Mapping[str, Callable[[], Finding]] | None = None) -> Iterator[Finding]:
    """Carry out the checks one after another. A check that breaks is itself a finding."""
    for name, check in (CHECKS if checks is None else checks).items():
        try:
            yield check()
        except Exception as error:
            found = _("the check itself failed: {error}").format(error=f"{type(error).__name__}: {error}")
            yield Finding(name, "missing", found, _("remove .venv and run make lab again"))


def doctor_command(arguments: Sequence[str]) -> int:
    """Look at this machine. Exit code 0: the lessons run; 1: something that they need is missing."""
    parser = argparse.ArgumentParser(prog="labkit doctor", description=doctor_command.__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    asked = parser.parse_args(arguments)
    findings = []
    for finding in diagnose():
        findings.append(finding)
        if not asked.json:
            print(describe(finding), flush=True)
    missing = [finding.name for finding in findings if finding.status == "missing"]
    if asked.json:
        print(json.dumps({"ready": not missing, "findings": [asdict(finding) for finding in findings]}, indent=1))
    elif missing:
        print(_("Not ready: {missing}.").format(missing=", ".join(missing)))
    else:
        print(_("Ready: the lessons run on this machine."))
    return 1 if missing else 0


def describe(finding: Finding) -> str:
    """One finding as one line, with its remedy on the next."""
    mark = {"ok": _("ok"), "note": _("note"), "missing": _("MISSING")}[finding.status]
    line = f"{mark:<8}{finding.name:<14} {finding.found}"
    return f"{line}\n{'':<8}{'':<14} -> {finding.remedy}" if finding.remedy else line

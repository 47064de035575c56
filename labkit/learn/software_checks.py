"""What is installed: Python, the packages, the Jupyter kernel, a browser, the data that come with the workbook."""

import shutil
import sys
import webbrowser
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from labkit.learn.finding import Finding
from labkit.learn.lessons import ROOT
from labkit.learn.opening import has_display
from labkit.words import _

OLDEST = (3, 11)


def check_python() -> Finding:
    """Python 3.11 or later."""
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} ({sys.executable})"
    if sys.version_info < OLDEST:
        return Finding("Python", "missing", found, _("install Python 3.11 or later, remove .venv, run make lab"))
    return Finding("Python", "ok", found)


def constraints(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """The exact versions by package that the tests ran with; empty where the file isn't there."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {name.lower(): number for name, _equals, number in (line.partition("==") for line in lines)}


def check_packages() -> Finding:
    """The packages that labkit needs, against its ranges (must) and the versions it was tested with (should)."""
    absent, outside, different, count = [], [], [], 0
    exact = constraints()
    for requirement in map(Requirement, requires("labkit") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            absent.append(requirement.name)
            continue
        tested = exact.get(requirement.name.lower(), here)
        if not requirement.specifier.contains(here, prereleases=True):
            outside.append(f"{requirement.name} {here} ({requirement.specifier})")
        elif here.partition("+")[0] != tested:
            different.append(f"{requirement.name} {here} ({tested})")
    if absent or outside:
        wrong = [*(_("{name} is absent").format(name=name) for name in absent), *outside]
        return Finding("packages", "missing", ", ".join(wrong), _("run make lab again, or: pip install -e ."))
    if different:
        found = _("other versions than were tested: {different}").format(different=", ".join(different))
        return Finding("packages", "note", found, _("pip install -c constraints.txt -e . takes the tested ones"))
    return Finding("packages", "ok", _("all {count} as tested").format(count=count))


def check_kernel() -> Finding:
    """JupyterLab's Python is this one."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv
    except NoSuchKernel:
        return Finding("kernel", "missing", _("no kernel python3"), _("pip install ipykernel into this environment"))
    own = command[0] in ("python", "python3") or Path(command[0]).resolve() == Path(sys.executable).resolve()
    if not own:
        remedy = _(
            "remove that kernel, `jupyter kernelspec remove python3`, or choose this environment's in JupyterLab"
        )
        return Finding("kernel", "missing", _("python3 is another Python: {path}").format(path=command[0]), remedy)
    return Finding("kernel", "ok", _("python3 runs this Python"))


def check_browser() -> Finding:
    """A browser that can show JupyterLab here."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if has_display():
        try:
            return Finding("browser", "ok", getattr(webbrowser.get(), "name", "") or _("the system's own"))
        except webbrowser.Error:
            pass
    else:
        found = _("no display here") + (_("; {path} is installed").format(path=chromium) if chromium else "")
        remedy = _("make lab prints the address: open it on the machine before you, through ssh -L if need be")
        return Finding("browser", "note", found, remedy)
    return Finding("browser", "note", _("none found"), _("install one, or open the address that make lab prints"))


def check_data() -> Finding:
    """The embedded data sets are whole."""
    from labkit.data.errors import DataError
    from labkit.data.fetching import status, verify

    names = [found.entry.name for found in status() if found.state == "embedded"]
    try:
        files = sum(verify(name) for name in names)
    except DataError as error:
        return Finding(
            "data", "missing", str(error), _("restore the folder data/ from the repository: git checkout data")
        )
    return Finding(
        "data", "ok", _("{names}: {files} files, checksums right").format(names=", ".join(names), files=files)
    )


SOFTWARE_CHECKS = {
    "Python": check_python,
    "packages": check_packages,
    "kernel": check_kernel,
    "browser": check_browser,
    "data": check_data,
}

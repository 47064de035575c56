"""Look at a notebook as pictures: `python -m tests.browser NOTEBOOK FOLDER [--no-run]`.

Opens it in JupyterLab, runs all its cells, and leaves a PNG of each part in the folder, in the light and the dark
theme. For authors of lessons: look at them from top to bottom after each change.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from .labpage import open_browser
from .server import LabServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--no-run", action="store_true", help="as it is, without running the cells")
    parser.add_argument("--seconds", type=float, default=300, help="how long Run All may take (300)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labkit-look-") as home:
        source = Path(home) / "source"
        source.mkdir()
        shutil.copy(arguments.notebook, source)
        for beside in arguments.notebook.absolute().parent.iterdir():
            if beside.is_dir() and not beside.name.startswith("."):
                shutil.copytree(beside, source / beside.name)
        with LabServer(source, Path(home)) as server, open_browser(server) as lab:
            lab.open(arguments.notebook.name)
            if not arguments.no_run:
                lab.run_all()
                lab.wait_done(arguments.seconds)
            errors = lab.errors()
            for theme in ("light", "dark"):
                for path in lab.screenshots(arguments.folder, theme=theme):
                    print(path)
    print("\n".join(errors) or "no errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Type-checks each package in a run of its own, in which what it must not import is empty.

One run over everything would find torch for the core because the worker needs it. Here an empty stub takes the place of
torch and of the other services, so that whatever is used of them is an error. (An import that is not used is found by
the linter and the import contracts.)

The worker is checked beside the others, which go one after another and share what was found of the libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("tercet_frontend", "tercet_core", "tercet_worker")
LANES = (("tercet_worker",), ("tercet_shared", "tercet_tools", "tercet_frontend", "tercet_core"))
"""Packages that are checked one after another, with one cache; the lanes run at the same time."""


def forbidden(package: str) -> list[str]:
    """Returns the modules that ``package`` must not import."""
    others = [name for name in SERVICES if name != package]
    return others if package == "tercet_worker" else [*others, "torch"]


def check(package: str, root: Path = ROOT, paths: tuple[Path, ...] = ()) -> tuple[int, str]:
    """Runs the checker over ``package`` and returns its exit status and what it says.

    Args:
        package: import name.
        root: the directory whose pyproject.toml holds the settings.
        paths: further directories in which packages are looked for.
    """
    with tempfile.TemporaryDirectory() as stubs:
        for name in forbidden(package):
            stub = Path(stubs) / name / "__init__.pyi"
            stub.parent.mkdir()
            stub.touch()
        env = os.environ | {"MYPYPATH": os.pathsep.join(map(str, (stubs, *paths)))}
        cache = ROOT / ".mypy_cache" / ("with-torch" if package == "tercet_worker" else "without-torch")
        command = [sys.executable, "-m", "mypy", f"--cache-dir={cache}", "--no-error-summary", "-p", package]
        done = subprocess.run(
            command, check=False, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout


def check_all(packages: tuple[str, ...]) -> bool:
    """Checks packages one after another, says what was found, and returns whether all is well."""
    well = True
    for package in packages:
        status, said = check(package)
        print(f"mypy -p {package}\n{said}", end="", flush=True)  # in one piece, since lanes print at the same time
        well &= status == 0
    return well


def main() -> int:
    """Returns 1 if any run found an error."""
    with ThreadPoolExecutor(len(LANES)) as pool:
        return int(not all(list(pool.map(check_all, LANES))))


if __name__ == "__main__":
    sys.exit(main())

"""Type-checks each package in a run of its own, in which what it must not import is empty.

One run over everything would find torch for the core because the worker needs it. Here an empty stub takes the place of
torch and of the other services, so that whatever is used of them is an error. (An import that is not used is found by
the linter and the import contracts.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("tercet_frontend", "tercet_core", "tercet_worker")
PACKAGES = ("tercet_shared", "tercet_tools", *SERVICES)


def forbidden(package: str) -> list[str]:
    """Returns the modules that ``package`` must not import."""
    others = [name for name in SERVICES if name != package]
    return others if package == "tercet_worker" else [*others, "torch"]


def check(package: str, root: Path = ROOT, paths: tuple[Path, ...] = ()) -> int:
    """Runs the checker over ``package`` and returns its exit status.

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
        cache = ROOT / ".mypy_cache" / package
        command = [sys.executable, "-m", "mypy", f"--cache-dir={cache}", "--no-error-summary", "-p", package]
        return subprocess.run(command, check=False, cwd=root, env=env).returncode


def main() -> int:
    """Returns 1 if any run found an error."""
    failed = False
    for package in PACKAGES:
        print(f"mypy -p {package}", flush=True)
        failed |= check(package) != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

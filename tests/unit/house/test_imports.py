"""Front end, core and library work in an environment without torch: every module of them is imported without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SERVICES = {"tercet_frontend", "tercet_core", "tercet_worker"}

IMPORT_ALL = """
import importlib, pkgutil, sys
package, *hidden = sys.argv[1:]
for name in hidden:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
root = importlib.import_module(package)
names = [module.name for module in pkgutil.walk_packages(root.__path__, package + ".")]
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
print(len(names))
"""


def import_all(package: str, *hidden: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, package, *hidden]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["tercet_shared", "tercet_proto", "tercet_tools", "tercet_frontend", "tercet_core"])
def test_imports_without_torch_and_without_the_other_services(package: str) -> None:
    done = import_all(package, "torch", "transformers", *sorted(SERVICES - {package}))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_the_worker_imports_without_the_other_services() -> None:
    done = import_all("tercet_worker", "tercet_frontend", "tercet_core", "fastapi", "uvicorn")
    assert done.returncode == 0, done.stderr


def test_the_check_itself_notices_an_import_of_torch() -> None:
    done = import_all("tercet_worker", "torch")
    assert done.returncode != 0
    assert "import of torch halted" in done.stderr

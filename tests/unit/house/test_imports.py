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
of_gpu = ("tercet_worker.cuda.", "tercet_worker.platforms.cuda", "tercet_worker.attention.flashinfer")
for name in names:
    if not name.endswith(".__main__"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # What the extra `cuda` brings is needed by the modules of the GPU, and by no others.
            if error.name not in {"triton", "triton.language", "flashinfer"} or not name.startswith(of_gpu):
                raise
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


@pytest.mark.parametrize("extra", [(), ("triton", "flashinfer")])
def test_the_worker_imports_without_the_other_services_and_without_its_extra(extra: tuple[str, ...]) -> None:
    done = import_all("tercet_worker", "tercet_frontend", "tercet_core", "fastapi", "uvicorn", *extra)
    assert done.returncode == 0, done.stderr


def test_the_check_itself_notices_an_import_of_torch() -> None:
    done = import_all("tercet_worker", "torch")
    assert done.returncode != 0
    assert "import of torch halted" in done.stderr

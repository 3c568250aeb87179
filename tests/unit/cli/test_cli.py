from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from tercet_shared.cli import SERVICES, TOOLS, main


def test_help_names_every_command_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("serve", *SERVICES):
        assert f"tercet {command}" in out


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tercet {version('tercet-shared')}\n"


@pytest.mark.parametrize("argv", [[], ["conduct"]])
def test_wrong_usage_is_exit_code_2_on_standard_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


def test_a_wrong_value_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", "--port", "many"]) == 2
    assert capsys.readouterr().err.startswith("error: --port (TERCET_PORT): ")


@pytest.mark.parametrize("command", SERVICES)
def test_a_service_is_executed_with_the_same_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []

    def execv(_program: str, argv: list[str]) -> None:
        executed.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        main([command, "--log-level", "debug"])
    assert executed == [[sys.executable, "-m", SERVICES[command], "--log-level", "debug"]]


@pytest.mark.parametrize("argv", [["worker"], ["serve", "model"]])
def test_a_missing_service_is_one_sentence(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tercet_worker" else found(name))
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the worker is not installed in this environment: `pip install tercet-worker`")
    assert len(err.splitlines()) == 1


def test_the_installed_command_runs_and_imports_no_service() -> None:
    program = (
        "import sys; from tercet_shared.cli import main; main(['--help']);"
        "assert not {'tercet_frontend', 'tercet_core', 'tercet_worker', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    command = os.path.join(os.path.dirname(sys.executable), "tercet")  # noqa: PTH118, PTH120  # beside the interpreter
    assert subprocess.run([command, "--version"], check=True, capture_output=True).stdout.startswith(b"tercet ")


@pytest.mark.parametrize("command", ["", "serve", *SERVICES, *TOOLS])
def test_nobody_reads_the_help_to_its_end(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-c", "import sys; from tercet_shared.cli import main; sys.exit(main())"]
    done = subprocess.run([*argv, *command.split(), "--help"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode in {0, 1}

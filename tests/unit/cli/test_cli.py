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


_COMMAND = [sys.executable, "-c", "import sys; from tercet_shared.cli import main; sys.exit(main())"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["--help", "--version", *(f"{name} --help" for name in ("serve", *SERVICES, *TOOLS))]
)
def test_nobody_reads_the_help_to_its_end(command: str, unbuffered: str) -> None:
    done = _without_reader(command, unbuffered)
    assert done.stderr == b""
    assert done.returncode in {0, 1}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_result_that_nobody_reads_is_no_success(unbuffered: str) -> None:
    done = _without_reader("key new alice", unbuffered)
    assert b"Traceback" not in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["--help", "serve --help", "doctor --help", "key new alice"])
def test_standard_output_may_be_closed(command: str) -> None:
    shell = ["sh", "-c", '"$@" >&-', "sh"]
    done = subprocess.run([*shell, *_COMMAND, *command.split()], stderr=subprocess.PIPE, check=False)
    assert b"Traceback" not in done.stderr
    assert done.returncode == 0


def test_another_pipe_that_breaks_is_not_taken_for_standard_output() -> None:
    program = (
        "from tercet_shared.output import while_it_is_read\n"
        "with while_it_is_read():\n    print('printed')\n    raise BrokenPipeError('socket')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stdout == b"printed\n"
    assert done.stderr.endswith(b"BrokenPipeError: socket\n")


def _without_reader(command: str, unbuffered: str) -> subprocess.CompletedProcess[bytes]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [*_COMMAND, *command.split()], stdout=writer, stderr=subprocess.PIPE, check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    finally:
        os.close(writer)

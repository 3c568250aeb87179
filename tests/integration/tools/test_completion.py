"""`tercet completion`: the scripts in the shells themselves; what they offer is what the commands take."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tercet_shared.cli import SERVICES, TOOLS
from tercet_shared.config import ServeSettings
from tercet_tools.bench.settings import BenchSettings
from tercet_tools.completion import scripts
from tercet_tools.completion.command import main
from tercet_tools.completion.commands import SHELLS, commands

BASH = shutil.which("bash") or "bash"
FISH = shutil.which("fish")


def bash(line: str, directory: Path) -> list[str]:
    """Returns what bash offers at the end of ``line``; its words are split as bash does, at ``=`` too."""
    words = line.replace("=", " = ").split()
    if line.endswith((" ", "=")):
        words.append("")
    program = scripts.bash(commands()) + (
        f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _tercet\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        [BASH, "--norc", "-u", "-c", program], capture_output=True, text=True, check=True, cwd=directory
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_every_command_is_offered(tmp_path: Path) -> None:
    assert set(bash("tercet ", tmp_path)) == {"serve", *SERVICES, *TOOLS, "--help", "--version"}
    assert bash("tercet d", tmp_path) == ["doctor"]
    assert bash("tercet bench ", tmp_path) == ["serve"]
    assert bash("tercet completion ", tmp_path) == list(SHELLS)
    assert bash("tercet completion f", tmp_path) == ["fish"]


def test_every_flag_is_offered(tmp_path: Path) -> None:
    def expected(kind: type[ServeSettings | BenchSettings], *without: str) -> set[str]:
        return {f"--{name.replace('_', '-')}" for name in kind.model_fields if name not in without}

    offered = set(bash("tercet serve -", tmp_path))
    assert expected(ServeSettings, "model", "report_fd") <= offered
    assert {"--no-prefix-caching", "--help"} <= offered
    assert "--model" not in offered
    assert "--report-fd" not in offered
    offered = set(bash("tercet bench serve -", tmp_path))
    assert expected(BenchSettings) | {"--json", "--plot", "--no-ignore-eos"} <= offered
    assert bash("tercet bench serve --conc", tmp_path) == ["--concurrency"]
    assert bash("tercet serve --port 80 --max-num-s", tmp_path) == ["--max-num-seqs"]


def test_values_are_offered_after_the_flag_that_takes_them(tmp_path: Path) -> None:
    assert bash("tercet serve --policy ", tmp_path) == ["priority", "fcfs", "fair"]
    assert bash("tercet serve --policy=", tmp_path) == ["priority", "fcfs", "fair"]
    assert bash("tercet serve --policy=f", tmp_path) == ["fcfs", "fair"]
    assert bash("tercet bench serve --endpoint c", tmp_path) == ["completions", "chat"]
    assert bash("tercet serve --port ", tmp_path) == []


def test_files_are_offered_for_models_and_paths(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "other").mkdir()
    assert bash("tercet serve mod", tmp_path) == ["model.gguf"]
    assert bash("tercet doctor --dtype float32 ", tmp_path) == ["model.gguf", "other"]
    assert bash("tercet serve --run-dir oth", tmp_path) == ["other"]
    assert bash("tercet bench serve --dataset=mod", tmp_path) == ["model.gguf"]
    assert bash("tercet bench serve --json mod", tmp_path) == ["model.gguf"]
    assert bash("tercet core mod", tmp_path) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_the_shell_takes(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    for command in commands():
        assert all(word in script.read_text() for word in command.words)
        for flag in command.flags:
            assert all(name.lstrip("-") in script.read_text() for name in flag.names)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True, capture_output=True)


def test_fish_offers_the_same(tmp_path: Path) -> None:
    if FISH is None:
        pytest.skip("fish is not installed")
    script = tmp_path / "tercet.fish"
    script.write_text(scripts.fish(commands()))

    def offered(line: str) -> list[str]:
        program = f"source {script}; complete -C '{line}'"
        done = subprocess.run([FISH, "-N", "-c", program], capture_output=True, text=True, check=True)
        return [row.partition("\t")[0] for row in done.stdout.splitlines()]

    assert offered("tercet d") == ["doctor"]
    assert offered("tercet bench ") == ["serve"]
    assert set(offered("tercet serve --policy ")) == {"priority", "fcfs", "fair"}
    assert offered("tercet bench serve --conc") == ["--concurrency"]
    assert offered("tercet completion ba") == ["bash"]


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage:" in capsys.readouterr().err


def test_the_help_says_where_scripts_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "source <(tercet completion bash)" in capsys.readouterr().out

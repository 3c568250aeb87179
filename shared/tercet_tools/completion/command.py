"""The command: ``tercet completion``."""

from __future__ import annotations

import sys
from typing import Final

from tercet_tools.completion import scripts
from tercet_tools.completion.commands import SHELLS, commands

_HELP: Final = """\
usage: tercet completion bash | zsh | fish

Prints a script that makes the shell complete commands, flags and values of `tercet`.

examples:
  source <(tercet completion bash)                                       now, in this shell
  tercet completion bash > ~/.local/share/bash-completion/completions/tercet
  tercet completion zsh > ~/.zfunc/_tercet                               with fpath+=~/.zfunc before compinit
  tercet completion fish > ~/.config/fish/completions/tercet.fish
"""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        sys.stderr.write(_HELP)
        return 2
    write = {"bash": scripts.bash, "zsh": scripts.zsh, "fish": scripts.fish}[arguments[0]]
    sys.stdout.write(write(commands()))
    return 0

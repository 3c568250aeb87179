"""The scripts for the three shells."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tercet_tools.completion.commands import Command, Flag

_GLOBAL: Final = ("--help", "--version")


def bash(commands: Sequence[Command]) -> str:
    """Returns the script for bash 4 or newer."""
    firsts = list(dict.fromkeys(command.words[0] for command in commands))
    known = []
    for command in commands:
        for depth, word in enumerate(command.words):
            before, after = (" ".join(command.words[:end]) for end in (depth, depth + 1))
            known.append(f'            "{before}|{word}") command={shlex.quote(after)} ;;')
    cases: list[str] = []
    for command in commands:
        words = " ".join(command.words)
        for flag in command.flags:
            if flag.takes_value:
                pattern = "|".join(f"{shlex.quote(f'{words} {name}')}" for name in flag.names)
                cases.append(f"        {pattern}) {_bash_value(flag)} ;;")
    for command in commands:
        words = " ".join(command.words)
        names = " ".join(name for flag in command.flags for name in flag.names)
        cases.append(
            f"        {shlex.quote(words + ' ')}*) _tercet_words {shlex.quote(names)} {_bash_plain(command)} ;;"
        )
    groups = sorted({command.words[0] for command in commands if len(command.words) > 1})
    for group in groups:
        inner = " ".join(command.words[1] for command in commands if command.words[0] == group)
        cases.append(f"        {shlex.quote(group + ' ')}*) _tercet_words {shlex.quote(inner)} {shlex.quote(inner)} ;;")
    firsts_text = " ".join([*firsts, *_GLOBAL])
    return (
        "\n".join(
            [
                "# bash completion for tercet; made by `tercet completion bash`",
                "_tercet_words() {  # flags, and what may stand without one: words, or nothing for files",
                "    if [[ $current == -* ]]; then",
                '        mapfile -t COMPREPLY < <(compgen -W "$1" -- "$current")',
                "    elif (($# > 1)); then",
                '        mapfile -t COMPREPLY < <(compgen -W "$2" -- "$current")',
                "    else",
                "        _tercet_files",
                "    fi",
                "}",
                "_tercet_files() {",
                "    compopt -o filenames 2>/dev/null",
                '    mapfile -t COMPREPLY < <(compgen -f -- "$current")',
                "}",
                "_tercet() {",
                "    local current=${COMP_WORDS[COMP_CWORD]} previous= command= word",
                "    ((COMP_CWORD > 0)) && previous=${COMP_WORDS[COMP_CWORD - 1]}",
                "    # --flag=value comes as three words",
                "    if [[ $current == = ]]; then",
                "        current=",
                "    elif [[ $previous == = ]]; then",
                "        previous=${COMP_WORDS[COMP_CWORD - 2]}",
                "    fi",
                "    COMPREPLY=()",
                '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
                '        case "$command|$word" in',
                *dict.fromkeys(known),
                "        esac",
                "    done",
                "    if [[ -z $command ]]; then",
                f'        mapfile -t COMPREPLY < <(compgen -W {shlex.quote(firsts_text)} -- "$current")',
                "        return",
                "    fi",
                '    case "$command $previous" in',
                *cases,
                "    esac",
                "}",
                "complete -F _tercet tercet",
            ]
        )
        + "\n"
    )


def _bash_value(flag: Flag) -> str:
    if flag.values:
        return f'mapfile -t COMPREPLY < <(compgen -W {shlex.quote(" ".join(flag.values))} -- "$current")'
    return "_tercet_files" if flag.files else ":"


def _bash_plain(command: Command) -> str:
    return "" if command.files else shlex.quote(" ".join(command.values))


def zsh(commands: Sequence[Command]) -> str:
    """Returns the script for zsh."""
    lines = ["#compdef tercet", "# zsh completion for tercet; made by `tercet completion zsh`"]
    for command in commands:
        lines.append(f"_tercet_{'_'.join(command.words)}() {{")
        lines.append("    _arguments \\")
        for flag in command.flags:
            lines.extend(f"        {spec} \\" for spec in _zsh_flag(flag))
        if command.files:
            lines.append("        '1:model:_files' \\")
        if command.values:
            lines.append(f"        '1:value:({' '.join(command.values)})' \\")
        lines += ["        '*: :'", "}"]
    groups: dict[str, list[Command]] = {}
    for command in commands:
        groups.setdefault(command.words[0], []).append(command)
    lines += ["_tercet() {", "    local -a found", "    if ((CURRENT == 2)); then", "        found=("]
    for first, group in groups.items():
        summary = group[0].summary if len(group[0].words) == 1 else f"{' '.join(c.words[1] for c in group)}"
        lines.append(f"            {shlex.quote(f'{first}:{summary}')}")
    lines += ["        )", "        _describe command found", "        return", "    fi", "    case $words[2] in"]
    for first, group in groups.items():
        if len(group[0].words) == 1:
            lines.append(f"        {first}) shift words; ((CURRENT--)); _tercet_{first} ;;")
            continue
        lines += [f"        {first})", "            if ((CURRENT == 3)); then", "                found=("]
        lines += [f"                    {shlex.quote(f'{c.words[1]}:{c.summary}')}" for c in group]
        lines += [
            "                )",
            "                _describe command found",
            "                return",
            "            fi",
        ]
        lines.append("            case $words[3] in")
        lines += [
            f"                {c.words[1]}) shift 2 words; ((CURRENT -= 2)); _tercet_{'_'.join(c.words)} ;;"
            for c in group
        ]
        lines += ["            esac", "            ;;"]
    lines += [
        "    esac",
        "}",
        "# loaded by the completion system, or sourced",
        'if [[ $funcstack[1] == _tercet ]]; then _tercet "$@"; else compdef _tercet tercet; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_flag(flag: Flag) -> list[str]:
    summary = flag.summary.translate({ord("["): "(", ord("]"): ")", ord(":"): "\\:"})
    action = f":value:({' '.join(flag.values)})" if flag.values else ":file:_files" if flag.files else ":value: "
    found = []
    for name in flag.names:
        repeats = "*" if flag.repeats else ""
        value = f"{'=' if flag.takes_value else ''}[{summary}]{action if flag.takes_value else ''}"
        found.append(shlex.quote(f"{repeats}{name}{value}"))
    return found


def fish(commands: Sequence[Command]) -> str:
    """Returns the script for fish."""
    lines = [
        "# fish completion for tercet; made by `tercet completion fish`",
        "function __tercet_is",
        "    set -l words (commandline -opc)",
        "    test (count $words) -gt (count $argv); or return 1",
        "    for i in (seq (count $argv))",
        "        test $words[(math $i + 1)] = $argv[$i]; or return 1",
        "    end",
        "end",
        "complete -c tercet -f",
        "complete -c tercet -n 'test (count (commandline -opc)) -eq 1' -l help -d 'Show the commands.'",
        "complete -c tercet -n 'test (count (commandline -opc)) -eq 1' -l version -d 'Show the version.'",
    ]
    for first in dict.fromkeys(command.words[0] for command in commands):
        summary = next(command.summary for command in commands if command.words[0] == first)
        lines.append(f"complete -c tercet -n 'test (count (commandline -opc)) -eq 1' -a {first} -d {_fish(summary)}")
    for command in commands:
        if len(command.words) > 1:
            before = " ".join(command.words[:-1])
            size = len(command.words)
            lines.append(
                f"complete -c tercet -n '__tercet_is {before}; and test (count (commandline -opc)) -eq {size}' "
                f"-a {command.words[-1]} -d {_fish(command.summary)}"
            )
        condition = f"-n '__tercet_is {' '.join(command.words)}'"
        for flag in command.flags:
            for name in flag.names:
                value = ""
                if flag.takes_value:
                    value = (
                        f" -x -a {_fish(' '.join(flag.values))}" if flag.values else " -r -F" if flag.files else " -x"
                    )
                lines.append(f"complete -c tercet {condition} -l {name[2:]}{value} -d {_fish(flag.summary)}")
        if command.files:
            lines.append(f"complete -c tercet {condition} -F")
        if command.values:
            lines.append(f"complete -c tercet {condition} -a {_fish(' '.join(command.values))}")
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    """Returns ``text`` quoted for fish, in which a backslash escapes within single quotes too."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

"""The command: ``tercet key``."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import shlex
import sys
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_PREFIX: Final = "tk-"
"""What keys begin with that are made here, so that people and scanners of leaked secrets know them."""

_KEY_BYTES: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_REDIS: Final = "tercet:1:api-key"

_DESCRIPTION: Final = """\
Makes an API key and its entry for --api-keys-file or for Redis. The entry goes to standard output and holds a hash;
the key itself goes to standard error, this once. `hash` makes the entry of a key that exists, read from standard input.
"""

_EXAMPLES: Final = """\
examples:
  tercet key new alice >> keys.toml
  tercet key new ci --tenant build --model 'smol-*' --requests-per-minute 60 >> keys.toml
  tercet key new bob --max-concurrent 8 --format redis | redis-cli
  pass show tercet | tercet key hash legacy --format json
"""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code: 0, or 2 for wrong usage."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    if options.action == "new":
        key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    else:
        key = sys.stdin.read().strip()
        if not key or not key.isascii() or not key.isprintable():
            print("error: no key came on standard input.", file=sys.stderr)  # noqa: T201  # the command's own output
            return 2
    print(_written(_entry(options, key), options.format))  # noqa: T201  # the command's own output
    if options.action == "new":
        # The only time that it is shown: nobody could make it of the hash.
        print(f"key of {options.name}: {key}", file=sys.stderr)  # noqa: T201  # the command's own output
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tercet key",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("new", "hash"), help="make a key, or take one from standard input")
    parser.add_argument("name", type=_name, help="what logs call it")
    parser.add_argument("--format", choices=("toml", "json", "redis"), default="toml")
    parser.add_argument("--tenant", type=_name, help="whose it is; by default the name's")
    parser.add_argument("--model", dest="models", action="append", help="that it may use, also a pattern; repeat it")
    for limit in ("max-concurrent", "requests-per-minute", "tokens-per-minute"):
        parser.add_argument(f"--{limit}", type=_limit)
    parser.add_argument("--priority", type=int, help="of requests that name none; smaller is served first")
    parser.add_argument("--best-priority", type=int, help="the smallest that a request may name")
    parser.add_argument("--expires", help="as 2030-01-01T00:00:00Z")
    return parser


def _entry(options: argparse.Namespace, key: str) -> dict[str, Any]:
    fields = {name: value for name, value in vars(options).items() if name not in {"action", "format", "name"}}
    entry = {"name": options.name, "hash": f"sha256:{sha256(key.encode()).hexdigest()}"}
    return entry | {name: value for name, value in fields.items() if value is not None}


def _written(entry: Mapping[str, Any], kind: str) -> str:
    if kind == "json":
        return json.dumps(entry)
    if kind == "toml":
        # Strings and lists of them are written alike in TOML and JSON.
        return "\n".join(["[[keys]]", *(f"{name} = {json.dumps(value)}" for name, value in entry.items()), ""])
    digest = entry["hash"].removeprefix("sha256:")
    words = ["HSET", f"{_REDIS}:{digest}"]
    for name, value in entry.items():
        if name != "hash":
            words += [name, ",".join(value) if isinstance(value, list) else str(value)]
    return shlex.join(words)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError("a name has up to 64 letters, digits and . _ @ -")
    return text


def _limit(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10**12:
        raise argparse.ArgumentTypeError("a limit is a number from 1 on")
    return int(text)

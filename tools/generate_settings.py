"""Writes what follows from the typed settings: docs/settings.md, and the chart's schema, list of flags and README.

The settings of `tercet_shared.config` have one description each, which is what `--help` shows. From there it also gets
into the documentation, and into what the chart's ``values.schema.json`` allows as ``settings``. The table of values in
the chart's README comes from that schema and ``values.yaml``. With ``--check`` nothing is written, and the exit status
is 1 if something would be.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ByteSize

from tercet_shared.config import Common, CoreSettings, FrontendSettings, WorkerSettings, is_positional

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = Path("docs/settings.md")
SCHEMA = Path("helm/tercet/values.schema.json")
FLAGS = Path("helm/tercet/files/flags.json")
VALUES = Path("helm/tercet/values.yaml")
CHART_README = Path("helm/tercet/README.md")

SERVICES: dict[str, type[BaseModel]] = {
    "frontend": FrontendSettings,
    "core": CoreSettings,
    "worker": WorkerSettings,
}
TITLES = {"frontend": "Front end", "core": "Core", "worker": "Worker"}

NOT_FOR_USERS = frozenset({
    "report_fd", "listen_fd", "process_socket", "accept_when_ready", "local_rank", "rendezvous_fd",
})  # fmt: skip
"""What processes of Tercet tell each other."""

CHART_SETS = frozenset({
    "advertise", "api_key", "api_keys_file", "core", "core_address", "core_id", "host", "link", "listen",
    "metrics_host", "metrics_port", "model", "mtls_ca", "mtls_cert", "mtls_key", "mtls_name", "node_rank", "nodes",
    "pipeline_parallel_size", "port", "redis_prefix", "redis_url", "rendezvous", "revision", "served_model_name",
    "tensor_parallel_size", "tls_cert", "tls_client_ca", "tls_key",
})  # fmt: skip
"""What the chart sets itself, from values of its own or from what Kubernetes knows."""

BYTES = {"type": ["integer", "string"], "pattern": r"^[0-9]+(\.[0-9]+)? *([kKmMgGtTpP]i?)?[bB]?$"}
_ANNOTATIONS = frozenset({"title", "default", "format", "description"})
BEGIN, END = "<!-- values: generated -->", "<!-- values: end -->"


def camel(name: str) -> str:
    """Returns ``max_requests`` as ``maxRequests``."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def for_chart(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the settings of a service that users of the chart may give, by their name in Python."""
    hidden = NOT_FOR_USERS | CHART_SETS
    return {name: info for name, info in kind.model_fields.items() if name not in hidden}


# ------------------------------------------------------------------------------------------------ JSON schema


def settings_schema(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Returns a strict schema of an object with the settings of ``kinds``, in camel case."""
    properties: dict[str, Any] = {}
    for kind in kinds:
        generated = kind.model_json_schema()["properties"]
        for name, info in for_chart(kind).items():
            properties[camel(name)] = _property(generated[name], info)
    return {"type": "object", "additionalProperties": False, "properties": dict(sorted(properties.items()))}


def _property(generated: dict[str, Any], info: FieldInfo) -> dict[str, Any]:
    choices = [part for part in generated.get("anyOf", [generated]) if part.get("type") != "null"]
    if _holds_bytes(info):
        allowed = BYTES
    else:
        (choice,) = choices
        allowed = {key: value for key, value in choice.items() if key not in _ANNOTATIONS}
    return {"description": info.description, **allowed}


def _holds_bytes(info: FieldInfo) -> bool:
    return info.annotation is ByteSize or ByteSize in getattr(info.annotation, "__args__", ())


def schema(root: Path) -> str:
    """Returns the chart's schema with the definitions of settings as they are now."""
    document = json.loads((root / SCHEMA).read_text())
    document["$defs"] |= {
        "commonSettings": settings_schema(Common),
        "frontendSettings": settings_schema(FrontendSettings),
        "modelSettings": settings_schema(CoreSettings, WorkerSettings),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def flags() -> str:
    """Returns which settings each service knows, so that the chart's templates can tell."""
    known = {name: sorted(camel(field) for field in for_chart(kind)) for name, kind in SERVICES.items()}
    return json.dumps(known, indent=2) + "\n"


# ------------------------------------------------------------------------------------------------ docs/settings.md


INTRODUCTION = """\
# Settings

Generated from `shared/tercet_shared/config.py` by `tools/generate_settings.py`; a test keeps it true.

Each setting is a flag or a variable of the environment; the flag wins. A wrong value stops the service at its start,
with the name of the setting. Where several values are allowed, repeat the flag; in a variable separate them by commas
or write a JSON list. Sizes may be written as `4GiB`. A switch is turned off with `--no-…`. `tercet serve` takes those
of all three services that concern a user ([README](../README.md#settings)); in the chart they are `settings`
([kubernetes.md](kubernetes.md#settings)).
"""


def document() -> str:
    """Returns the page with all settings of the three services."""
    parts = [INTRODUCTION]
    for name, kind in SERVICES.items():
        parts.append(f"## {TITLES[name]}: `tercet {name}`\n")
        parts.append("| flag | environment | default | what |\n|---|---|---|---|")
        parts.extend(_row(field, info) for field, info in kind.model_fields.items() if field not in NOT_FOR_USERS)
        parts.append("")
    return "\n".join(parts)


def _row(name: str, info: FieldInfo) -> str:
    flag = f"--{name.replace('_', '-')}"
    if is_positional(name, info):
        flag = name.upper() if info.is_required() else f"{name.upper()} …"
    return f"| `{flag}` | `TERCET_{name.upper()}` | {_default(info)} | {_cell(info.description or '')} |"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ([], ""):
        return ""
    if _holds_bytes(info):
        return str(ByteSize(value).human_readable()).replace(".0", "")
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ------------------------------------------------------------------------------------------------ the chart's README


def readme(root: Path, document: dict[str, Any]) -> str:
    """Returns the chart's README with a row for each value that ``document``, its schema, describes."""
    text = (root / CHART_README).read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    defaults = yaml.safe_load((root / VALUES).read_text())
    lines = ["", "| value | default | what |", "|---|---|---|"]
    lines.extend(
        f"| `{path}` | {_shown(_at(defaults, path))} | {_cell(text)} |" for path, text in _described(document, document)
    )
    return f"{before}{BEGIN}\n{chr(10).join(lines)}\n\n{END}{after}"


def _described(document: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields path and description of each value; what is defined once for several places appears once."""
    node = _resolved(document, node)
    entries = list(node.get("properties", {}).items())
    if isinstance(node.get("additionalProperties"), dict):
        entries.append(("NAME", node["additionalProperties"]))
    for name, entry in entries:
        here = f"{path}.{name}" if path else name
        if "description" in entry:
            yield here, entry["description"]
        elif name != "NAME":
            continue  # what is described elsewhere
        if not str(entry.get("$ref", "")).endswith("Settings"):  # docs/settings.md has those
            yield from _described(document, entry, here)


def _resolved(document: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return document["$defs"][reference.rpartition("/")[2]] if reference else node


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return None
        values = values[name]
    return values


def _shown(value: Any) -> str:
    if value is None or value in ({}, [], ""):
        return ""
    if isinstance(value, dict) and any(isinstance(each, (dict, list)) or each == "" for each in value.values()):
        return ""  # its parts have rows of their own
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{text}`"


def generated(root: Path = ROOT) -> dict[Path, str]:
    """Returns the content of every file that is written, by its path under ``root``."""
    new_schema = schema(root)
    return {
        DOCUMENT: document(),
        SCHEMA: new_schema,
        FLAGS: flags(),
        CHART_README: readme(root, json.loads(new_schema)),
    }


def differences(root: Path = ROOT) -> list[str]:
    """Returns the files that are not what they should be."""
    return [
        str(path)
        for path, content in generated(root).items()
        if not (root / path).is_file() or (root / path).read_text() != content
    ]


def main() -> int:
    """Returns 1 if --check found a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    if not parser.parse_args().check:
        for path, content in generated().items():
            (ROOT / path).write_text(content)
        return 0
    changed = differences()
    for name in changed:
        print(f"{name} does not match the settings: run tools/generate_settings.py", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

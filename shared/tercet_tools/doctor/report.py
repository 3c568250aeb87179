"""What the doctor saw, as text for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tercet_tools.doctor.model import KV_SHARE, Model

if TYPE_CHECKING:
    from tercet_tools.doctor.examination import Examination

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_WIDTH = 20
_MARKS = {"missing": "✗", "warning": "!"}


def as_text(seen: Examination) -> str:
    """Returns the report."""
    lines = [f"Tercet {seen.packages.versions['tercet-shared'] or ''} · Python {seen.python} · {seen.system}"]
    lines += _section("processor", _processor(seen))
    lines += _section("memory", _memory(seen))
    if seen.gpus:
        lines += _section("GPUs", [(gpu.name, f"{size(gpu.free)} of {size(gpu.memory)} free") for gpu in seen.gpus])
    lines += _section("software", _software(seen))
    lines += _section("network", _network(seen))
    if seen.model is not None:
        lines += _section("model", _model(seen.model, seen))
    findings = seen.findings()
    lines.append("")
    for finding in findings:
        lines += [f"{_MARKS[finding.level]} {finding.text}", f"  → {finding.advice}"]
    if not findings:
        lines.append("Nothing is missing.")
    return "\n".join(lines) + "\n"


def as_json(seen: Examination) -> dict[str, Any]:
    """Returns everything as JSON values; sizes are bytes, rates bytes or tokens per second."""
    processor, memory, network, kernels = seen.processor, seen.memory, seen.network, seen.kernels
    return {
        "system": seen.system,
        "python": seen.python,
        "processor": {
            "name": processor.name,
            "machine": processor.machine,
            "instruction_sets": processor.instruction_sets,
            "online": processor.online,
            "usable": processor.usable,
            "quota": processor.quota,
            "load": processor.load,
        },
        "memory": {
            "total": memory.total,
            "available": memory.available,
            "cgroup_limit": memory.limit,
            "swap": memory.swap,
            "transparent_huge_pages": memory.transparent,
            "reserved_huge_pages": {"count": memory.reserved_pages[0], "size": memory.reserved_pages[1]},
            "read_bandwidth": seen.bandwidth,
        },
        "gpus": [asdict(gpu) for gpu in seen.gpus],
        "packages": seen.packages.versions,
        "kernels": {
            "compiler": kernels.compiler,
            "compiler_version": kernels.compiler_version,
            "cache": str(kernels.cache),
            "built": kernels.built,
        },
        "network": {
            "open_files": {"soft": network.files[0], "hard": network.files[1]},
            "address": network.address,
            "address_free": not network.port_problem,
            "redis": network.redis,
            "redis_reachable": None if network.redis is None else not network.redis_problem,
        },
        "model": None if seen.model is None else _model_json(seen.model, seen),
        "findings": [asdict(finding) for finding in seen.findings()],
    }


def _model_json(model: Model, seen: Examination) -> dict[str, Any]:
    usual, most = model.kv_tokens(seen.memory.available)
    return {
        **asdict(model),
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "kv_tokens": {"default": usual, "most": most},
        "decode_ceiling_estimate": None
        if seen.bandwidth is None
        else {form: round(model.decode_ceiling(seen.bandwidth, form), 1) for form in model.forms},
    }


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return ["", title, *(f"  {name:<{_WIDTH}}  {value}" for name, value in rows)]


def _processor(seen: Examination) -> list[tuple[str, str]]:
    processor = seen.processor
    quota = f", time of {processor.quota:g}" if processor.quota is not None else ""
    return [
        ("name", processor.name),
        ("usable", f"{processor.usable} of {processor.online} processors{quota}"),
        ("instruction sets", ", ".join(processor.instruction_sets) or "none that kernels know"),
    ]


def _memory(seen: Examination) -> list[tuple[str, str]]:
    memory = seen.memory
    limit = f", limited to {size(memory.limit)} by control groups" if memory.limit is not None else ""
    pages = f"on 2 MiB pages: {memory.transparent or 'not supported'}"
    if memory.reserved_pages[0]:
        pages += f" ({memory.reserved_pages[0]} of {size(memory.reserved_pages[1])} are reserved)"
    rows = [("available", f"{size(memory.available)} of {size(memory.total)}{limit}"), ("huge pages", pages)]
    if seen.bandwidth is not None:
        rows.append(("read bandwidth", f"{seen.bandwidth / 1e9:.1f} GB/s"))
    return rows


def _software(seen: Examination) -> list[tuple[str, str]]:
    packages = seen.packages.versions
    services = [f"{name.removeprefix('tercet-')} {packages[name] or '(not installed)'}" for name in packages][1:4]
    others = [f"{name} {version}" for name, version in packages.items() if version and not name.startswith("tercet-")]
    kernels = seen.kernels
    built = f"{kernels.built} built, in {kernels.cache}" if kernels.built else f"none built in {kernels.cache}"
    return [
        ("services", ", ".join(services)),
        ("packages", ", ".join(others)),
        ("compiler", f"{kernels.compiler} ({kernels.compiler_version})" if kernels.compiler else "none"),
        ("kernels", built),
    ]


def _network(seen: Examination) -> list[tuple[str, str]]:
    network = seen.network
    rows = [
        ("open files", f"{network.files[0]} (can be raised to {network.files[1]})"),
        (network.address, network.port_problem or "free"),
    ]
    if network.redis is not None:
        rows.append(("Redis", f"{network.redis}: {network.redis_problem or 'answers'}"))
    return rows


def _model(model: Model, seen: Examination) -> list[tuple[str, str]]:
    usual, most = model.kv_tokens(seen.memory.available)
    stored = ", ".join(f"{size(nbytes)} {dtype}" for dtype, nbytes in model.stored.items())
    rows = [
        ("name", f"{model.name} ({model.architecture}, {model.parameters / 1e6:,.0f} million parameters)"),
        ("path", model.path),
        ("stored", stored),
        ("held", model.form),
        ("weights in memory", ", ".join(f"{size(form.nbytes)} {name}" for name, form in model.forms.items())),
        ("KV cache", f"{size(model.kv_bytes_per_token)} per token"),
        ("KV tokens that fit", f"{usual:,} (one part in {KV_SHARE} of what is free, the default), {most:,} at most"),
        ("context", f"{model.context:,} tokens"),
    ]
    if seen.bandwidth is not None:
        ceiling = ", ".join(f"{model.decode_ceiling(seen.bandwidth, form):.0f} {form}" for form in model.forms)
        rows.append(("decoding, one stream", f"at most about {ceiling} tokens/s (an estimate: bandwidth by weights)"))
    return rows


def size(nbytes: int) -> str:
    """Returns a number of bytes with three digits that count."""
    value, unit = float(nbytes), _UNITS[0]
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"

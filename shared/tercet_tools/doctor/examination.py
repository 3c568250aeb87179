"""Everything that is looked at, and what follows from it: what is missing, and what deserves a warning."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tercet_shared.errors import CheckpointError
from tercet_shared.machine.memory import Memory, read_memory
from tercet_tools.doctor import bandwidth
from tercet_tools.doctor.model import Model, read_model
from tercet_tools.doctor.network import Network, read_network
from tercet_tools.doctor.processor import Processor, read_processor
from tercet_tools.doctor.software import Gpu, Kernels, Packages, read_gpus, read_kernels, read_packages

if TYPE_CHECKING:
    from tercet_tools.doctor.settings import DoctorSettings

GIB = 1024**3

FEW_FILES = 4_096
"""Descriptors below which many streams at once may run out of them."""
_BUSY = 0.5
"""Load per processor from which a measured bandwidth says more about the others than about the machine."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the user should know.

    Attributes:
        level: ``missing`` is needed and not there; a ``warning`` is not that bad.
        text: what it is.
        advice: what to do about it.
    """

    level: Literal["missing", "warning"]
    text: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was seen.

    Attributes:
        system: operating system and Python.
        bandwidth: bytes per second that are read from memory; None where that was not measured.
        model: of the model that was named, if it could be read.
        model_problem: why it could not; empty where it could, or none was named.
    """

    system: str
    python: str
    processor: Processor
    memory: Memory
    bandwidth: float | None
    gpus: list[Gpu]
    packages: Packages
    kernels: Kernels
    network: Network
    model: Model | None
    model_problem: str

    def findings(self) -> list[Finding]:
        """Returns what is missing first, then the warnings."""
        found = [
            *_of_packages(self.packages),
            *_of_processor(self.processor),
            *_of_memory(self.memory),
            *_of_kernels(self.kernels, self.packages),
            *_of_network(self.network),
            *_of_model(self),
        ]
        if self.bandwidth is not None and self.processor.load > _BUSY * self.processor.online:
            found.append(
                Finding(
                    "warning",
                    f"The machine is busy (load {self.processor.load:.1f} on {self.processor.online} processors): the "
                    "bandwidth that was measured is what others leave.",
                    "Run this again when nothing else runs.",
                )
            )
        return sorted(found, key=lambda finding: finding.level != "missing")


def examine(settings: DoctorSettings, root: Path = Path("/")) -> Examination:
    """Looks at everything.

    Args:
        settings: what was asked for.
        root: directory under which ``proc`` and ``sys`` are looked up.
    """
    processor, memory = read_processor(root), read_memory(root)
    model, problem = None, ""
    if settings.model is not None:
        try:
            model = read_model(
                settings.model,
                revision=settings.revision,
                dtype=settings.dtype,
                quantization=settings.quantization,
                fast_bfloat16=processor.fast_bfloat16,
                compact_bfloat16=processor.compact_bfloat16,
            )
        except CheckpointError as error:
            problem = error.message
    speed = None
    if settings.measure:
        speed = bandwidth.measure(max(1, min(processor.usable, round(processor.effective))), memory.available)
    return Examination(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        processor=processor,
        memory=memory,
        bandwidth=speed,
        gpus=read_gpus(),
        packages=read_packages(),
        kernels=read_kernels(),
        network=read_network(settings.host, settings.port, settings.redis_url),
        model=model,
        model_problem=problem,
    )


def _of_packages(packages: Packages) -> list[Finding]:
    found = []
    absent = [name for name in packages.versions if name.startswith("tercet-") and packages.versions[name] is None]
    if not packages.services:
        found.append(
            Finding("missing", "No service of Tercet is installed here.", f"pip install {' '.join(sorted(absent))}")
        )
    elif absent:
        found.append(
            Finding(
                "warning",
                f"`tercet serve` needs {', '.join(absent)}, which this environment does not have.",
                f"pip install {' '.join(absent)} (not needed where services run on machines of their own)",
            )
        )
    if packages.lacking:
        names = sorted({item.partition(": ")[2] for item in packages.lacking})
        found.append(
            Finding(
                "missing", f"Packages are missing: {', '.join(packages.lacking)}.", f"pip install {' '.join(names)}"
            )
        )
    return found


def _of_processor(processor: Processor) -> list[Finding]:
    found = []
    if processor.machine.lower() in ("x86_64", "amd64"):
        if not processor.fast_bfloat16:
            found.append(
                Finding(
                    "warning",
                    "The processor lacks AVX2, FMA or F16C: kernels run without vector instructions.",
                    "Serve small models only, or use a processor from 2013 or later.",
                )
            )
        elif not processor.bfloat16_products:
            found.append(
                Finding(
                    "warning",
                    "The processor has no instructions for bfloat16: prompts, and many streams at a time, take several "
                    "times as long as with them. One stream does not.",
                    "For those, use a processor with AVX-512 BF16 or AMX.",
                )
            )
    if processor.quota is not None and processor.quota < processor.usable:
        threads = max(1, int(processor.quota))
        found.append(
            Finding(
                "warning",
                f"Control groups allow the time of {processor.quota:g} processors, less than the {processor.usable} on "
                "which this process may run: threads are stopped in the middle of steps.",
                f"Set --threads {threads}, or raise the quota.",
            )
        )
    return found


def _of_memory(memory: Memory) -> list[Finding]:
    if memory.transparent in (None, "never"):
        return [
            Finding(
                "warning",
                "Memory on 2 MiB pages is not given: reading weights takes about twice as long.",
                "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        ]
    return []


def _of_kernels(kernels: Kernels, packages: Packages) -> list[Finding]:
    if packages.versions.get("tercet-worker") is None:
        return []
    if kernels.compiler is None and not kernels.built:
        return [
            Finding(
                "warning",
                "There is no C++ compiler and no built kernels: the worker computes with torch, which is slower.",
                "Install g++ or clang++, or copy a cache of built kernels and set TERCET_CACHE.",
            )
        ]
    if not kernels.built:
        return [
            Finding(
                "warning",
                "The kernels are not built yet: the first start of the worker compiles them.",
                "To do it now: python -m tercet_worker.kernels.build",
            )
        ]
    return []


def _of_network(network: Network) -> list[Finding]:
    found = []
    soft, hard = network.files
    if 0 <= soft < FEW_FILES:
        found.append(
            Finding(
                "warning",
                f"A process may have {soft} files open, and every connection is one.",
                f"ulimit -n {min(65_536, hard) if hard > 0 else 65_536} before the start",
            )
        )
    if network.port_problem:
        found.append(
            Finding(
                "warning",
                f"A server cannot listen on {network.address}: {network.port_problem}.",
                "Choose another with --port or --host, or stop what has it.",
            )
        )
    if network.redis_problem:
        found.append(
            Finding(
                "missing",
                f"Redis at {network.redis} does not answer: {network.redis_problem}.",
                "Start it, or correct --redis-url (TERCET_REDIS_URL).",
            )
        )
    return found


def _of_model(seen: Examination) -> list[Finding]:
    if seen.model_problem:
        return [Finding("missing", seen.model_problem, "Name a directory, a GGUF file, or a model id that is cached.")]
    model = seen.model
    if model is None:
        return []
    available = max([seen.memory.available, *(gpu.free for gpu in seen.gpus)])
    if model.weights.loading > available:
        smaller = [form for form, weights in model.forms.items() if weights.loading <= available]
        advice = f"They fit as {' or '.join(smaller)} (--dtype, --quantization). " if smaller else ""
        return [
            Finding(
                "missing",
                f"The weights take {model.weights.loading / GIB:.1f} GiB ({model.form}), and {available / GIB:.1f} GiB "
                "are available.",
                f"{advice}Use a smaller model, or a machine with more memory.",
            )
        ]
    usual, most = model.kv_tokens(available)
    if usual < model.context:
        return [
            Finding(
                "warning",
                f"By default {usual:,} tokens of KV cache fit, fewer than the model's context of {model.context:,}: "
                "requests are limited to that.",
                f"--kv-cache-memory takes more (at most {most:,} tokens fit), --max-model-len says what is enough.",
            )
        ]
    return []

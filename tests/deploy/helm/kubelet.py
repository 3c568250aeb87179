"""Pods of rendered manifests as processes on this machine: their own commands, environments and probes; no cluster.

What a cluster adds to a manifest is added here, and nothing else is changed: volumes are directories (so paths below a
mount become paths below those), secrets have values, names of Services lead to the ports of their pods, every pod has
an address of this machine, at which it listens instead of at any, and pods of a group are told of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.helm.rendering import Object, containers, of_kind
from tests.fakes.redis_server import server_binary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

PATIENCE_S = 180.0
"""Far more than a start takes, also on a loaded machine."""

ADDRESS = "127.0.0.1"


@dataclass
class Container:
    """A container that runs."""

    name: str
    spec: Object
    process: asyncio.subprocess.Process
    log: Path
    address: str = ADDRESS

    def port(self, named: str | int) -> int:
        """Returns the number of one of its ports."""
        numbers = {port["name"]: port["containerPort"] for port in self.spec["ports"]}
        return named if isinstance(named, int) else int(numbers[named])

    async def ended(self) -> int:
        """Waits for its end and returns the exit code."""
        try:
            return await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"{self.name} does not end:\n{self.log.read_text()[-4000:]}") from None


@dataclass
class Kubelet:
    """Runs pods. An async context manager: leaving it kills what is left.

    Attributes:
        objects: everything that was rendered.
        directory: for volumes and logs; with a short path.
        secrets: what the Secrets hold, by name and key.
        claims: what stands for persistent volumes, by the name of the claim.
        addresses: of pods whose address is not 127.0.0.1.
    """

    objects: list[Object]
    directory: Path
    secrets: Mapping[str, Mapping[str, str]]
    claims: Mapping[str, Path]
    addresses: Mapping[str, str] = field(default_factory=dict)
    running: dict[str, Container] = field(default_factory=dict)

    async def start(self, name: str, pod: Object) -> None:
        """Starts the containers in the order in which a pod's are, each after the one before has started."""
        for spec in containers(pod):
            key = f"{name}/{spec['name']}"
            self.running[key] = await self._run(key, spec, pod, name)
            await self.until(key, "startupProbe")

    async def until(self, key: str, kind: str, *, succeeds: bool = True) -> None:
        """Asks with one of a container's probes until it succeeds, or does not any more; the container must not end."""
        container = self.running[key]
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while await self.probe(key, kind) is not succeeds:
            alive = container.process.returncode is None and asyncio.get_running_loop().time() < until
            assert alive, f"{key}, {kind}:\n{container.log.read_text()[-4000:]}"
            await asyncio.sleep(0.05)

    async def probe(self, key: str, kind: str) -> bool:
        """Asks once with one of a container's probes."""
        container = self.running[key]
        probe = container.spec[kind]
        if "httpGet" in probe:
            action = probe["httpGet"]
            url = f"{action.get('scheme', 'HTTP').lower()}://{container.address}:{container.port(action['port'])}{action['path']}"
            return await asyncio.to_thread(_answers, url)
        if "grpc" in probe:
            return await _serves(f"{container.address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""))
        return await _listens(container.address, container.port(probe["tcpSocket"]["port"]))

    def complaints(self) -> list[str]:
        """Returns the lines that services wrote as warnings or worse, but those of what a busy machine does late."""
        lines = [line for each in self.running.values() for line in each.log.read_text().splitlines()]
        lines = [line for line in lines if re.search(r'"level": "(warning|error|critical)"', line)]
        return [line for line in lines if not re.search(r"TimeoutError|silent for|took longer than", line)]

    async def run_to_end(self, name: str, pod: Object) -> tuple[int, str]:
        """Runs a pod of one container that ends, and returns its exit code and what it said."""
        (spec,) = containers(pod)
        container = await self._run(f"{name}/{spec['name']}", spec, pod, name)
        return await container.ended(), container.log.read_text()

    async def stop(self, name: str, pod: Object) -> list[int]:
        """Ends a pod as its deletion does, and returns the exit codes: those that started first end last."""
        codes = []
        for kind in ("containers", "initContainers"):
            for spec in reversed(pod["spec"].get(kind, [])):
                container = self.running.pop(f"{name}/{spec['name']}")
                container.process.send_signal(signal.SIGTERM)
                codes.append(await container.ended())
        return codes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for container in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                container.process.kill()
            await container.process.wait()

    # ------------------------------------------------------------------------------------------ what a cluster adds

    async def _run(self, key: str, spec: Object, pod: Object, name: str) -> Container:
        environment = {"PATH": f"{self._programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for variable in ("HOME", "TERCET_CACHE"):  # the image's own: where its kernels lie
            if variable in os.environ:
                environment[variable] = os.environ[variable]
        environment |= self._group(name)
        mounts = self._mounts(spec, pod, name)
        for each in spec.get("env", []):
            value = self._source(each["valueFrom"], name) if "valueFrom" in each else each["value"]
            environment[each["name"]] = self._here(value, environment, mounts)
        address = self.addresses.get(name, ADDRESS)
        command = [
            self._here(part, environment, mounts).replace("=0.0.0.0", f"={address}")
            for part in [*spec["command"], *spec["args"]]
        ]
        log = self.directory / f"{key.replace('/', '-')}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                cwd=self.directory,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return Container(key, spec, process, log, address)

    def _group(self, name: str) -> dict[str, str]:
        """Returns what the pods of a group are told; it has two pods here."""
        for each in of_kind(self.objects, "LeaderWorkerSet"):
            leader = each["metadata"]["name"]
            if name in (leader, f"{leader}-workers"):
                return {
                    "LWS_LEADER_ADDRESS": self.addresses.get(leader, ADDRESS),
                    "LWS_GROUP_SIZE": str(each["spec"]["leaderWorkerTemplate"]["size"]),
                    "LWS_WORKER_INDEX": "0" if name == leader else "1",
                }
        return {}

    def _programs(self) -> Path:
        """Returns a directory with the program of the image of Redis."""
        programs = self.directory / "bin"
        programs.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (programs / "valkey-server").symlink_to(server_binary())
        return programs

    def _source(self, source: Object, name: str) -> str:
        if "secretKeyRef" in source:
            return self.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        if "resourceFieldRef" in source:
            return "1"
        fields = {
            "metadata.name": f"{name}-0",
            "metadata.namespace": "llm",
            "spec.nodeName": "node",
            "status.podIP": self.addresses.get(name, ADDRESS),
        }
        return fields[source["fieldRef"]["fieldPath"]]

    def _mounts(self, spec: Object, pod: Object, name: str) -> dict[str, Path]:
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", [])}
        return {
            mount["mountPath"]: self._volume(volumes[mount["name"]], name) / mount.get("subPath", "")
            for mount in spec.get("volumeMounts", [])
            if mount["mountPath"] != "/tmp"
        }

    def _volume(self, volume: Object, name: str) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.claims[volume["persistentVolumeClaim"]["claimName"]]
        path = self.directory / f"{name}-{volume['name']}"
        path.mkdir(exist_ok=True)
        if "secret" in volume:
            for key, value in self.secrets[volume["secret"]["secretName"]].items():
                (path / key).write_text(value)
        else:
            path.chmod(0o2777)  # as an emptyDir is, with a group of the pod's
        return path

    def _here(self, text: str, environment: Mapping[str, str], mounts: Mapping[str, Path]) -> str:
        text = re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)
        text = re.sub(
            r"([\w-]+)\.llm\.svc\.cluster\.local:(\d+)", lambda found: self._behind(found[1], int(found[2])), text
        )
        for path, directory in mounts.items():
            text = re.sub(rf"(^|=){re.escape(path)}(?=/|$)", rf"\g<1>{directory}", text)
        return text

    def _behind(self, service: str, port: int) -> str:
        """Returns where a port of a Service leads to."""
        (found,) = [each for each in of_kind(self.objects, "Service") if each["metadata"]["name"] == service]
        (target,) = [each["targetPort"] for each in found["spec"]["ports"] if each["port"] == port]
        selector: dict[str, Any] = found["spec"]["selector"]
        for workload in of_kind(self.objects, "Deployment", "StatefulSet"):
            template = workload["spec"]["template"]
            if selector.items() <= template["metadata"]["labels"].items():
                ports = {each["name"]: each["containerPort"] for one in containers(template) for each in one["ports"]}
                return f"{ADDRESS}:{ports[target]}"
        raise AssertionError(f"the Service {service} selects nothing")


def _answers(url: str) -> bool:
    """As the kubelet does: any certificate is good, and so is any status from 200 to 399."""
    tls = ssl._create_unverified_context() if url.startswith("https") else None  # noqa: S323
    try:
        with urllib.request.urlopen(url, timeout=5, context=tls) as response:  # noqa: S310  # http or https
            return bool(response.status < 400)
    except (urllib.error.URLError, OSError):
        return False


async def _serves(target: str, service: str) -> bool:
    async with grpc.aio.insecure_channel(target) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=5
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _listens(address: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True

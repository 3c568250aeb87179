"""Services of `docker/compose.yaml` as processes here: their own commands and environments, without an engine.

What containers have from the engine is replaced by what stands for it here, and nothing else is: names of services by
127.0.0.1, each service's ports by free ones, mounted directories by temporary ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.deploy.compose_file import DOCKER, compose, image_of
from tests.fakes.ports import free_port
from tests.fakes.redis_server import server_binary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

TIMEOUT_S = 180.0
"""Far more than a start takes, also on a loaded machine."""

BIN = Path(sys.executable).parent


@dataclass
class Process:
    """A service that runs."""

    name: str
    child: subprocess.Popen[bytes]
    log: Path

    async def ended(self) -> int:
        """Waits for its end and returns the exit code."""
        return await asyncio.to_thread(self.child.wait, TIMEOUT_S)


@dataclass
class ComposeFleet:
    """Starts services by name. An async context manager: leaving it ends them, the last started first.

    Attributes:
        directory: for sockets, volumes and logs; with a short path.
        variables: what an operator would have in ``.env``.
    """

    directory: Path
    variables: Mapping[str, str]
    running: dict[str, Process] = field(default_factory=dict)
    _ports: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.services: dict[str, dict[str, Any]] = compose(self.variables)["services"]
        self._names = re.compile(rf"\b({'|'.join(map(re.escape, self.services))}):(\d+)\b")

    def port(self, service: str, port: int) -> int:
        """Returns the port here that stands for a port of the service's container."""
        return self._ports.setdefault((service, port), free_port())

    def url(self, service: str, port: int) -> str:
        return f"http://127.0.0.1:{self.port(service, port)}"

    def start(self, *names: str) -> None:
        """Starts services; they are not ready yet."""
        for name in names:
            log = self.directory / f"{name}.log"
            command, environment = self._command(name)
            with log.open("ab") as output:
                child = subprocess.Popen(
                    command, env=environment, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            self.running[name] = Process(name, child, log)

    async def healthy(self, *names: str) -> None:
        """Returns when the health checks of these services succeed, which are run as an engine runs them."""
        for name in names:
            test = self.services[name]["healthcheck"]["test"]
            assert test[:4] == ["CMD", "python", "-ISE", "/opt/tercet/probe.py"]
            url = re.sub(r":(\d+)/", lambda found, own=name: f":{self.port(own, int(found[1]))}/", test[4])  # type: ignore[misc]
            said, until = b"", asyncio.get_running_loop().time() + TIMEOUT_S
            while True:
                probe = await asyncio.create_subprocess_exec(
                    sys.executable, "-ISE", DOCKER / "image/probe.py", url, stdout=asyncio.subprocess.PIPE
                )
                said, _ = await probe.communicate()
                if probe.returncode == 0:
                    break
                alive = self.running[name].child.poll() is None and asyncio.get_running_loop().time() < until
                assert alive, f"{name}: {said!r}\n{self.running[name].log.read_text()[-2000:]}"
                await asyncio.sleep(0.1)

    async def stop(self, name: str) -> int:
        """Asks a service to end, as an engine does, and returns its exit code."""
        process = self.running.pop(name)
        process.child.send_signal(signal.SIGTERM)
        return await process.ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.running.values()):
            process.child.terminate()
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.child.wait(10)
                continue
            process.child.kill()
            process.child.wait()

    # ------------------------------------------------------------------------------------------------ translation

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        service, built = self.services[name], image_of(self.services[name])
        own = {"PATH": os.environ["PATH"], "HOME": str(self.directory), "PYTHONPATH": ""}
        given = {key: self._here(name, value) for key, value in service.get("environment", {}).items()}
        arguments = [self._here(name, argument) for argument in service.get("command", [])]
        if built is not None:
            image = {key: value for key, value in built.environment.items() if key not in ("PATH", "HOME", "HF_HOME")}
            image.pop("TERCET_CACHE", None)  # kernels that are compiled already lie elsewhere here
            own["HOME"] = os.environ.get("HOME", "")
            program, *rest = built.entrypoint
            assert program == "tercet"
            entry = [sys.executable, "-m", "tercet_shared.cli", *rest]
            image = {key: self._here(name, value, key) for key, value in image.items()}
            return [*entry, *arguments], {**own, **image, **given}
        if name == "valkey":
            where = ["--bind", "127.0.0.1", "--port", str(self.port(name, 6379)), "--dir", str(self._mounted(name))]
            return [str(server_binary()), *arguments[1:], *where], own
        assert name == "proxy", f"no program here stands for {name}"
        given["TERCET_PROXY_METRICS"] = f":{self.port(name, 9180)}"
        given["TERCET_SITE"] = f"http://127.0.0.1:{self.port(name, int(given['TERCET_SITE'].removeprefix(':')))}"
        given["CADDY_ADMIN"] = f"unix/{self.directory}/caddy.sock"
        command = [str(BIN / "caddy"), "run", "--config", str(DOCKER / "caddy/Caddyfile"), "--adapter", "caddyfile"]
        return command, {**own, **given}

    def _mounted(self, name: str, at: str = "") -> Path:
        """Returns the directory that stands for a volume of the service: that at ``at``, by default its first."""
        for volume in self.services[name]["volumes"]:
            source, target = volume.split(":")[:2]
            if at in ("", target):
                path = self.directory / source
                path.mkdir(mode=0o750, exist_ok=True)
                return path
        raise AssertionError(f"{name} has no volume at {at}")

    def _here(self, name: str, text: str, variable: str = "") -> str:
        def own(found: re.Match[str]) -> str:
            return found[1] + str(self.port(name, int(found[2])))

        if variable in ("TERCET_PORT", "TERCET_METRICS_PORT"):
            return str(self.port(name, int(text)))
        text = self._names.sub(lambda found: f"127.0.0.1:{self.port(found[1], int(found[2]))}", text)
        text = re.sub(r"(\b0\.0\.0\.0:)(\d+)", own, text)
        text = re.sub(r"^(--(?:metrics-)?port=)(\d+)$", own, text)
        text = re.sub(r"(?<![.\d])0\.0\.0\.0(?!/)", "127.0.0.1", text)
        return text.replace("/run/tercet", str(self._mounted(name, "/run/tercet"))) if "/run/tercet" in text else text

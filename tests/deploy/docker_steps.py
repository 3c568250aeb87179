"""Runs the steps of a Dockerfile without an engine: each stage in a root of its own, laid over this machine's.

The machine stands for the base image, without its compilers: it must be a Debian, with this very Python. Needs root for
overlay mounts and chroot in mount namespaces of their own, so that nothing is left mounted. Understood are the
instructions that our Dockerfiles use; the cache of a ``RUN --mount=type=cache`` is left out.

``python -m tests.deploy.docker_steps worker TORCH_INDEX=`` builds by hand and prints the size of what the image adds.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.compose_file import DOCKER, ROOT, instructions

PYTHON = Path(sys.base_prefix)
COMPILERS = ("c++", "g++", "gcc", "cc", "clang++")
MiB = 1024 * 1024


@dataclass
class Stage:
    """What a stage has changed on top of the base, and what its instructions have set.

    Attributes:
        directory: holds its layer and the mount point.
    """

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"

    def path(self, path: str) -> Path:
        """Returns where a file of the stage's layer is, seen from outside."""
        return self.directory / "layer" / path.lstrip("/")

    def command(
        self, script: str, *, read_only: bool = False, mounts: Mapping[str, Path] | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Returns arguments and environment of a process that runs a shell script in the stage's root, as its user.

        Args:
            read_only: the root cannot be written to, and /tmp is a tmpfs, as Compose runs the image.
            mounts: directories of this machine, by their path in the root.
        """
        own = shlex.quote(str(self.directory))
        for name in ("layer", "work", "root"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        for path in mounts or ():
            self.path(path).mkdir(parents=True, exist_ok=True)
        uid, _, gid = self.user.partition(":")
        become = f"setpriv --reuid={uid} --regid={gid} --clear-groups --no-new-privs --bounding-set=-all"
        inside = f"cd {self.workdir}; {script}"
        lines = [
            f"mount -t overlay overlay -o lowerdir=/,upperdir={own}/layer,workdir={own}/work {own}/root",
            f"mount --rbind /proc {own}/root/proc",
            f"mount --rbind /dev {own}/root/dev",
            *(f"mount --bind {shlex.quote(str(source))} {own}/root{path}" for path, source in (mounts or {}).items()),
            f"mount -o remount,ro {own}/root && mount -t tmpfs -o mode=1777 tmpfs {own}/root/tmp" if read_only else "",
            f"exec /usr/sbin/chroot {own}/root {become if uid != '0' else ''} /bin/sh -ec {shlex.quote(inside)}",
        ]
        # How pip reaches its index here; an engine has that from its own configuration.
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | {"PIP_NO_CACHE_DIR": "1"}
        base = {"PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        environment = {**base, **pip, **self.environment, **self.arguments}
        return ["unshare", "--mount", "/bin/sh", "-ec", "\n".join(lines)], environment

    def run(self, script: str, *, read_only: bool = False) -> str:
        """Runs a shell script in the stage's root and returns what it printed. Raises AssertionError when it fails."""
        argv, environment = self.command(script, read_only=read_only)
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def size(self, path: str) -> int:
        """Returns the bytes of all files under ``path`` in the stage's layer."""
        return sum(file.lstat().st_size for file in self.path(path).rglob("*") if not file.is_dir())

    def show_compilers(self) -> None:
        """Undoes that they are hidden: a hidden file is one of its own kind in the layer."""
        for name in COMPILERS:
            self.path(f"/usr/bin/{name}").unlink(missing_ok=True)


def why_not() -> str | None:
    """Returns why steps cannot be run here, or None."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "overlay mounts and chroot need root, unshare and setpriv"
    with tempfile.TemporaryDirectory(prefix="tc-steps-") as directory:
        argv, environment = Stage(Path(directory)).command("true")
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        return None if done.returncode == 0 else f"no overlay can be mounted: {done.stderr.strip()}"


class Build:
    """Builds the stages of a Dockerfile, each in a directory of its own under ``directory``.

    Args:
        given: as ``--build-arg``.
    """

    def __init__(self, dockerfile: Path, directory: Path, given: Mapping[str, str]) -> None:
        self._dockerfile = dockerfile
        self._directory = directory
        self._given = given
        self._globals: dict[str, str] = {}
        self._stages: dict[str, Stage] = {}

    def run(self) -> Stage:
        """Returns the last stage. Raises AssertionError when a step fails."""
        stage: Stage | None = None
        for name, rest in instructions(self._dockerfile):
            if name == "FROM":
                stage = self._from(rest)
            elif name == "ARG":
                self._argument(rest, self._globals if stage is None else stage.arguments)
            elif stage is not None:
                self._step(stage, name, rest)
        assert stage is not None
        return stage

    def _from(self, rest: str) -> Stage:
        source, _, name = (part.strip() for part in _expand(rest, self._globals).partition(" AS "))
        name = name or "last"
        stage = Stage(self._directory / name)
        if source in self._stages:
            parent = self._stages[source]
            subprocess.run(["/bin/cp", "-a", parent.directory, stage.directory], check=True)
            stage.environment, stage.workdir, stage.user = dict(parent.environment), parent.workdir, parent.user
        else:
            # Where this Python lies in root's home, others must be able to reach it.
            above = " ".join(str(parent) for parent in (PYTHON, *PYTHON.parents) if parent != Path("/"))
            stage.run(f"chmod a+rx {above}; rm -f {' '.join(f'/usr/bin/{name}' for name in COMPILERS)}")
        self._stages[name] = stage
        return stage

    def _argument(self, rest: str, values: dict[str, str]) -> None:
        name, has_default, default = rest.partition("=")
        if name in self._given:
            values[name] = self._given[name]
        elif has_default:
            values[name] = default
        elif name in self._globals:
            values[name] = self._globals[name]

    def _step(self, stage: Stage, name: str, rest: str) -> None:
        if name == "RUN":
            if "apt-get install" in rest and "g++" in rest:
                stage.show_compilers()
            stage.run(re.sub(r"^(--mount=\S+\s+)+", "", rest))
        elif name == "ENV":
            pairs = shlex.split(_expand(rest, {**stage.environment, **stage.arguments}))
            stage.environment.update(pair.split("=", 1) for pair in pairs)  # type: ignore[arg-type]
        elif name == "WORKDIR":
            stage.workdir = rest
            stage.path(rest).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            self._copy(stage, rest)
        elif name == "USER":
            stage.user = rest

    def _copy(self, stage: Stage, rest: str) -> None:
        words = shlex.split(rest)
        of_stage = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
        *sources, target = (word for word in words if not word.startswith("--"))
        to = stage.path(f"{stage.workdir}/{target}" if not target.startswith("/") else target)
        for source in sources:
            if of_stage is not None:
                origin, ignored = self._stages[of_stage].path(source), None
            else:
                assert in_context(source), f".dockerignore leaves out {source}"
                origin, ignored = ROOT / source, shutil.ignore_patterns(*_ignored())
            if origin.is_dir():
                shutil.copytree(origin, to, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy2(origin, to)


def in_context(path: str) -> bool:
    """Whether `.dockerignore` lets a path into the build context."""
    allowed = [line[1:] for line in _patterns() if line.startswith("!")]
    return "*" in _patterns() and any(Path(path).is_relative_to(each) for each in allowed)


def _ignored() -> list[str]:
    return [line.removeprefix("**/") for line in _patterns() if line.startswith("**/")]


def _patterns() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _expand(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: values.get(found[1], ""), text)


def main(arguments: list[str]) -> None:
    """Builds one service's image, ``arguments`` being its name and build arguments, and prints sizes."""
    service, *given = arguments
    with tempfile.TemporaryDirectory(prefix="tc-steps-", dir="/var/tmp") as directory:
        dockerfile = DOCKER / f"{service}.Dockerfile"
        stage = Build(dockerfile, Path(directory), dict(pair.split("=", 1) for pair in given)).run()
        print(stage.run(f"tercet {service} --help | head -1", read_only=True).strip())
        print(f"{service}: {stage.size('/opt/tercet') / MiB:.0f} MiB in /opt/tercet")
        packages = next(stage.path("/opt/tercet/lib").glob("python3*/site-packages"))
        sizes = {each.name: stage.size(f"/{each.relative_to(stage.path('/'))}") for each in packages.iterdir()}
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:8]:
            print(f"  {size / MiB:6.1f} MiB {name}")


if __name__ == "__main__":
    main(sys.argv[1:])

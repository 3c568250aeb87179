"""The Dockerfiles: linted, in step with each other; on demand, their steps are run and the images' commands started."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tercet_worker.kernels.toolchain import BASE_FLAGS, X86_VARIANTS
from tests.deploy import docker_steps
from tests.deploy.compose_file import DOCKER, ROOT, image, instructions
from tests.deploy.docker_steps import Build, Stage
from tests.fakes.checkpoints import write_tiny_llama

DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
SERVICES = [path.name.split(".")[0] for path in DOCKERFILES]
UIDS = {"frontend": 10001, "core": 10002, "worker": 10003}
GROUP = 10000


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "hadolint"
    return subprocess.run([program, "--no-color", path], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=SERVICES)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    done = hadolint(dockerfile)
    assert done.returncode == 0, done.stdout


def test_hadolint_does_find_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text((DOCKER / "worker.Dockerfile").read_text().replace("# hadolint ignore=DL3008\n", ""))
    assert "DL3008" in hadolint(path).stdout


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_one_service_as_a_user_of_its_own_in_the_shared_group(service: str) -> None:
    last = image(DOCKER / f"{service}.Dockerfile")
    assert last.entrypoint == ["tercet", service]
    assert last.user == f"{UIDS[service]}:{GROUP}"
    assert last.stop_signal == "SIGTERM"
    assert last.environment["HF_HOME"] == "/models"
    assert "/opt/tercet/probe.py" in last.health
    assert last.labels["org.opencontainers.image.title"] == f"tercet-{service}"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=SERVICES)
def test_every_stage_is_one_pinned_base_or_another_stage(dockerfile: Path) -> None:
    steps = list(instructions(dockerfile))
    bases = {rest.partition("=")[2] for name, rest in steps if name == "ARG" and rest.startswith("PYTHON_IMAGE=")}
    (base,) = bases
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    froms = [rest.split(" AS ")[0] for name, rest in steps if name == "FROM"]
    assert set(froms) <= {"${PYTHON_IMAGE}", "runtime-${DEVICE}"}


def test_the_images_share_their_base() -> None:
    assert len({next(rest for name, rest in instructions(path) if name == "ARG") for path in DOCKERFILES}) == 1


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=SERVICES)
def test_what_is_copied_is_in_the_build_context(dockerfile: Path) -> None:
    for name, rest in instructions(dockerfile):
        if name == "COPY" and "--from=" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert docker_steps.in_context(source), source
    assert not docker_steps.in_context(".git")
    assert not docker_steps.in_context(".venv")


def test_torch_is_in_the_workers_image_alone() -> None:
    for dockerfile, service in zip(DOCKERFILES, SERVICES, strict=True):
        mentioned = any("torch" in rest for name, rest in instructions(dockerfile) if name == "RUN")
        assert mentioned is (service == "worker")


def test_kernels_do_not_depend_on_the_machine_that_builds_them() -> None:
    flags = [*BASE_FLAGS, *(flag for variant in X86_VARIANTS for flag in variant.flags)]
    assert [flag for flag in flags if flag.startswith(("-march", "-mtune", "-mcpu"))] == []


# -------------------------------------------------------------------------------------------------- their programs


class Answers(BaseHTTPRequestHandler):
    """200 at /livez, 503 with a reason at /readyz."""

    def do_GET(self) -> None:
        status, body = (200, b"{}") if self.path == "/livez" else (503, b'{"reason": "no\ncore"}')
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def probe(url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-ISE", DOCKER / "image/probe.py", url]
    environment = {"http_proxy": "http://127.0.0.1:9"}  # is for others, not for the container's own port
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_probe_says_healthy_or_why_not(address: str) -> None:
    assert (probe(f"{address}/livez").returncode, probe(f"{address}/livez").stdout) == (0, "")
    sick = probe(f"{address}/readyz")
    assert sick.returncode == 1
    assert sick.stdout == f'{address}/readyz: status 503: {{"reason": "no core"}}\n'


def test_the_probe_of_a_port_that_nobody_has() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/livez"
        gone = probe(url)
    assert gone.returncode == 1
    assert "refused" in gone.stdout
    assert probe("").returncode == 1


def fetch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, DOCKER / "image/fetch_model.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_model_that_is_on_disk_need_not_be_fetched(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    done = fetch(str(model), "")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{model} is at {model}\n"


def test_a_model_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    done = fetch(str(tmp_path / "none"), "main")
    assert done.returncode == 1
    assert done.stderr.startswith("error: The model ")
    assert "Traceback" not in done.stderr
    assert fetch().returncode == 2


# -------------------------------------------------------------------------------------------------- their steps

on_demand = pytest.mark.skipif(
    os.environ.get("TERCET_TEST_IMAGES") != "1",
    reason="builds three environments, which takes minutes; set TERCET_TEST_IMAGES=1",
)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    why = docker_steps.why_not()
    if why is not None:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="tc-steps-", dir="/var/tmp") as directory:
        yield Path(directory)


def built(service: str, scratch: Path) -> Stage:
    # pip's own index for torch: the only one that is sure to be there.
    return Build(DOCKER / f"{service}.Dockerfile", scratch / service, {"TORCH_INDEX": ""}).run()


@on_demand
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("service", ["frontend", "core"])
def test_the_steps_make_a_small_environment_without_torch(service: str, scratch: Path) -> None:
    stage = built(service, scratch)
    assert stage.run(f"tercet {service} --help", read_only=True).startswith(f"usage: tercet {service}")
    installed = stage.run("ls /opt/tercet/lib/python3*/site-packages", read_only=True).split()
    assert "torch" not in installed
    assert "pip" not in installed
    assert stage.size("/opt/tercet") < 256 * docker_steps.MiB


@on_demand
@pytest.mark.timeout(1800)
def test_core_and_worker_meet_in_their_images(scratch: Path) -> None:
    """As their users, on read-only roots, without a compiler, over the socket in a shared directory."""
    core, worker = built("core", scratch / "pair"), built("worker", scratch / "pair")
    assert worker.run("command -v g++ || echo none", read_only=True).strip() == "none"
    link, models = scratch / "link", scratch / "models"
    write_tiny_llama(models / "tiny")
    link.mkdir(mode=0o750)
    os.chown(link, UIDS["core"], GROUP)
    scratch.chmod(0o755)  # a way to the models
    mounts = {"/run/tercet": link, "/models": models}
    processes = []
    try:
        for stage, command in (
            (core, "exec tercet core --listen 127.0.0.1:0 --no-prefix-caching --metrics-port 0 --log-format text"),
            (worker, "exec tercet worker --metrics-port 0 --log-format text --dtype float32 --threads 1 /models/tiny"),
        ):
            argv, environment = stage.command(command, read_only=True, mounts=mounts)
            processes.append(subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True))
        errors = processes[1].stderr
        assert errors is not None
        lines = []
        for line in errors:
            lines.append(line)
            if "joined core" in line:
                break
        assert "joined core" in lines[-1], "".join(lines)
        assert not any("fallback" in line or "built the CPU kernels" in line for line in lines), lines
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.communicate(timeout=120)


def test_steps_can_be_read_without_running_them() -> None:
    """What the interpreter of steps does not know, no Dockerfile of ours uses."""
    of_building = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER"}
    of_running = {"LABEL", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
    for dockerfile in DOCKERFILES:
        assert {name for name, _ in instructions(dockerfile)} <= of_building | of_running

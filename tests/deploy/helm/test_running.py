"""The commands of the manifests are started as they stand: a chat is answered, probes tell the truth."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tercet_tools.key.command import main as key_command
from tests.deploy.helm.kubelet import ADDRESS, Kubelet
from tests.deploy.helm.rendering import ROOT, all_containers, case, of_kind, pods, render
from tests.fakes.certificates import Authority, Certificate
from tests.fakes.checkpoints import write_tiny_llama
from tests.fakes.ports import free_port, free_ports
from tests.fakes.redis_server import redis_server


def values(**more: Any) -> dict[str, Any]:
    http, front_metrics, engine, core_metrics, worker_metrics, redis = free_ports(6, ADDRESS)
    small = {"dtype": "float32", "kvCacheMemory": "32MiB", "maxNumSeqs": 8, "threads": 1, "grace": 10}
    return {
        "models": {
            "tiny": {"source": "tiny", "volume": {"claimName": "models", "subPath": "released"}, "settings": small}
        },
        "frontend": {
            "ports": {"http": http, "metrics": front_metrics},
            "settings": {"grace": 10},
            **more.pop("frontend", {}),
        },
        "enginePorts": {"grpc": engine, "metrics": core_metrics, "workerMetrics": worker_metrics},
        "redis": {"bundled": {"port": redis}},
        "test": {"timeoutSeconds": 30, "apiKeySecret": {"name": "test-key"}},
        **more,
    }


async def test_what_the_manifests_run_answers_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, key = _new_key(capsys)
    secrets = {"redis": {"password": "s3cret"}, "keys": {"keys.toml": keys}, "test-key": {"key": key}}
    given = values(frontend={"apiKeys": {"secretName": "keys"}})
    given["redis"]["bundled"]["passwordSecret"] = {"name": "redis"}
    await _serve_ask_and_end(given, secrets, tmp_path, "prod-tercet-redis")


async def test_so_it_does_with_everything_locked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TLS without and within, and a Redis of others' that lets in what docs/security.md says and no more."""
    keys, key = _new_key(capsys)
    authority = Authority(tmp_path)
    issuer = authority.certificate.chain.read_text()
    async with redis_server() as server:
        async with Redis.from_url(server.url) as admin:
            for line in _acl("s3cret"):
                await admin.execute_command(line)
            await admin.execute_command("ACL SETUSER default off")
        secrets = {
            "redis": {"url": server.url.replace("unix://", "unix://tercet@") + "?password=s3cret"},
            "keys": {"keys.toml": keys},
            "test-key": {"key": key},
            "inside": {**_pem(authority.issue("inside")), "ca.crt": issuer},
            "outside": _pem(authority.issue("outside")),
        }
        given = values(frontend={"apiKeys": {"secretName": "keys"}, "tls": {"secretName": "outside"}})
        given["redis"] = {"external": {"urlSecret": {"name": "redis"}}, "prefix": "prod"}
        given["mtls"] = {"secretName": "inside", "coreName": "localhost"}
        await _serve_ask_and_end(given, secrets, tmp_path)


async def test_a_group_of_pods_answers_a_chat_and_falls_as_one(tmp_path: Path) -> None:
    """Half of the layers in the pod with the core, half in another one, which reaches the core by mTLS."""
    authority = Authority(tmp_path)
    secrets = {
        "inside": {**_pem(authority.issue("inside")), "ca.crt": authority.certificate.chain.read_text()},
    }
    given = values()
    given["test"]["apiKeySecret"]["name"] = ""
    given["models"]["tiny"]["parallel"] = {"pipeline": 2, "nodes": 2}
    given["mtls"] = {"secretName": "inside", "coreName": "localhost"}
    given["enginePorts"]["rendezvous"] = free_port(ADDRESS)
    write_tiny_llama(tmp_path / "released" / "tiny")
    objects = render(given)
    by_name = dict(pods(objects))
    leader, other, frontend = "prod-tercet-tiny", "prod-tercet-tiny-workers", "prod-tercet-frontend"
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        async with Kubelet(objects, Path(directory), secrets, {"models": tmp_path}, {other: "127.0.0.2"}) as kubelet:
            await kubelet.start("prod-tercet-redis", by_name["prod-tercet-redis"])
            await asyncio.gather(*(kubelet.start(name, by_name[name]) for name in (leader, other, frontend)))
            for name in (f"{leader}/worker", f"{leader}/core", f"{other}/worker", f"{frontend}/frontend"):
                await kubelet.until(name, "readinessProbe")
                assert await kubelet.probe(name, "livenessProbe")
            code, said = await kubelet.run_to_end("prod-tercet-test", by_name["prod-tercet-test"])
            assert code == 0, said
            # A worker that is gone ends that of the other pod, so both restart, as the group is to.
            gone = kubelet.running.pop(f"{other}/worker")
            gone.process.terminate()
            assert await gone.ended() == 0
            assert await kubelet.running[f"{leader}/worker"].ended() == 1


def _new_key(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Returns a file of keys with one in it, and that key."""
    assert key_command(["new", "tester", "--tenant", "tests", "--requests-per-minute", "600"]) == 0
    file, said = capsys.readouterr()
    return file, said.rpartition(" ")[2].strip()


def _pem(certificate: Certificate) -> dict[str, str]:
    return {"tls.crt": certificate.chain.read_text(), "tls.key": certificate.key.read_text()}


def _acl(password: str) -> list[str]:
    lines = [
        line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if line.startswith("ACL SETUSER")
    ]
    assert lines
    return [line.replace(">…", f">{password}") for line in lines]


async def _serve_ask_and_end(
    given: dict[str, Any], secrets: dict[str, dict[str, str]], path: Path, *before: str
) -> None:
    write_tiny_llama(path / "released" / "tiny")
    objects = render(given)
    by_name = dict(pods(objects))
    engine, frontend = "prod-tercet-tiny", "prod-tercet-frontend"
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as directory:
        async with Kubelet(objects, Path(directory), secrets, {"models": path}) as kubelet:
            for name in before:
                await kubelet.start(name, by_name[name])
            await asyncio.gather(*(kubelet.start(name, by_name[name]) for name in (engine, frontend)))
            for name in (f"{engine}/worker", f"{engine}/core", f"{frontend}/frontend"):
                await kubelet.until(name, "readinessProbe")
                assert await kubelet.probe(name, "livenessProbe")

            code, said = await kubelet.run_to_end("prod-tercet-test", by_name["prod-tercet-test"])
            assert code == 0, said
            assert re.search(r"listed: tiny\ntiny: [1-8] tokens: ['\"]", said)

            await _queries_have_answers(kubelet)
            assert kubelet.complaints() == []
            # The core with its worker beside it, then the worker; the front end stays, and is not ready.
            assert await kubelet.stop(engine, by_name[engine]) == [0, 0]
            await kubelet.until(f"{frontend}/frontend", "readinessProbe", succeeds=False)
            assert await kubelet.probe(f"{frontend}/frontend", "livenessProbe")
            assert await kubelet.stop(frontend, by_name[frontend]) == [0]


async def _queries_have_answers(kubelet: Kubelet) -> None:
    """What the scalers ask for is what a core exports."""
    port = kubelet.running["prod-tercet-tiny/core"].port("metrics")
    async with httpx.AsyncClient() as client:
        exported = (await client.get(f"http://{ADDRESS}:{port}/metrics")).text
    (scaled,) = of_kind(case("gpu"), "ScaledObject")
    for trigger in scaled["spec"]["triggers"]:
        name, reason = re.findall(r'sum\((\w+)\{(?:(reason="\w+"),)?', trigger["metadata"]["query"])[0]
        assert [line for line in exported.splitlines() if line.startswith(f"{name}") and reason in line], trigger


def test_the_test_asks_for_every_model() -> None:
    args = all_containers(case("two models"))["prod-tercet-test/ask"]["args"]
    assert args[-2:] == ["llama", "smollm2"]

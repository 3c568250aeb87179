"""A front end's process with all that guards it, as settings make it: TLS, keys, logs, SIGHUP, limits."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from tests.contract.frontend.conftest import EOS, TIMEOUT, events
from tests.contract.frontend.test_process import _ready, front_end
from tests.contract.frontend.test_tls import replace, shown_name, trusting
from tests.contract.frontend.wire import CHAT, request
from tests.fakes.certificates import Authority
from tests.fakes.core import STOP, FakeCore

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_frontend.tokenizing import ModelText


def _write_keys(path: Path, *names: str) -> None:
    keys = [{"name": name, "hash": f"sha256:{sha256(name.encode()).hexdigest()}"} for name in names]
    path.write_text(json.dumps({"keys": keys}))


async def test_a_guarded_front_end(model_path: Path, text: ModelText, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, renewed = authority.issue("first"), authority.issue("second")
    keys, access, audit = tmp_path / "keys.json", tmp_path / "access.log", tmp_path / "audit.log"
    _write_keys(keys, "alice")
    socket = f"unix:{tmp_path}/core.sock"
    arguments = [
        str(model_path), "--core", socket, "--port", "0", "--tls-cert", str(own.chain), "--tls-key", str(own.key),
        "--api-keys-file", str(keys), "--access-log", str(access), "--audit-log", str(audit),
        "--client-timeout", "0.5", "--receive-timeout", "20", "--cors-origin", "https://page.example",
    ]  # fmt: skip
    context = trusting(authority)
    async with front_end(*arguments) as process:
        url = (await process.report("ready")).detail["url"]
        assert url.startswith("https://")
        headers = {"Authorization": "Bearer alice", "Origin": "https://page.example"}
        async with (
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT, verify=context, headers=headers) as http,
            FakeCore(socket, tokenizer_fingerprint=text.tokenizer.fingerprint) as core,
        ):
            await _ready(http, core)
            payload: dict[str, Any] = {
                "model": model_path.stem, "messages": [{"role": "user", "content": "Hi"}], "stream": True
            }  # fmt: skip
            async with http.stream("POST", CHAT, json=payload) as response:
                assert response.headers["access-control-allow-origin"] == "https://page.example"
                waiting = await core.next_request()
                waiting.send(100)
                # Everything is renewed while the stream goes on.
                replace(own, renewed)
                _write_keys(keys, "bob")
                shutil.move(access, tmp_path / "access.log.1")
                process.process.send_signal(signal.SIGHUP)
                async with asyncio.timeout(TIMEOUT):
                    while not access.exists():
                        assert (await http.get("/livez")).status_code == 200
                assert await shown_name(url, context) == "second"
                assert (await http.get("/v1/models")).status_code == 401
                bob = {"Authorization": "Bearer bob"}
                assert (await http.get("/v1/models", headers=bob)).status_code == 200
                waiting.send(EOS, finish=STOP, stop_id=EOS)
                assert (await events(response))[-1] == "[DONE]"

            # One that takes nothing is cut, over TLS and in the event loop that services use.
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, limit=1_000)
            raw = request(payload=payload | {"max_tokens": 1_000}, headers="Authorization: Bearer bob\r\n")
            writer.write(raw)
            stuck = await core.next_request()
            async with asyncio.timeout(TIMEOUT):
                while not stuck.aborted:
                    stuck.send(*text.tokenizer.encode("Paris is nice. " * 400))
                    await http.get("/livez")
            writer.transport.abort()
            del reader
        process.process.send_signal(signal.SIGTERM)
        assert await process.end() == 0
    lines = [orjson.loads(line) for line in access.read_bytes().splitlines()]
    assert [(line["path"], line["status"], line["error"], line["key"]) for line in lines] == [
        ("/v1/models", 401, "invalid_api_key", None),
        ("/v1/models", 200, None, "bob"),
        (CHAT, 200, None, "alice"),
        (CHAT, 200, "client_closed", "bob"),
    ]
    happened = [orjson.loads(line)["event"] for line in audit.read_bytes().splitlines()]
    assert [event for event in happened if event != "request"] == ["start", "keys", "certificate", "stop"]


async def test_settings_that_cannot_work_end_the_process(model_path: Path, tmp_path: Path) -> None:
    arguments = [str(model_path), "--core", f"unix:{tmp_path}/x", "--port", "0"]
    async with front_end(*arguments, "--api-keys-file", str(tmp_path / "none.toml")) as process:
        assert "none.toml cannot be read" in (await process.report("fatal")).message
        assert await process.end() == 1

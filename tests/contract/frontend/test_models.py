"""``/v1/models``, ``/version`` and the OpenAPI document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from tests.contract.frontend.conftest import MODEL, running
from tests.fakes.core import FakeCore

if TYPE_CHECKING:
    from tercet_frontend.tokenizing import ModelText

PROTECTED = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("GET", "/v1/responses/resp_1/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("DELETE", "/v1/requests/1"),
]


async def test_models(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        (listed,) = (await front_end.openai.models.list()).data
        assert await front_end.openai.models.retrieve(MODEL) == listed
        assert (listed.id, listed.object, listed.owned_by) == (MODEL, "model", "tercet")
        for name in ("other", "some/thing", "x" * 1000):
            with pytest.raises(openai.NotFoundError) as caught:
                await front_end.openai.models.retrieve(name)
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            assert len(caught.value.message) < 500


async def test_version(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core], ready=False) as front_end:
        answer = (await front_end.http.get("/version")).json()
        document = (await front_end.http.get("/openapi.json")).json()
    assert answer == {"version": document["info"]["version"]}


@pytest.mark.parametrize(("method", "path"), PROTECTED)
async def test_keys_are_asked_for(text: ModelText, method: str, path: str) -> None:
    async with FakeCore() as core, running(text, [core], keys=["secret"]) as front_end:
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            assert (await front_end.http.request(method, path, json={}, headers=headers)).status_code == 401
        assert (await front_end.http.request(method, path, json={})).status_code != 401


async def test_the_openapi_document_names_every_body(text: ModelText) -> None:
    async with FakeCore() as core, running(text, [core]) as front_end:
        document = (await front_end.http.get("/openapi.json")).json()
    for method, path in PROTECTED:
        described = path.replace("resp_1", "{response_id}").replace("requests/1", "requests/{request_id}")
        described = described.replace(f"models/{MODEL}", "models/{model}")
        operation = document["paths"][described][method.lower()]
        if method == "POST" and not path.endswith("/cancel"):
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            schema = document["components"]["schemas"][reference.rpartition("/")[2]]
            assert schema["properties"], path
    for operations in document["paths"].values():
        assert all(set(operation["responses"]) == {"200", "default"} for operation in operations.values())
    referred = _references(document)
    assert referred
    assert {reference.rpartition("/")[2] for reference in referred} <= set(document["components"]["schemas"])


def _references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(_references, value.values()))
    if isinstance(value, list):
        return set().union(*map(_references, value))
    return set()

"""Cores and front ends that show each other certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tercet_proto.v1 import engine_pb2 as pb
from tercet_proto.v1 import engine_pb2_grpc
from tercet_shared.config import Common
from tercet_shared.errors import ConfigurationError
from tercet_shared.mtls import channel_options, client_credentials, mutual_tls
from tests.fakes.certificates import Authority, Certificate
from tests.fakes.ports import free_port
from tests.integration.core.conftest import StartCore

TIMEOUT = 60.0


def files(certificate: Certificate, issuers: Path) -> dict[str, Any]:
    return {"mtls_cert": certificate.chain, "mtls_key": certificate.key, "mtls_ca": issuers}


async def ask(address: str, credentials: grpc.ChannelCredentials | None, **options: str) -> str:
    """Returns the core's name, or what gRPC says when it does not answer."""
    arguments = [("grpc.use_local_subchannel_pool", 1), *((f"grpc.{name}", value) for name, value in options.items())]
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=arguments)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=arguments)
    async with channel:
        stub: Any = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        try:
            reply = await stub.Info(pb.InfoRequest(), timeout=TIMEOUT)
        except grpc.aio.AioRpcError as error:
            return "refused" if error.code() is grpc.StatusCode.UNAVAILABLE else str(error.code())
    return f"answered: {reply.not_ready_reason}"


async def test_only_those_with_a_certificate_of_the_authority_are_served(start_core: StartCore, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    own, client, strange = authority.issue("core"), authority.issue("front-end"), other.issue("strange")
    issuers = authority.certificate.chain
    address = f"127.0.0.1:{free_port()}"
    async with start_core(listen=address, **files(own, issuers)):
        good = client_credentials(Common(**files(client, issuers)))
        assert await ask(address, good) == "answered: waiting for the worker"
        assert await ask(address, None) == "refused"
        nameless = grpc.ssl_channel_credentials(issuers.read_bytes())
        assert await ask(address, nameless) == "refused"
        assert await ask(address, client_credentials(Common(**files(strange, issuers)))) == "refused"
        deceived = client_credentials(Common(**files(client, other.certificate.chain)))
        assert await ask(address, deceived) == "refused", "the front end does not know who issued the core's"
        assert await ask(address, good, ssl_target_name_override="elsewhere") == "refused"
        assert await ask(address, good, ssl_target_name_override="localhost") == "answered: waiting for the worker"


async def test_a_renewed_certificate_is_used(start_core: StartCore, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    first, second, client = old.issue("first"), new.issue("second"), new.issue("front-end")
    used = Certificate(tmp_path / "used.pem", tmp_path / "used.key")
    issuers = tmp_path / "issuers.pem"
    issuers.write_bytes(old.certificate.chain.read_bytes() + new.certificate.chain.read_bytes())

    def install(certificate: Certificate) -> None:
        used.chain.write_bytes(certificate.chain.read_bytes())
        used.key.write_bytes(certificate.key.read_bytes())

    install(first)
    address = f"127.0.0.1:{free_port()}"
    async with start_core(listen=address, **files(used, issuers)):
        knows_new = client_credentials(Common(**files(client, new.certificate.chain)))
        assert await ask(address, knows_new) == "refused"
        used.chain.write_bytes(second.chain.read_bytes())  # half of it
        knows_old = client_credentials(Common(**files(client, old.certificate.chain)))
        assert (await ask(address, knows_old)).startswith("answered")
        install(second)
        assert (await ask(address, knows_new)).startswith("answered")


async def test_a_unix_socket_needs_no_certificate(start_core: StartCore, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with start_core(**files(authority.issue("core"), authority.certificate.chain)) as core:
        assert (await ask(core.settings.listen, None)).startswith("answered")


@pytest.mark.parametrize("missing", ["mtls_cert", "mtls_key", "mtls_ca"])
def test_all_three_or_none(tmp_path: Path, missing: str) -> None:
    given = files(Certificate(tmp_path / "a", tmp_path / "b"), tmp_path / "c") | {missing: None}
    with pytest.raises(ConfigurationError) as caught:
        mutual_tls(Common(**given))
    assert caught.value.param == missing
    assert f"--{missing.replace('_', '-')} is missing" in caught.value.message
    assert mutual_tls(Common()) is None
    assert client_credentials(Common()) is None


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, other = authority.issue("own"), authority.issue("other")
    issuers = authority.certificate.chain
    for certificate, ca, hint in (
        (Certificate(own.chain, other.key), issuers, "mismatch"),
        (Certificate(own.chain, tmp_path / "none"), issuers, r"none \(--mtls-key\) cannot be read: No such file"),
        (own, own.key, "cannot be used"),
    ):
        with pytest.raises(ConfigurationError, match=hint):
            mutual_tls(Common(**files(certificate, ca)))
    assert channel_options(Common(mtls_name="core")) == [("grpc.ssl_target_name_override", "core")]

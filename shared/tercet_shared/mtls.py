"""TLS between front ends and cores, in which both sides show a certificate.

Not on Unix sockets, which the file system guards. A core reads its files again when they have changed, at the next
connection. gRPC cannot do that for a channel that exists; a front end reads them whenever it asks for credentials.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from tercet_shared.config import Common

_log = logging.getLogger(__name__)

_SETTINGS = ("mtls_cert", "mtls_key", "mtls_ca")


@dataclass(frozen=True, slots=True)
class _Contents:
    """What the files held: PEM."""

    chain: bytes
    key: bytes
    issuers: bytes


class MutualTls:
    """The three files.

    Args:
        certificate: chain, from the process's own certificate on.
        key: its private key, not encrypted.
        issuers: whose certificates the other side may show.

    Raises:
        ConfigurationError: a file cannot be read, or they do not belong together.
    """

    def __init__(self, certificate: Path, key: Path, issuers: Path) -> None:
        self._files = (certificate, key, issuers)
        self._stamp = self._stamps()
        self._contents = self._read()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials that ask clients for a certificate, and follow changes of the files."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._contents),
            self._changed,  # type: ignore[arg-type]  # it may return None, for no change
            require_client_authentication=True,
        )

    def client_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials with what the files hold now, or held when they could last be used."""
        self._changed()
        own = self._contents
        return grpc.ssl_channel_credentials(own.issuers, own.key, own.chain)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Reads the files again if they have changed; called by gRPC in each handshake, on a thread of its own."""
        try:
            stamp = self._stamps()
            if stamp == self._stamp:
                return None
            contents = self._read()
        except ConfigurationError as error:  # perhaps only one of the files has been replaced so far
            _log.warning("%s What was read before stays in use.", error.message)
            return None
        self._stamp, self._contents = stamp, contents
        _log.info("the certificate %s was read again", self._files[0])
        return _configuration(contents)

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_stamp(path, name) for path, name in zip(self._files, _SETTINGS, strict=True))

    def _read(self) -> _Contents:
        certificate, key, issuers = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # only to see whether they can be used
        try:
            context.load_cert_chain(certificate, key, _no_password)
            context.load_verify_locations(issuers)
            return _Contents(certificate.read_bytes(), key.read_bytes(), issuers.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"The certificate {certificate}, its key {key} and the issuers {issuers} cannot be used together: "
                f"{_reason(error)}.",
                param="mtls_cert",
            ) from None


def mutual_tls(settings: Common) -> MutualTls | None:
    """Returns what the settings ask for, or None where they ask for no TLS.

    Raises:
        ConfigurationError: one of the three files is not given, or they cannot be used.
    """
    certificate, key, issuers = settings.mtls_cert, settings.mtls_key, settings.mtls_ca
    if certificate is not None and key is not None and issuers is not None:
        return MutualTls(certificate, key, issuers)
    if certificate is None and key is None and issuers is None:
        return None
    missing = "mtls_cert" if certificate is None else "mtls_key" if key is None else "mtls_ca"
    raise ConfigurationError(
        f"--{missing.replace('_', '-')} is missing: TLS between services needs --mtls-cert, --mtls-key and --mtls-ca.",
        param=missing,
    )


def client_credentials(settings: Common) -> grpc.ChannelCredentials | None:
    """Returns credentials for channels to cores that are not on Unix sockets; None: channels without TLS.

    Raises:
        ConfigurationError: see `mutual_tls`.
    """
    tls = mutual_tls(settings)
    return None if tls is None else tls.client_credentials()


def channel_options(settings: Common) -> list[tuple[str, str]]:
    """Returns the options that such channels need: under which name cores identify themselves, if that is given."""
    return [] if settings.mtls_name is None else [("grpc.ssl_target_name_override", settings.mtls_name)]


def is_local(address: str) -> bool:
    """Returns whether an address of gRPC is a Unix socket."""
    return address.startswith("unix:")


def _stamp(path: Path, name: str) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        flag = name.replace("_", "-")
        raise ConfigurationError(f"The file {path} (--{flag}) cannot be read: {error.strerror}.", param=name) from None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _configuration(contents: _Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.chain)], contents.issuers)


def _no_password() -> str:
    """Instead of a question on the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "they are not PEM").lower().replace("_", " ")
    return (error.strerror or "they cannot be read") if isinstance(error, OSError) else str(error)

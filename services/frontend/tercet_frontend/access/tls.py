"""TLS: the certificate that the server shows, read again when it is renewed; and the clients' own, if asked for."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from tercet_frontend.access.watch import FileWatch
from tercet_shared.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)


class ServerTls:
    """A TLS context whose certificate may change while it is in use; connections that are open keep theirs.

    Attributes:
        context: for the server.
        asks_clients: whether clients must show a certificate. It is optional in the handshake and checked with the
            request, so that health can be asked for without one.
    """

    def __init__(
        self,
        certificate: Path,
        key: Path,
        client_ca: Path | None = None,
        *,
        reloaded: Callable[[str], None] = lambda _outcome: None,
    ) -> None:
        """Reads the files.

        Args:
            certificate: PEM, the chain from the server's own on.
            key: PEM, not encrypted.
            client_ca: PEM, who issues clients' certificates; None asks clients for none.
            reloaded: is told, in one sentence, what came of each later attempt.

        Raises:
            ConfigurationError: a file cannot be read, or they do not belong together.
        """
        self._files = (certificate, key, client_ca)
        self._watch = FileWatch([path for path in self._files if path is not None])
        self._reloaded = reloaded
        self.asks_clients = client_ca is not None
        self.context = _context(*self._files)
        # Called in each handshake, which is when another certificate matters.
        self.context.sni_callback = self._shake_hands

    def reload(self) -> ssl.SSLContext | None:
        """Reads the files again; with a mistake in them, all stays as it was.

        Returns:
            Another context with what is in the files now; None after a mistake.
        """
        self._watch.note()
        certificate, key, client_ca = self._files
        fresh: ssl.SSLContext | None = None
        try:
            fresh = _context(*self._files)  # first: the context in use must never have half of a pair
            self.context.load_cert_chain(certificate, key, _no_password)
            if client_ca is not None:
                self.context.load_verify_locations(client_ca)
        except (ConfigurationError, OSError, ValueError) as error:
            fresh = None
            outcome = f"{error} The certificate stays as it was."
            logger.warning("%s", outcome)
        else:
            outcome = f"The certificate {certificate} was read again."
            logger.info("%s", outcome)
        self._reloaded(outcome)
        return fresh

    def _shake_hands(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        fresh = self.reload() if self._watch.changed() else None
        if fresh is not None:
            connection.context = fresh  # this connection was begun with the certificate of before


def _context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The certificate {certificate} with the key {key} cannot be used: {_reason(error)}.", param="tls_cert"
        ) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"The certificates in {client_ca} cannot be used: {_reason(error)}.", param="tls_client_ca"
            ) from None
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _no_password() -> str:
    """Instead of a question on the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is not PEM").lower().replace("_", " ")
    return error.strerror or "it cannot be read" if isinstance(error, OSError) else str(error)

"""An authority that issues certificates for the duration of a test, through the program `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """Two PEM files."""

    chain: Path
    key: Path


class Authority:
    """Who issues certificates; its own is in ``certificate.chain``."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        program = shutil.which("openssl")
        if program is None:
            pytest.skip("the program openssl is not installed")
        self._program = program
        self._directory = directory
        self.certificate = self._make(name, "-x509", "-addext", "basicConstraints=critical,CA:TRUE")

    def issue(self, name: str) -> Certificate:
        """Returns a certificate for this machine, which is called ``name``."""
        own = self.certificate
        return self._make(
            name, "-x509", "-CA", str(own.chain), "-CAkey", str(own.key),
            "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip

    def _make(self, name: str, *options: str) -> Certificate:
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        subprocess.run(
            [self._program, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2",
             "-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(made.chain), *options],
            check=True, capture_output=True,
        )  # fmt: skip
        return made

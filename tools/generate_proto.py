"""Generates the gRPC code in shared/tercet_proto from proto/, or checks with --check that it is up to date."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "proto"
TARGET = ROOT / "shared"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(target: Path) -> None:
    """Writes the code for every proto file under ``target``. Raises SystemExit with what the compiler found wrong."""
    protos = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto"))
    outputs = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    includes = [f"--proto_path={SOURCES}", f"--proto_path={files('grpc_tools') / '_proto'}"]
    code = protoc.main(["protoc", *includes, *outputs, *protos])
    if code != 0:
        raise SystemExit(code)


def generated_files(root: Path) -> dict[str, bytes]:
    """Returns the generated files under ``root``, by their path in it."""
    package = root / "tercet_proto"
    paths = [path for pattern in GENERATED for path in package.rglob(pattern)]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def differences() -> list[str]:
    """Returns the generated files that are missing, changed, or no longer generated."""
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        expected, present = generated_files(Path(directory)), generated_files(TARGET)
    return sorted(name for name in expected.keys() | present.keys() if expected.get(name) != present.get(name))


def main() -> int:
    """Returns 1 if --check found a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    changed = differences()
    for name in changed:
        print(f"{name} does not match proto/: run `make proto`", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Messages of an earlier version of ``tercet.v1``, made from a copy of its proto file that nobody changes.

They live in a descriptor pool of their own, because the present messages have the same names.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from grpc_tools import protoc

FILE = "engine.proto"


@cache
def frozen(version: int) -> FileDescriptor:
    """Returns the file of a version."""
    source = Path(__file__).parent / f"version_{version}"
    with TemporaryDirectory() as directory:
        target = Path(directory) / "set"
        arguments = ["protoc", f"--proto_path={source}", f"--descriptor_set_out={target}", FILE]
        assert protoc.main(arguments) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return pool.FindFileByName(FILE)  # type: ignore[no-any-return, no-untyped-call]


class Messages:
    """The messages of a version, as attributes."""

    def __init__(self, version: int) -> None:
        self._file = frozen(version)

    def __getattr__(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._file.message_types_by_name[name])

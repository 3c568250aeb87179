from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet_shared.checkpoint import Checkpoint
from tercet_shared.checkpoint.gguf_file import GgufFile, LongArray
from tercet_shared.errors import CheckpointError
from tests.fakes.checkpoints import write_tiny_llama_gguf

if TYPE_CHECKING:
    from pathlib import Path


def test_metadata_agrees_with_the_package_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "x.u8": (writer.add_uint8, 200),
        "x.i8": (writer.add_int8, -100),
        "x.u16": (writer.add_uint16, 60_000),
        "x.i16": (writer.add_int16, -30_000),
        "x.u32": (writer.add_uint32, 4_000_000_000),
        "x.i32": (writer.add_int32, -2_000_000_000),
        "x.u64": (writer.add_uint64, 1 << 63),
        "x.i64": (writer.add_int64, -(1 << 62)),
        "x.f32": (writer.add_float32, 0.5),
        "x.f64": (writer.add_float64, 0.1),
        "x.flag": (writer.add_bool, True),
        "x.text": (writer.add_string, "grüße 🙂"),
        "x.short": (writer.add_array, [1, 2, 3]),
        "x.words": (writer.add_array, ["a", "", "c d"]),
        "x.long": (writer.add_array, list(range(5_000))),
        "x.long_words": (writer.add_array, [f"w{index}" for index in range(5_000)]),
    }
    for key, (add, value) in values.items():
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, reference = GgufFile.open(path), gguf.GGUFReader(path)
    for key, (_, value) in values.items():
        theirs = reference.fields[key].contents()
        assert theirs == value
        if isinstance(value, list):
            ours = file.strings(key) if isinstance(value[0], str) else file.numbers(key)
            assert ours == theirs
        else:
            assert file.metadata[key] == theirs
    assert isinstance(file.metadata["x.long"], LongArray)
    assert file.strings("absent") == []
    assert file.text("absent") is None
    for read, key in [
        (file.strings, "x.long"),
        (file.numbers, "x.long_words"),
        (file.strings, "x.short"),
        (file.numbers, "x.words"),
        (file.strings, "x.u8"),
        (file.integer, "x.text"),
        (file.integer, "x.flag"),
        (file.text, "x.u8"),
        (file.flag, "x.u8"),
    ]:
        with pytest.raises(CheckpointError, match=key):
            read(key)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", layers=1)


def test_every_truncation_is_one_sentence(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    header_end = min(tensor.offset for tensor in GgufFile.open(tiny).tensors.values())
    path = tmp_path / "cut.gguf"
    for size in [*range(1, header_end, 37), header_end, len(data) // 2, len(data) - 33]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="is truncated") as caught:
            _ = Checkpoint.open(str(path)).config
        assert "\n" not in str(caught.value)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is empty"):
        _ = Checkpoint.open(str(path)).config


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"PK\x03\x04 something else", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "is truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "is truncated"),
    ],
)
def test_other_files(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence):
        _ = Checkpoint.open(str(path)).config


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_escape(tiny: Path, data: st.DataObject) -> None:
    """Whatever a header says, the reader answers or refuses; nothing else is raised, nothing large is made."""
    original = tiny.read_bytes()
    header_end = min(tensor.offset for tensor in GgufFile.open(tiny).tensors.values())
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, header_end - 1))] = data.draw(st.integers(0, 255))
    path = tiny.with_name("flipped.gguf")
    path.write_bytes(content)
    checkpoint = Checkpoint.open(str(path))
    for part in ("config", "weights", "tokenizer", "chat_template", "fingerprint"):
        with contextlib.suppress(CheckpointError):
            getattr(checkpoint, part)

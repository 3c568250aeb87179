from __future__ import annotations

import pytest

from tercet_core.grammar.masks import Masks
from tercet_core.grammar.vocabulary import Vocabulary
from tests.fakes.grammars import read_smollm2


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return read_smollm2(49_152)


@pytest.fixture(scope="session")
def masks() -> Masks:
    return Masks()

"""The counter-based random numbers of sampling: no state, the same on every backend.

A draw depends on (seed, position, vocabulary id) and nothing else, so a seeded request gives the same tokens whatever
it is batched with, after preemption and after migration.

All arithmetic is on 32-bit words modulo 2³², shifts are logical, ``^`` is exclusive or::

    mix(x):  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    a = mix(mix(seed mod 2³²) ^ position)
    b = mix(mix((seed >> 32) ^ 0x85A308D3) + position * 0x9E3779B9)
    h = mix(mix(id ^ a) ^ b)
    u = ((h >> 9) + 0.5) · 2⁻²³          exact in float32; 2⁻²⁴ ≤ u ≤ 1 - 2⁻²⁴
    gumbel = -log(-log(u))

``seed`` is the choice's 64-bit seed, ``position`` the 0-based place, in prompt + output, of the token that is drawn,
``id`` the token's id. Known answers: seed 0, position 0, id 0 gives h = 0x42F99747; seed 0x0123456789ABCDEF, position
7, id 49151 gives h = 0x51B28DC6.

``mix`` is "lowbias32" of Chris Wellons, "Prospecting for hash functions" (2018, public domain). The Gumbel-max trick:
the argmax of ``logit + gumbel`` is a draw from the softmax of the logits (Maddison, Tarlow, Minka, "A* sampling",
2014).

torch has no unsigned 32-bit arithmetic to speak of: words are int32, whose product wraps, and whose ``>>`` copies the
sign bit, so the shifted-in bits are masked away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)
_HIGH_SALT = 0x85A308D3 - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)


@dataclass(frozen=True, slots=True)
class RowKeys:
    """What (seed, position) of each row contributes."""

    a: torch.Tensor  # int32 [R]
    b: torch.Tensor  # int32 [R]

    @classmethod
    def of(cls, seed_low: torch.Tensor, seed_high: torch.Tensor, positions: torch.Tensor) -> RowKeys:
        """Returns the keys for halves of seeds and positions, all int32 ``[R]`` (the bits count, not the sign)."""
        a = mix_(mix_(seed_low.clone()) ^ positions)
        b = mix_(mix_(seed_high ^ _HIGH_SALT) + positions * _GOLDEN)
        return cls(a, b)

    def rows(self, index: torch.Tensor) -> RowKeys:
        """Returns the keys of some rows."""
        return RowKeys(self.a[index], self.b[index])


def mix_(x: torch.Tensor) -> torch.Tensor:
    """Mixes int32 words in place and returns them."""
    x ^= (x >> 16) & 0xFFFF
    x *= _M1
    x ^= (x >> 15) & 0x1FFFF
    x *= _M2
    x ^= (x >> 16) & 0xFFFF
    return x


def words(keys: RowKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns ``h`` as int32 ``[R, K]`` for ids int32 ``[K]`` (the same for all rows) or ``[R, K]``."""
    h = mix_(token_ids ^ keys.a.unsqueeze(1))
    h ^= keys.b.unsqueeze(1)
    return mix_(h)


def uniform(keys: RowKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns ``u`` as float32 ``[R, K]``, strictly between 0 and 1."""
    h = words(keys, token_ids)
    h >>= 9
    h &= 0x7FFFFF
    return h.to(torch.float32).add_(0.5).mul_(2.0**-23)


def gumbel(keys: RowKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns standard Gumbel noise as float32 ``[R, K]``."""
    return uniform(keys, token_ids).log_().neg_().log_().neg_()

"""A run of consecutive rows or columns, out of all that a checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """``whole`` elements, of which those from ``begin`` up to ``end`` are meant."""

    whole: int
    begin: int
    end: int

    @classmethod
    def all(cls, whole: int) -> Cut:
        """Returns the cut that leaves nothing out."""
        return cls(whole, 0, whole)

    @classmethod
    def even(cls, whole: int, parts: int, part: int) -> Cut:
        """Returns one of ``parts`` cuts that hold everything together; the first ones have one element more."""
        size, more = divmod(whole, parts)
        begin = part * size + min(part, more)
        return cls(whole, begin, begin + size + (part < more))

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def partial(self) -> bool:
        """Whether something is left out."""
        return len(self) < self.whole

    def times(self, size: int) -> Cut:
        """Returns the cut of as many runs of ``size`` elements."""
        return Cut(self.whole * size, self.begin * size, self.end * size)

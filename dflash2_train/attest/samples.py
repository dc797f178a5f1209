"""What the gates read: a cache, or the part of a stream that is there at its start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from data_gen.cache.format import CapturedSample, CaptureManifest, IndexRow


class Samples(Protocol):
    """Captured samples by place, as :class:`data_gen.cache.reader.CaptureReader` gives them."""

    manifest: CaptureManifest

    @property
    def index(self) -> Sequence[IndexRow]:
        """One row a sample."""
        ...

    def __len__(self) -> int: ...

    def read(self, sample_index: int) -> CapturedSample:
        """One sample."""
        ...

"""What the step benchmark computes: shapes, and the floating-point operations that a step needs at least.

Only the standard library: the peer's process reads these shapes in an environment of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of one document, and the drafter that learns from it."""

    name: str
    hidden: int  # H
    vocab: int  # V
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    taps: int
    tokens: int  # S
    anchors: int  # blocks
    block_size: int = 8  # W
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    teacher_top_k: int = 20

    def to_json(self) -> str:
        """For the command line of a measuring process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(text))

    @property
    def supervised(self) -> int:
        """Slots with a label, N."""
        return self.anchors * (self.block_size - 1)

    @property
    def full_logits_bytes(self) -> int:
        """[N, V] in fp32, the unit of a loss's memory."""
        return self.supervised * self.vocab * 4

    def forward_backward_flops(self) -> float:
        """Operations that forward and backward cannot do without: matrix products, a multiply-add being two.

        Every weight is multiplied once forward and twice backward, save that the taps and the frozen head get one
        gradient each. Blocks see half of the document on average, anchors being spread evenly. Nothing that is
        computed again counts.
        """
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        conv = 2 * 2 * self.conv_kernel_size * (self.hidden // self.conv_group_size)
        slot = self.hidden * (2 * query + 2 * key + 3 * self.intermediate + conv)
        slots = self.anchors * self.block_size
        seen = self.tokens / 2 + self.block_size
        attention = slots * seen * 2 * query
        layer = slots * slot + self.tokens * self.hidden * 2 * key + attention
        encode = self.tokens * self.taps * self.hidden * self.hidden
        head = self.supervised * self.vocab * self.hidden
        return 2.0 * (3 * self.layers * layer + 2 * encode + 2 * head)


_SMALL = Workload(
    name="A",
    hidden=576,
    vocab=49_152,
    layers=5,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    taps=5,
    tokens=1024,
    anchors=128,
)
WORKLOADS = {
    "A": _SMALL,
    "B": replace(_SMALL, name="B", vocab=154_880, anchors=64),
    # Twice the anchors, twice the context: what a step's time and memory grow by.
    "A-anchors": replace(_SMALL, name="A-anchors", anchors=2 * _SMALL.anchors),
    "A-context": replace(_SMALL, name="A-context", tokens=2 * _SMALL.tokens),
    "tiny": replace(_SMALL, name="tiny", vocab=2048, layers=2, intermediate=256, tokens=128, anchors=8),
    # The drafter of GLM-5.3-Flash, for one GPU.
    "H200": Workload(
        name="H200",
        hidden=4096,
        vocab=154_880,
        layers=8,
        intermediate=12_288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        taps=9,
        tokens=4096,
        anchors=512,
    ),
}

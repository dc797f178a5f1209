"""Few distinct shapes: sizes that vary from batch to batch are rounded up, and what fills them counts for nothing.

Libraries prepare a kernel for every shape of a product that they meet. oneDNN keeps the last 1024 of them, half a
megabyte each; with sizes as they come a step of training brings some 25 new ones, which take time to make and, worse,
are freed again between the tensors of the heap. Of ``+experiment=smollm2_cpu`` (glibc's mallinfo2), after 110 steps,
918 MB were in use and 929 MB holes, still growing; with sizes rounded up 485 and 343 MB, and the heap no larger at step
130 than at 120. torch.compile likewise compiles again for new shapes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from dflash2_train.budgets import ROWS_MULTIPLE, round_up

__all__ = ["ROWS_MULTIPLE", "padded_rows", "round_up"]


def padded_rows(tensor: Tensor) -> Tensor:
    """[N, ...] with rows of zeros up to the next multiple of ``ROWS_MULTIPLE``; itself if there is none to add."""
    missing = -len(tensor) % ROWS_MULTIPLE
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing else tensor

"""vLLM's DFlash 2 path on a machine without a GPU: its Triton kernels run in Triton's own interpreter, in numpy.

vLLM serves these drafters with its second model runner alone, whose kernels are Triton's, and the Triton package has no
CPU backend. What is changed here, found with vllm-cpu 0.32.0 and triton 3.9.0:

* the interpreter is switched on, and a backend named "cpu" is announced, which is all that vLLM looks for;
* comparisons give booleans. The interpreter leaves the operands' type on the result, so that a mask made of scalars,
  as the selector's walk has one, is an integer and refused;
* triton.language is patched for the interpreter once and not around every launch, for speed alone;
* context keys of the drafter are normed one layer at a time. The GPU kernel takes each layer's row of a [layers, D]
  weight, the CPU kernel the first row for all of them: nothing fails, and acceptance drops.

Everything else, from the weight loader to the metrics, is vLLM's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def install() -> None:
    """Prepare this process; before vLLM or Triton is imported."""
    if "vllm" in sys.modules or "triton" in sys.modules:
        raise RuntimeError("triton_on_cpu.install() comes before any import of vllm or triton")
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if importlib.util.find_spec("triton") is None:
        sys.path.append(str(Path(sys.prefix) / "opt" / "triton"))  # where launch/test.sh puts it
    from triton import backends

    nowhere = SimpleNamespace(is_active=lambda: False)  # there is no device to drive
    backends.backends.setdefault("cpu", SimpleNamespace(compiler=None, driver=nowhere))
    _compare_to_booleans()
    _patch_language_once()


def _compare_to_booleans() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    comparisons = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
    arithmetic = interpreter.InterpreterBuilder.binary_op

    def binary_op(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in comparisons:
            return interpreter.TensorHandle(np.asarray(op(lhs.data, rhs.data), dtype=np.bool_), tl.int1)
        return arithmetic(builder, lhs, rhs, op)

    interpreter.InterpreterBuilder.binary_op = binary_op


def _patch_language_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    everywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    done: list[Any] = []

    def patch_once(_kernel: Any) -> Any:
        if not done:
            done.append(patch(everywhere))
        return interpreter._LangPatchScope()  # holds nothing, so that leaving it undoes nothing

    interpreter._patch_lang = patch_once


def norm_keys_by_layer() -> None:
    """Replace the one call that vLLM's CPU build gets wrong; any time before a drafter is used."""
    import torch
    from vllm import _custom_ops as kernels
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize_context_k(model: Any, keys: Any) -> Any:  # [layers, tokens, key heads, D]
        normed = torch.empty_like(keys)
        for layer, weight in enumerate(model._k_norm_weights):
            kernels.rms_norm(normed[layer], keys[layer], weight, model._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = normalize_context_k

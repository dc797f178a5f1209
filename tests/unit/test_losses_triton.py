"""The Triton pass, interpreted on a CPU, against the PyTorch pass and fp64.

Triton is kept out of the environment that runs the tests (vLLM on a CPU misbehaves beside it), in
``.venv/opt/triton``, so the comparison runs in a process of its own: this file is both the test and that process.
Without a GPU the kernels are also compiled, to machine code for the GPUs they are meant for, which the interpreter
would not notice to fail.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash2_train.config import KL_KINDS, ConfigError
from dflash2_train.losses import UnaryLoss, unary_loss

C, T = 4, 5
SHAPES = [(7, 6, 37), (5, 16, 64 * 2 * C + 3), (3, 8, 4096 + 131)]  # rows, hidden, vocabulary
SHAPINGS: list[tuple[float, float | None]] = [(1.0, None), (0.5, 3.0)]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.01}


def problem(shape: tuple[int, int, int], dtype: torch.dtype, kl_kind: str) -> dict[str, Tensor]:
    """A drafter near its teacher, gold tokens in and out of the teacher's ids, one row with a short list."""
    rows, hidden, vocab = shape
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, hidden, generator=generator).mul(0.8).to(dtype)
    head = torch.randn(vocab, hidden, generator=generator).to(dtype)
    teacher_states = (states + 0.1 * torch.randn(rows, hidden, generator=generator)).to(dtype)
    teacher = (teacher_states.double() @ head.double().T).log_softmax(-1).topk(T)
    ids, logprobs = teacher.indices, teacher.values.float()
    ids[1, 2:], logprobs[1, 2:] = 0, -torch.inf
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[0], targets[1] = ids[0, 1], 0
    inputs = {
        "hidden": states.requires_grad_(),
        "head_weight": head,
        "target_ids": targets,
        "teacher_ids": ids,
        "teacher_logprobs": logprobs,
    }
    if kl_kind == "full_vocabulary":
        inputs["teacher_hidden"] = teacher_states
    return inputs


def run(inputs: dict[str, Tensor], implementation: str, **options: Any) -> tuple[UnaryLoss, Tensor]:
    rows = len(inputs["hidden"])
    result = unary_loss(**inputs, ce_weight=0.8, top_k=C, chunk_bytes=1 << 16, implementation=implementation, **options)
    (gradient,) = torch.autograd.grad((result.loss * torch.arange(1.0, rows + 1)).sum(), inputs["hidden"])
    return result, gradient


def check(shape: tuple[int, int, int], dtype: torch.dtype, kl_kind: str, shaping: tuple[float, float | None]) -> None:
    """Values as the PyTorch pass on the same inputs; the gradient as that of the PyTorch pass in fp64."""
    case = f"{shape} {dtype} {kl_kind} {shaping}"
    options: dict[str, Any] = {
        "kl_weight": 0.7,
        "kl_kind": kl_kind,
        "output_multiplier": shaping[0],
        "final_logit_softcapping": shaping[1],
    }
    inputs = problem(shape, dtype, kl_kind)
    found, gradient = run(inputs, "triton", **options)
    expected, _ = run(inputs, "torch", **options)
    apart = found.candidate_logits[:, 0] > found.candidate_logits[:, 1]  # equal logits may stand in another order
    for name, one, two in zip(UnaryLoss._fields, found, expected, strict=True):
        if name == "top1_correct":
            assert torch.equal(one[apart], two[apart]), case
        elif name != "candidate_ids":
            torch.testing.assert_close(one, two, rtol=3e-5, atol=3e-5, msg=lambda text, n=name: f"{case} {n}: {text}")
    assert all(len(set(row)) == C for row in found.candidate_ids.tolist()), case
    exact = {key: value.detach().double() if value.is_floating_point() else value for key, value in inputs.items()}
    exact["hidden"].requires_grad_()
    _, expected_gradient = run(exact, "torch", **options)
    if dtype == torch.bfloat16:  # the product is rounded to 16 bits by both, which fp64 does not show
        _, expected_gradient = run(inputs, "torch", **options)
    error = float((gradient.double() - expected_gradient).norm() / expected_gradient.norm())
    assert error < TOLERANCE[dtype], f"{case}: gradient off by {error:.2g}"


def interpret() -> None:
    """Every shape and divergence, with every dtype and shaping."""
    torch.set_num_threads(1)
    for turn, shape in enumerate(SHAPES):
        for kl_kind in KL_KINDS:
            for shaping, dtype in zip(SHAPINGS, list(TOLERANCE)[:: (-1) ** turn], strict=True):
                check(shape, dtype, kl_kind, shaping)


def compile_kernels() -> None:
    """All kernels with every branch in, for Hopper and Blackwell."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dflash2_train.budgets import LOGIT_GROUP as GROUP
    from dflash2_train.losses import kernels
    from dflash2_train.losses.pass_triton import TILE, WARPS

    constants = {"HAS_CAP": True, "HAS_TEACHER": True, "GROUP": GROUP, "TILE": TILE}
    scalars = {"vocab": "i32", "num_groups": "i32", "multiplier": "fp32", "cap": "fp32", "teacher_scale": "fp32"}
    for capability in (90, 100):
        for kernel in (kernels.statistics, kernels.full_divergence, kernels.gradient):
            kinds = {name: "*bf16" if name.endswith("raw") else "*fp32" for name in kernel.arg_names}
            kinds.update({name: kind for name, kind in scalars.items() if name in kinds})
            kinds.update({name: "constexpr" for name in constants if name in kinds})
            own = {name: value for name, value in constants.items() if name in kinds}
            source = ASTSource(kernel, signature=kinds, constexprs=own)
            target = GPUTarget("cuda", capability, 32)
            assert triton.compile(source, target=target, options={"num_warps": WARPS}).asm["cubin"]


def run_with_triton(root: Path, task: str, cache: Path, **environment: str) -> None:
    site = Path(sys.prefix) / "opt" / "triton"
    if importlib.util.find_spec("triton") is None and not (site / "triton").is_dir():
        pytest.skip(f"Triton is not installed in {site}; launch/test.sh puts it there")
    paths = {"PYTHONPATH": f"{root}{os.pathsep}{site}", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.unit.test_losses_triton", task]
    done = subprocess.run(
        command, env={**os.environ, **paths, **environment}, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_interpreted_triton_pass_equals_the_pytorch_pass(repo_root: Path, tmp_path: Path) -> None:
    run_with_triton(repo_root, "interpret", tmp_path, TRITON_INTERPRET="1")


def test_the_kernels_compile_for_the_gpus_they_are_meant_for(repo_root: Path, tmp_path: Path) -> None:
    run_with_triton(repo_root, "compile", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kl_kind", KL_KINDS)
def test_the_compiled_triton_pass_equals_the_pytorch_pass(kl_kind: str, dtype: torch.dtype) -> None:
    inputs = problem((9, 64, 5003), dtype, kl_kind)
    moved = {key: value.detach().cuda() for key, value in inputs.items()}
    moved["hidden"].requires_grad_()
    results = {}
    for implementation in ("triton", "torch"):
        result = unary_loss(
            **moved,
            ce_weight=0.8,
            kl_weight=0.7,
            kl_kind=kl_kind,
            top_k=C,
            chunk_bytes=1 << 16,
            implementation=implementation,
            final_logit_softcapping=20.0,
        )
        results[implementation] = (result, torch.autograd.grad(result.loss.sum(), moved["hidden"])[0])
    torch.testing.assert_close(results["triton"][0].loss, results["torch"][0].loss, rtol=1e-4, atol=1e-4)
    one, two = (results[name][1].double() for name in ("triton", "torch"))
    assert float((one - two).norm() / two.norm()) < TOLERANCE[dtype]


def test_triton_asked_for_and_missing_is_refused_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # what an import finds where it is not installed
    monkeypatch.delitem(sys.modules, "dflash2_train.losses.pass_triton", raising=False)
    with pytest.raises(ConfigError, match="loss.implementation=torch"):
        run(problem(SHAPES[0], torch.float32, "truncated"), "triton", kl_weight=1.0, kl_kind="truncated")


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_kernels}[sys.argv[1]]()

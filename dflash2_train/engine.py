"""The one door to DeepSpeed: ranks, engine, optimizer groups, schedule.

DeepSpeed is used for ZeRO, bf16 with fp32 masters, accumulation and clipping, with a client AdamW (its own
optimizers compile C++ at first use). The same calls run on one CPU process over gloo and on many GPUs over nccl.

Three facts shape this file. ``deepspeed.initialize`` looks for five environment variables and falls to MPI when one is
missing, so a plain start sets them. On a CPU it compiles a shared-memory operator that training never uses, so
its table of compatible operators is emptied first. It divides a loss by accumulation and world size, so the objective
multiplies by both (see :mod:`dflash2_train.objective`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dflash2_train.config import TrainConfig

logger = logging.getLogger(__name__)
GAINS = ("norm.weight", "base_kernel")  # elementwise factors; "norm.weight" ends every norm's name


def build_deepspeed_config(train: TrainConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's JSON for a training configuration; pure, so that it can be looked at and tested."""
    bf16 = train.dtype == "bfloat16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.rows,
        "gradient_accumulation_steps": train.accumulation,
        "train_batch_size": train.rows * train.accumulation * world_size,
        "gradient_clipping": train.grad_clip,
        "zero_optimization": {"stage": train.zero_stage},
        "bf16": {"enabled": bf16},
        "steps_per_print": 2**62,  # our own loop reports
        "wall_clock_breakdown": False,
    }
    if bf16:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def learning_rate_factor(train: TrainConfig) -> Callable[[int], float]:
    """Factor on ``train.lr`` by optimizer step: linear warm-up, then cosine down to ``final_lr_ratio``."""
    warmup = max(1, round(train.warmup * train.steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, train.steps - warmup))
        return train.final_lr_ratio + (1 - train.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def parameter_groups(module: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """Optimizer groups: matrices, alone with weight decay; codebooks; gains; the mask embedding.

    Adam moves every element by about the rate. A matrix of elements near 0.02 changes its function within tens of
    such steps, a gain near 1 hardly at all, hence a factor for the gains.
    """
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "codebooks": [], "gains": [], "mask_embedding": []}
    for name, parameter in module.named_parameters():
        if name.endswith("mask_embedding"):
            groups["mask_embedding"].append(parameter)
        elif name.endswith(GAINS):
            groups["gains"].append(parameter)
        elif name.endswith("_codebook"):
            groups["codebooks"].append(parameter)
        else:
            groups["matrices"].append(parameter)
    scales = {"gains": train.gain_lr_scale, "mask_embedding": train.mask_lr_scale}
    return [
        {
            "params": parameters,
            "lr": train.lr * scales.get(name, 1.0),
            "weight_decay": train.weight_decay if name == "matrices" else 0.0,
            "name": name,
        }
        for name, parameters in groups.items()
    ]


def ensure_rank_environment() -> None:
    """Make a plain start a one-rank job: set the five variables unless a launcher did."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


class TrainEngine:
    """A DeepSpeed engine around one module, with the few calls that the loop and the checkpoints need.

    Args:
        module: ``forward(...)`` returns (loss, ...); moved to the device and cast by DeepSpeed.
        train: optimisation settings.
    """

    def __init__(self, module: nn.Module, train: TrainConfig) -> None:
        deepspeed = _import_deepspeed()
        self.rank: int = torch.distributed.get_rank()
        self.world_size: int = torch.distributed.get_world_size()
        self.deepspeed_config = build_deepspeed_config(train, self.world_size)
        optimizer = torch.optim.AdamW(
            parameter_groups(module, train),
            lr=train.lr,
            betas=(train.betas[0], train.betas[1]),
            fused=True,
        )
        factor = learning_rate_factor(train)
        # DeepSpeed prints its memory use at every sub-step of this call, whatever its log level.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, factor),
                config=self.deepspeed_config,
                dist_init_required=False,
            )
        self.device = torch.device(self._engine.device)
        self._accumulation = train.accumulation

    @property
    def module(self) -> nn.Module:
        """The wrapped module (its parameters in the training dtype)."""
        module: nn.Module = self._engine.module
        return module

    @property
    def loss_scale(self) -> int:
        """What DeepSpeed will divide a loss by: world size times accumulation."""
        return self.world_size * self._accumulation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module through the engine, so that ZeRO's hooks see the call."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of one micro-batch."""
        self._engine.backward(loss)

    def step(self) -> None:
        """End a micro-batch; the optimizer and the schedule move at the window's last one."""
        self._engine.step()

    def drop_window(self, micro_batches_done: int) -> None:
        """Forget the gradients of a window that must not be applied."""
        self._engine.optimizer.zero_grad()
        self._engine.micro_steps -= micro_batches_done

    def gradient_norm(self) -> float:
        """Global gradient norm of the last applied step, before clipping."""
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def learning_rate(self) -> float:
        """Rate of the first group that the next step will use."""
        return float(self._engine.get_lr()[0])

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Sum of ``value`` over all ranks; one rank returns it as it is."""
        if self.world_size > 1:
            torch.distributed.all_reduce(value)
        return value

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        value = torch.tensor([float(flag)], device=self.device)
        return bool(self.all_reduce_sum(value).item() > 0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def save_state(self, folder: str, tag: str, state: dict[str, Any]) -> None:
        """Write optimizer, masters, schedule and ``state`` under ``folder/tag``; every rank must call it."""
        self._engine.save_checkpoint(
            folder, tag=tag, client_state={"trainer": state}, save_latest=False, exclude_frozen_parameters=True
        )

    def load_state(self, folder: str, tag: str) -> dict[str, Any]:
        """Load what :meth:`save_state` wrote and return its ``state``."""
        path, client = self._engine.load_checkpoint(folder, tag=tag)
        if path is None:
            raise RuntimeError(f"{folder}/{tag}: DeepSpeed found no checkpoint there, though its manifest verified")
        state: dict[str, Any] = client["trainer"]
        return state


def start_ranks() -> tuple[int, int]:
    """Join the process group; returns (rank, world size)."""
    ensure_rank_environment()
    deepspeed = _import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def first_rank_says(flag: bool) -> bool:
    """The first rank's ``flag``, on every rank; the others wait for it here."""
    if torch.distributed.get_world_size() == 1:
        return flag
    from deepspeed.accelerator import get_accelerator

    value = torch.tensor([float(flag)], device=get_accelerator().current_device_name())
    torch.distributed.broadcast(value, src=0)
    return bool(value.item() > 0)


def stop_ranks() -> None:
    """Leave the process group in good order."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _import_deepspeed() -> Any:
    """Import DeepSpeed, quiet, and on a CPU without the operator that it would compile."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    import deepspeed.ops as operators
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger as deepspeed_logger

    deepspeed_logger.setLevel(logging.WARNING)
    if get_accelerator().device_name() == "cpu":
        operators.__dict__["__compatible_ops__"] = {}
    return deepspeed

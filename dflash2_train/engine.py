"""DeepSpeed's engine around a module, and the whole training state by parameter name.

DeepSpeed is used for ZeRO, bf16 with fp32 masters, accumulation and clipping, with a client AdamW (its own
optimizers compile C++ at first use). The same calls run on one CPU process over gloo and on many GPUs over nccl; how
ranks meet is told in :mod:`dflash2_train.ranks`. DeepSpeed divides a loss by accumulation and world size, so the
objective multiplies by both (see :mod:`dflash2_train.objective`).

**A window is applied on all ranks or on none.** The loss is looked at once a window: if it was not finite in any
micro-batch of any rank, every rank makes its gradient NaN. DeepSpeed forms the global gradient norm, which all ranks
share, and leaves weights and moments alone when it is not finite. So a bad loss and a bad gradient end in the one way
that every ZeRO stage has for it, no gradient of the window survives in an accumulation buffer, and
:meth:`TrainEngine.step` says what happened.

**State is gathered whole.** ZeRO's files hold flat shards of one world size, as pickles. Here each rank's shards of
masters, moments and average are laid together tensor by tensor, under the parameters' own names, and taken apart
again on loading: any number of ranks and any stage can go on from them. One mechanism serves all kinds of state:
a kind is put in the masters' place, where DeepSpeed finds each parameter's fragment.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash2_train.averaging import WeightAverage
from dflash2_train.config import TrainConfig, UserError
from dflash2_train.optimizer import build_optimizer
from dflash2_train.ranks import import_deepspeed, limit_waits
from dflash2_train.schedules import rate_factor

MASTERS, MOMENTS, AVERAGE = "masters", ("exp_avg", "exp_avg_sq"), "average"  # kinds of state, and their files' names


def build_deepspeed_config(train: TrainConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's JSON for a training configuration; pure, so that it can be looked at and tested."""
    bf16 = train.dtype == "bfloat16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.rows,
        "gradient_accumulation_steps": train.accumulation,
        "train_batch_size": train.rows * train.accumulation * world_size,
        "gradient_clipping": 0.0 if train.zero_stage == 0 else train.grad_clip,  # stage 0: ClippedAdamW clips
        "zero_optimization": {"stage": train.zero_stage},
        "bf16": {"enabled": bf16},
        "steps_per_print": 2**62,  # our own loop reports
        "wall_clock_breakdown": False,
    }
    if bf16:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        # Else the fp32 sums of a window are rounded to bf16 before ranks add them, on one rank too: a relative error
        # of 2e-3 in place of 3e-8.
        config["communication_data_type"] = "fp32"
    return config


class TrainEngine:
    """A DeepSpeed engine around one module, with the few calls that the loop and the checkpoints need.

    Args:
        module: ``forward(...)`` returns (loss, ...); moved to the device and cast by DeepSpeed.
        train: optimisation settings.
    """

    def __init__(self, module: nn.Module, train: TrainConfig) -> None:
        self._deepspeed = import_deepspeed()
        self.rank: int = torch.distributed.get_rank()
        self.world_size: int = torch.distributed.get_world_size()
        self.deepspeed_config = build_deepspeed_config(train, self.world_size)
        self._optimizer = build_optimizer(module, train)
        # DeepSpeed casts the module before it copies the masters. What was trained before keeps its fp32 digits.
        trained = {name: p.detach().clone() for name, p in module.named_parameters()} if train.warm_start else {}
        # DeepSpeed prints its memory use at every sub-step of this call, whatever its log level.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            self._engine, *_ = self._deepspeed.initialize(
                model=module, optimizer=self._optimizer, config=self.deepspeed_config, dist_init_required=False
            )
        limit_waits(train.guard)
        self.device = torch.device(self._engine.device)
        self._accumulation, self._sharded = train.accumulation, train.zero_stage > 0
        self._factor, self._base_rates = rate_factor(train), [group["lr"] for group in self._optimizer.param_groups]
        self.applied_steps = 0
        self.drop_reason = ""
        self._finite = torch.ones((), dtype=torch.bool, device=self.device)  # losses of the window so far
        self._smallest = min((p for p in module.parameters() if p.requires_grad), key=Tensor.numel)
        if trained:
            self.scatter(MASTERS, module, trained)
        self._average = None if train.ema_decay is None else WeightAverage(self._masters(), train.ema_decay)

    @property
    def loss_scale(self) -> int:
        """What DeepSpeed will divide a loss by: world size times accumulation."""
        return self.world_size * self._accumulation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module through the engine, so that ZeRO's hooks see the call."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of one micro-batch; at the window's last one all ranks agree whether to drop it."""
        self._finite &= torch.isfinite(loss.detach())
        if self._engine.is_gradient_accumulation_boundary():
            self.drop_reason = "loss" if self.any_rank(not bool(self._finite)) else ""
            self._finite.fill_(True)
            if self.drop_reason:
                # Through a parameter: a loss over no token at all has a gradient of zeros whatever it is multiplied by.
                loss = loss + float("nan") * self._smallest.sum()
        self._engine.backward(loss)

    def step(self) -> bool:
        """End a micro-batch; at the window's last one the optimizer moves.

        Returns:
            False, on all ranks alike, when the window was dropped: then ``drop_reason`` is ``loss`` or ``gradient``,
            and weights, moments, average and schedule are as before it.
        """
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()
            return True
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * self._factor(self.applied_steps)
        self._engine.step()
        if not self._engine.was_step_applied():
            self.drop_reason = self.drop_reason or "gradient"
            return False
        self.applied_steps += 1
        if self._average is not None:
            self._average.update(self._masters())
        return True

    def gradient_norm(self) -> float:
        """Global gradient norm of the last window, before clipping; not finite if it was dropped."""
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def learning_rate(self) -> float:
        """Rate of the first group that the next step will use."""
        return self._base_rates[0] * self._factor(self.applied_steps)

    def group_rates(self) -> dict[str, float]:
        """Rate of every parameter group that the next step will use, by the group's name."""
        factor = self._factor(self.applied_steps)
        pairs = zip(self._optimizer.param_groups, self._base_rates, strict=True)
        return {group["name"]: base * factor for group, base in pairs}

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Sum of ``value`` over all ranks; one rank returns it as it is."""
        if self.world_size > 1:
            torch.distributed.all_reduce(value)
        return value

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        return self.any_rank_each([flag])[0]

    def any_rank_each(self, flags: Sequence[bool]) -> list[bool]:
        """Whether each of ``flags`` is set on any rank."""
        value = torch.tensor([float(flag) for flag in flags], device=self.device)
        return [count > 0 for count in self.all_reduce_sum(value).tolist()]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def state_kinds(self) -> list[str]:
        """What :meth:`gather` can give now: masters, the moments once a step was applied, the average if there is one.

        Raises:
            UserError: the optimizer did not take part in every step that was reported as applied.
        """
        counts = {int(self._optimizer.state[m]["step"]) for m in self._masters() if m in self._optimizer.state}
        if counts - {self.applied_steps} or (self.applied_steps > 0 and not counts):
            raise UserError(
                f"AdamW counts {sorted(counts)} steps, {self.applied_steps} were reported as applied: steps are lost "
                "in silence. Nothing was saved; use train.zero_stage=1 and report this with the versions in run.json."
            )
        moments = list(MOMENTS) if self.applied_steps > 0 else []
        return [MASTERS, *moments, *([] if self._average is None else [AVERAGE])]

    @torch.no_grad()
    def gather(self, kind: str, named: nn.Module) -> dict[str, Tensor]:
        """One kind of state, whole; every rank must call it.

        Args:
            kind: of :meth:`state_kinds`.
            named: the part of the wrapped module whose parameters are wanted; gives the names.

        Returns:
            name -> fp32 tensor of the parameter's shape on the CPU; empty on ranks other than the first.
        """
        tensors: dict[str, Tensor] = {}
        with self._in_place_of_masters(kind):
            for name, parameter in named.named_parameters():
                full = self._get_full(parameter)
                if self.rank == 0:
                    tensors[name] = full.to("cpu", torch.float32, copy=True).contiguous()
        return tensors

    @torch.no_grad()
    def scatter(self, kind: str, named: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Take over one kind of state as :meth:`gather` gave it; every rank must call it, with all tensors."""
        if kind == MASTERS:
            for name, parameter in named.named_parameters():
                self._set_full(parameter, tensors[name].to(self.device))
                parameter.copy_(tensors[name])  # the training dtype's copy, rounded as after a step
            return
        masters = self._masters()
        kept = [master.to("cpu", copy=True) for master in masters]
        for name, parameter in named.named_parameters():
            self._set_full(parameter, tensors[name].to(self.device))
        for master, saved, shard in zip(masters, kept, self._shards(kind), strict=True):
            shard.copy_(master)
            master.copy_(saved)

    def set_counts(self, *, applied_steps: int, average_updates: int) -> None:
        """Continue schedule, bias corrections and average after so many steps; before :meth:`scatter`."""
        self.applied_steps = applied_steps
        if self._average is not None:
            self._average.updates = average_updates
        if applied_steps > 0:
            for master in self._masters():
                state = {key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS}
                count = torch.tensor(float(applied_steps), device=master.device)
                self._optimizer.state[master] = {"step": count, **state}

    def counts(self) -> dict[str, int]:
        """The arguments of :meth:`set_counts`."""
        updates = 0 if self._average is None else self._average.updates
        return {"applied_steps": self.applied_steps, "average_updates": updates}

    def gather_random_states(self) -> dict[str, Tensor]:
        """States of torch's global generators of all ranks: ``rankN.cpu`` and ``rankN.cuda``, uint8; on every rank."""
        own = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(self.device)
        states = {}
        for kind, state in own.items():
            rows = [torch.empty_like(state, device=self.device) for _ in range(self.world_size)]
            if self.world_size > 1:
                torch.distributed.all_gather(rows, state.to(self.device))
            else:
                rows = [state]
            states.update({f"rank{rank}.{kind}": row.cpu().contiguous() for rank, row in enumerate(rows)})
        return states

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Take this rank's states of :meth:`gather_random_states`; ranks that have none keep their start."""
        if f"rank{self.rank}.cpu" in states:
            torch.set_rng_state(states[f"rank{self.rank}.cpu"])
        if self.device.type == "cuda" and f"rank{self.rank}.cuda" in states:
            torch.cuda.set_rng_state(states[f"rank{self.rank}.cuda"], self.device)

    @contextlib.contextmanager
    def average_in_place(self, named: nn.Module) -> Iterator[None]:
        """Let a part of the wrapped module compute with the averaged weights; every rank must enter and leave.

        The live weights come back to the last bit. No step may be taken meanwhile.
        """
        parameters = list(named.parameters())
        live = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad(), self._in_place_of_masters(AVERAGE):
            averaged = [self._get_full(parameter).clone() for parameter in parameters]
        try:
            _overwrite(parameters, averaged)
            del averaged
            yield
        finally:
            _overwrite(parameters, live)

    def _masters(self) -> list[Tensor]:
        """This rank's fp32 masters: DeepSpeed puts them in the place of the client optimizer's parameters."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _shards(self, kind: str) -> list[Tensor]:
        """This rank's tensors of a kind, in the order and the layout of the masters."""
        if kind == AVERAGE:
            assert self._average is not None
            return self._average.shards
        return [self._optimizer.state[master][kind] for master in self._masters()]

    @contextlib.contextmanager
    def _in_place_of_masters(self, kind: str) -> Iterator[None]:
        """Lay a kind of state where the masters are, and put these back afterwards."""
        if kind == MASTERS:
            yield
            return
        masters = self._masters()
        kept = [master.to("cpu", copy=True) for master in masters]
        try:
            for master, shard in zip(masters, self._shards(kind), strict=True):
                master.copy_(shard)
            yield
        finally:
            for master, saved in zip(masters, kept, strict=True):
                master.copy_(saved)

    def _get_full(self, parameter: nn.Parameter) -> Tensor:
        full: Tensor = self._deepspeed.utils.safe_get_full_fp32_param(parameter) if self._sharded else parameter
        return full

    def _set_full(self, parameter: nn.Parameter, value: Tensor) -> None:
        if self._sharded:
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, value)
        else:
            parameter.copy_(value)


@torch.no_grad()
def _overwrite(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)

"""Plays training windows through the engine at every ZeRO stage and checks what must hold; started as a process a rank.

Usage: ``run_engine FOLDER save|load``. ``save`` leaves the gathered state of each case in FOLDER, ``load`` continues
from it, on whatever number of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash2_train.config import GuardConfig, TrainConfig, UserError
from dflash2_train.engine import AVERAGE, MASTERS, MOMENTS, TrainEngine
from dflash2_train.optimizer import parameter_groups
from dflash2_train.ranks import start_ranks, stop_ranks
from dflash2_train.schedules import rate_factor

CASES = ((0, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16"), (2, "bfloat16"))
KINDS = (MASTERS, *MOMENTS, AVERAGE)
GLOBAL_MICROS = 4  # micro-batches a window over all ranks


class Toy(nn.Module):
    """A parameter of every group, none of a size that ranks divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fc = nn.Linear(5, 7, bias=False)
        self.mask_embedding = nn.Parameter(torch.randn(5))
        self.predecessor_codebook = nn.Parameter(torch.randn(9, 7))
        self.norm = nn.LayerNorm(7, bias=False)

    def forward(self, data: Tensor, fault: str | None, hits: bool) -> Tensor:
        states = self.norm(self.fc(data.to(self.fc.weight.dtype) + self.mask_embedding))
        rows = self.predecessor_codebook[: 9 if hits else 0]  # without hits in the graph, with a gradient of zeros
        loss = states.float().square().mean() + (states @ rows.T).float().square().sum() / 54
        if fault == "loss":
            loss = loss * float("inf")
        if fault == "gradient":  # worth 0, with a gradient of inf * 0
            loss = loss + (self.mask_embedding * 0).sum().float().sqrt()
        return loss


def settings(stage: int, dtype: str, world_size: int) -> TrainConfig:
    return TrainConfig(
        output_dir="x",
        steps=20,
        row_tokens=8,
        rows=1,
        accumulation=GLOBAL_MICROS // world_size,
        dtype=dtype,
        zero_stage=stage,
        lr=1e-2,
        ema_decay=0.9,
        weight_decay=0.1,
    )


def numbers(window: int, micro: int) -> Tensor:
    """Data of one global micro-batch."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * window + micro))


class Player:
    """An engine, and windows of numbers to play through it."""

    def __init__(self, stage: int, dtype: str) -> None:
        self.toy = Toy()
        world_size = torch.distributed.get_world_size()
        self.train = settings(stage, dtype, world_size)
        self.engine = TrainEngine(self.toy, self.train)

    def window(self, number: int, fault: tuple[int, str] | None = None, *, odd_hits: bool = True) -> bool:
        """Play one window.

        Args:
            number: seeds its numbers.
            fault: a global micro-batch, and what is wrong with it.
            odd_hits: whether odd micro-batches, all those of the second of two ranks, use the codebook at all.
        """
        engine = self.engine
        applied = True
        for micro in range(self.train.accumulation):
            index = micro * engine.world_size + engine.rank
            data = numbers(number, index)
            kind = fault[1] if fault is not None and fault[0] == index else None
            loss = engine.forward(data, kind, odd_hits or index % 2 == 0)
            engine.backward(loss * engine.loss_scale / GLOBAL_MICROS)
            applied = engine.step()
        return applied

    def state(self) -> dict[str, dict[str, Tensor]]:
        assert self.engine.state_kinds() == list(KINDS)
        return {kind: self.engine.gather(kind, self.toy) for kind in KINDS}

    def load(self, state: dict[str, dict[str, Tensor]], counts: dict[str, int]) -> None:
        self.engine.set_counts(**counts)
        for kind in KINDS:
            self.engine.scatter(kind, self.toy, state[kind])


def same(one: dict[str, dict[str, Tensor]], two: dict[str, dict[str, Tensor]]) -> bool:
    """Bit for bit; on ranks other than the first, which gather nothing, trivially so."""
    return all(one[k].keys() == two[k].keys() and all(torch.equal(one[k][n], two[k][n]) for n in one[k]) for k in KINDS)


def check_drops(stage: int, dtype: str) -> tuple[Player, dict[str, dict[str, Tensor]]]:
    """Bad windows between good ones leave no trace; returns a player after windows 0 and 3, and its state."""
    clean, dirty = Player(stage, dtype), Player(stage, dtype)
    start = {name: p.detach().clone() for name, p in dirty.toy.named_parameters()}
    assert not dirty.window(9, fault=(0, "loss")), "a non-finite loss in the first micro-batch was applied"
    assert all(torch.equal(start[name], p) for name, p in dirty.toy.named_parameters())
    assert clean.window(0)
    assert dirty.window(0)
    assert not dirty.window(1, fault=(1, "loss")), "a non-finite loss on the last rank or micro-batch was applied"
    assert dirty.engine.drop_reason == "loss"
    assert not dirty.window(2, fault=(GLOBAL_MICROS - 1, "gradient")), "a non-finite gradient was applied"
    assert dirty.engine.drop_reason == "gradient"
    assert not dirty.window(2, fault=(0, "gradient")), "a non-finite early gradient was applied"
    assert dirty.engine.learning_rate() == clean.engine.learning_rate()
    assert clean.window(3)
    assert dirty.window(3)
    assert dirty.engine.counts() == clean.engine.counts() == {"applied_steps": 2, "average_updates": 2}
    assert 0 < dirty.engine.gradient_norm() < 1e9
    state = clean.state()
    assert same(state, dirty.state()), "dropped windows left a trace"
    return clean, state


def check_plain_loop(trained: Toy, train: TrainConfig) -> None:
    """After windows 0 and 3 the weights are those of a loop in plain torch, whatever the stage and the ranks."""
    toy = Toy()
    groups, factor = parameter_groups(toy, train), rate_factor(train)
    rates = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups, betas=(train.betas[0], train.betas[1]))
    for step, number in enumerate((0, 3)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)
        for index in range(GLOBAL_MICROS):
            (toy(numbers(number, index), None, True) / GLOBAL_MICROS).backward()
        nn.utils.clip_grad_norm_(toy.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    for expected, found in zip(toy.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def check_exact_sums(stage: int, dtype: str) -> None:
    """What the optimizer gets is the sum of all micro-batches' gradients as they are, not rounded to bf16 again."""
    player, twin = Player(stage, dtype), Toy().to(getattr(torch, dtype))
    exact = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in twin.named_parameters()}
    for index in range(GLOBAL_MICROS):
        (twin(numbers(0, index), None, True) / GLOBAL_MICROS).backward()
        for name, parameter in twin.named_parameters():
            assert parameter.grad is not None
            exact[name] += parameter.grad.double()
            parameter.grad = None
    assert player.window(0)
    clip = min(1.0, player.train.grad_clip / player.engine.gradient_norm())
    moments = player.engine.gather(MOMENTS[0], player.toy)
    for name, moment in moments.items():  # (1 - beta1) x gradient after the first step
        found = moment.double() / (1.0 - player.train.betas[0]) / clip
        error = float((found - exact[name]).norm() / exact[name].norm())
        assert error < 1e-5, f"{name}: the reduced gradient is off by {error:.1e}"


def check_silent_skip(stage: int, dtype: str) -> None:
    """An optimizer that does nothing and says nothing is found out before anything is saved."""
    player = Player(stage, dtype)
    assert player.window(0)
    player.engine._optimizer.step = lambda *_: None
    assert player.window(1)
    try:
        player.engine.state_kinds()
    except UserError as error:
        assert "lost in silence" in str(error)
        return
    raise AssertionError("a step that was not done went unnoticed")


def check_warm_masters(stage: int, dtype: str) -> None:
    """What was trained before enters the masters with all its digits."""
    toy, train = Toy(), settings(stage, dtype, torch.distributed.get_world_size())
    train.warm_start = "elsewhere"
    exact = {name: p.detach().clone() for name, p in toy.named_parameters()}
    engine = TrainEngine(toy, train)
    masters = engine.gather(MASTERS, toy)
    assert engine.rank != 0 or all(torch.equal(masters[name], exact[name]) for name in exact)


def check_average_in_place(player: Player, state: dict[str, dict[str, Tensor]]) -> None:
    """The module computes with the average for a while, and nothing of that is left behind."""
    named = dict(player.toy.named_parameters())
    live = {name: parameter.detach().clone() for name, parameter in named.items()}
    with player.engine.average_in_place(player.toy):
        if player.engine.rank == 0:
            for name, parameter in named.items():
                assert torch.equal(parameter, state[AVERAGE][name].to(parameter.dtype)), "not the average"
        assert not torch.equal(named["fc.weight"], live["fc.weight"])
    assert all(torch.equal(live[name], parameter) for name, parameter in named.items())
    assert same(state, player.state()), "a look at the average left a trace"


def spread(state: dict[str, dict[str, Tensor]], folder: Path) -> dict[str, dict[str, Tensor]]:
    """The first rank's state on every rank, by way of files."""
    folder.mkdir(parents=True, exist_ok=True)
    if torch.distributed.get_rank() == 0:
        for kind, tensors in state.items():
            save_file(tensors, folder / f"{kind}.safetensors")
    if torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
    return {kind: load_file(folder / f"{kind}.safetensors") for kind in KINDS}


def save(folder: Path, stage: int, dtype: str) -> None:
    """Drops leave no trace, and a fresh engine given the state goes on bit for bit."""
    player, state = check_drops(stage, dtype)
    if dtype == "float32":
        check_plain_loop(player.toy, player.train)
    check_exact_sums(stage, dtype)
    check_average_in_place(player, state)
    check_silent_skip(stage, dtype)
    check_warm_masters(stage, dtype)
    whole = spread(state, folder)
    resumed = Player(stage, dtype)
    resumed.load(whole, player.engine.counts())
    assert same(state, resumed.state()), "what was loaded is not what was saved"
    assert all(map(torch.equal, player.toy.parameters(), resumed.toy.parameters()))
    assert player.window(4)
    assert resumed.window(4)
    assert same(player.state(), resumed.state()), "a resumed engine goes another way"
    assert player.window(5, odd_hits=False), "a rank without hits broke the step"
    spread(player.state(), folder / "next")


def load(folder: Path, stage: int, dtype: str) -> None:
    """State saved on another number of ranks is taken over to the bit; the next step differs by rounding alone."""
    whole, after = (
        {kind: load_file(path / f"{kind}.safetensors") for kind in KINDS} for path in (folder, folder / "next")
    )
    player = Player(stage, dtype)
    player.load(whole, {"applied_steps": 2, "average_updates": 2})
    state = player.state()
    assert player.engine.rank != 0 or same(whole, state), "state of another number of ranks was not taken over whole"
    assert player.window(4)
    assert player.window(5, odd_hits=False)
    tolerance = 1e-6 if dtype == "float32" else 2e-3
    for name, tensor in player.state()[MASTERS].items():
        torch.testing.assert_close(tensor, after[MASTERS][name], rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    start_ranks(GuardConfig())
    for stage, dtype in CASES:
        (save if sys.argv[2] == "save" else load)(Path(sys.argv[1]) / f"{stage}-{dtype}", stage, dtype)
    stop_ranks()

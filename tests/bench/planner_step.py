"""Real training windows of one rank, and the most memory that they took; a process of its own.

``python -m tests.bench.planner_step CASE_JSON [--steps 3] [--save FOLDER] [--allocations]``

The engine (DeepSpeed), the objective, packed batches and the loop's order of calls are the trainer's own; documents are
random, each as long as the case says, so that no capture is needed. The last line of the output is the result as JSON,
bytes. ``--allocations`` adds the largest sum of live tensors by moment, from the CPU allocator's own events.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROMPT = 4  # tokens of a document that are not supervised
STATUS, STATM = Path("/proc/self/status"), Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step: a drafter, a target's vocabulary, and the documents of each row."""

    name: str
    hidden: int
    vocab: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    taps: int
    document: int  # tokens
    documents: int = 1  # a row
    anchors: int = 128  # at most a document
    rows: int = 1
    accumulation: int = 1
    block_size: int = 8
    window: int | None = None  # of sliding layers; None = full attention
    selector_rank: int = 256
    dtype: str = "bfloat16"
    attention: str = "auto"
    zero_stage: int = 1
    ema: bool = False
    checkpointing: bool = False
    tied: bool = False
    chunk_mib: int = 256
    logit_share: float = 0.1
    look: bool = False  # measure gradient shares in the last step

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    def config(self, folder: Path, ranks: int) -> Any:
        """The case as an experiment of ``ranks`` CPU processes."""
        from dflash2_train import config as typed

        source = typed.PromptSourceConfig(kind="starter", split="train", license="apache-2.0")
        config = typed.RunConfig(
            name=self.name,
            run_dir=str(folder),
            target=typed.TargetConfig(
                name=str(folder / "nowhere"),
                license="apache-2.0",
                hidden_size=self.hidden,
                num_layers=self.taps,
                vocab_size=self.vocab,
            ),
            drafter=self._drafter(),
            data=typed.DataConfig(
                root=str(folder / "data"),
                train_prompts=[source],
                holdout_prompts=[source],
                sampling=typed.SamplingConfig(max_tokens=8),
                max_prompt_tokens=64,
            ),
            loss=typed.LossConfig(chunk_mib=self.chunk_mib, logit_share=self.logit_share),
            train=self._train(folder),
            export=typed.ExportConfig(output_dir=str(folder / "export")),
            eval=typed.EvalConfig(output_dir=str(folder / "eval"), max_new_tokens=8),
            plan=typed.PlanConfig(hardware=typed.HardwareConfig(devices=ranks, kind="cpu", memory_gb=64)),
        )
        config.check()
        return config

    def _drafter(self) -> Any:
        from dflash2_train.config import DrafterConfig

        return DrafterConfig(
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            block_size=self.block_size,
            target_layer_ids=list(range(self.taps)),
            mask_token_id=self.vocab - 1,
            layer_types=[] if self.window is None else ["sliding_attention"] * self.layers,
            sliding_window=self.window,
            selector_rank=self.selector_rank,
            max_position_embeddings=1 << 16,
        )

    def _train(self, folder: Path) -> Any:
        from dflash2_train.config import TrainConfig

        return TrainConfig(
            output_dir=str(folder / "train"),
            steps=100,
            dtype=self.dtype,
            row_tokens=self.document * self.documents,
            rows=self.rows,
            accumulation=self.accumulation,
            anchors_per_document=self.anchors,
            zero_stage=self.zero_stage,
            ema_decay=0.99 if self.ema else None,
            gradient_checkpointing=self.checkpointing,
            gradient_share_every=100 if self.look else 0,
            attention=self.attention,
            prefetch_windows=1,
        )


def resident() -> int:
    """Resident bytes now."""
    return int(STATM.read_text().split()[1]) * 4096


def peak_resident() -> int:
    """Largest resident size since :func:`forget_peak`, bytes."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")) * 1024


def forget_peak() -> None:
    """The kernel's switch that resets VmHWM."""
    Path("/proc/self/clear_refs").write_text("5")


def make_window(case: Case, number: int) -> list[Any]:
    """Packed micro-batches of random documents."""
    import torch

    from data_gen.cache.format import CapturedSample
    from dflash2_train.data import collate

    generator = torch.Generator().manual_seed(number)
    top_k = 20

    def sample(name: str) -> CapturedSample:
        first = torch.randint(0, case.vocab - top_k, (case.document, 1), generator=generator)
        return CapturedSample(
            sample_id=name,
            input_ids=torch.randint(0, case.vocab - 1, (case.document,), generator=generator, dtype=torch.int32),
            loss_mask=torch.arange(case.document) >= PROMPT,
            tap_hidden=torch.randn(case.document, case.taps * case.hidden, generator=generator).bfloat16(),
            teacher_ids=(first + torch.arange(top_k)).int(),
            teacher_logprobs=torch.randn(case.document, top_k, generator=generator).log_softmax(-1).half(),
            teacher_log_normaliser=torch.zeros(case.document),
        )

    batches = []
    for micro in range(case.accumulation):
        rows = [[sample(f"{number}/{micro}/{r}/{d}") for d in range(case.documents)] for r in range(case.rows)]
        batches.append(collate(rows, anchors_per_document=case.anchors, seed=0, epochs=[0] * case.rows))
    return batches


class Loader:
    """As much of a window loader as the prefetcher needs."""

    rows_per_window = 1

    def __init__(self, case: Case) -> None:
        self.case = case

    def window(self, row: int) -> list[Any]:
        """The window that starts there."""
        return make_window(self.case, row)


def build(case: Case, config: Any) -> tuple[Any, Any]:
    """Objective and engine as ``train.TrainingRun`` makes them, with random tables."""
    import torch

    from dflash2_train.engine import TrainEngine
    from dflash2_train.layer_execution import apply_layer_options
    from dflash2_train.model.drafter import Drafter
    from dflash2_train.model.drafter_config import DrafterShape
    from dflash2_train.objective import Objective
    from dflash2_train.target import FrozenHead

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    embedding = torch.empty(case.vocab, case.hidden, dtype=dtype).normal_(0, 2 / case.hidden**0.5)
    head = embedding if case.tied else embedding.clone()
    drafter = Drafter(DrafterShape.from_config(config))
    drafter.reset_mask_embedding(embedding[-1].float())
    drafter.attention = case.attention
    objective = Objective(drafter, FrozenHead(embedding, head), config.loss)
    engine = TrainEngine(objective, config.train)
    apply_layer_options(drafter.layers, config.train, engine.device)
    return objective, engine


def window_step(objective: Any, engine: Any, window: list[Any], config: Any, *, look: bool) -> None:
    """One window, in the order of ``train.TrainingRun.step``."""
    import torch

    from dflash2_train.blocks import build_blocks
    from dflash2_train.losses import Moment

    shape = objective.drafter.shape
    dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    batches = [batch.to(engine.device, dtype) for batch in window]
    blocks = [build_blocks(b, block_size=shape.block_size, mask_token_id=shape.mask_token_id) for b in batches]
    moment = Moment(step=0, steps=100, seed=0)
    denominator = torch.stack([objective.window_weight(block, moment) for block in blocks]).sum()
    denominator = engine.all_reduce_sum(denominator)
    for batch, block in zip(batches, blocks, strict=True):
        output = engine.forward(
            batch,
            block,
            denominator=denominator,
            scale=float(engine.loss_scale),
            selector_ramp=1.0,
            moment=moment,
            measure_gradients=look,
        )
        engine.backward(output.loss)
        engine.step()


def import_all() -> None:
    """What a training imports, so that the base holds it."""
    for name in (
        "checkpoint",
        "engine",
        "layer_execution",
        "objective",
        "telemetry.recorder",
        "training_data",
        "target",
    ):
        importlib.import_module(f"dflash2_train.{name}")


def run(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one rank."""
    from dflash2_train.config import GuardConfig
    from dflash2_train.prefetch import Prefetcher
    from dflash2_train.ranks import start_ranks, stop_ranks

    rank, ranks = start_ranks(GuardConfig())
    import_all()
    base = resident()
    forget_peak()
    config = case.config(Path(options.save or "."), ranks)
    objective, engine = build(case, config)
    loader: Any = Loader(case)
    windows = Prefetcher(loader, start=0, windows=options.steps, depth=1, closing=threading.Event())
    for number in range(options.steps):
        window_step(objective, engine, windows.next(), config, look=case.look and number == options.steps - 1)
    stepped = peak_resident()
    forget_peak()
    allocated = allocations(objective, engine, case, config) if options.allocations else {}
    if options.save:
        save(engine, objective, Path(options.save), config)
    result = {"rank": rank, "base": base, "steps": stepped, "saving": peak_resident() if options.save else 0}
    windows.close()
    stop_ranks()
    return {**result, "allocated": allocated}


def save(engine: Any, objective: Any, folder: Path, config: Any) -> None:
    """A checkpoint, as the trainer writes it."""
    from dflash2_train.checkpoint import save_checkpoint

    save_checkpoint(engine, objective.drafter, folder, step=1, state={}, fingerprint={}, keep=1)


def allocations(objective: Any, engine: Any, case: Case, config: Any) -> dict[str, int]:
    """Largest growth of live tensor memory inside forward, backward and the optimizer's step, bytes."""
    from torch.profiler import ProfilerActivity, profile

    batch = make_window(case, 99)
    grown: dict[str, int] = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        window_step(objective, engine, batch, config, look=case.look)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total = 0
    for _, size in memory:
        total += size
        grown["step"] = max(grown.get("step", 0), total)
    return grown


def main() -> None:
    """Read the case, measure, write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--allocations", action="store_true")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    sys.stdout.write("\n" + json.dumps(run(Case(**json.loads(options.case)), options)) + "\n")


if __name__ == "__main__":
    main()

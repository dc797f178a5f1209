"""What eight-bit states do to the training loss and its gradient, on a captured bf16 cache; nothing is trained.

``python -m tests.bench.bench_fp8_loss --data-root runs/smollm2_cpu/data [--experiment smollm2_cpu] [--windows 8]
[--warm-start EXPORT_FOLDER] [--samples 64]``

The same windows go through the objective twice in fp32, once with the states as captured and once after a round trip
through fp8 (what an fp8 cache gives, bit for bit). Beside the relative change of loss and gradient stands the cosine of
the gradients of different windows: the noise that training averages over anyway. ``--warm-start`` takes a trained
drafter, whose loss depends on the states more than a fresh one's.

The table of taps tells what the states are like: how much larger than the median channel the largest is, the relative
error of a round trip over all channels and over all but the ten largest, and the share of values below full accuracy;
the last column has both errors with the next power of two in place of the exact factor.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table
from torch import Tensor

from data_gen.cache import fp8
from data_gen.cache.format import BFLOAT16, CapturedSample
from data_gen.cache.reader import CaptureReader
from data_gen.cache.row_plan import Document, RowPlan, trainable
from dflash2_train.app import register_schema
from dflash2_train.blocks import build_blocks
from dflash2_train.building import build_objective
from dflash2_train.config import RunConfig, load_config
from dflash2_train.data import CachedRows, PackedBatch, WindowLoader
from dflash2_train.objective import Objective
from dflash2_train.training_data import FirstSamples

CONF = Path(__file__).resolve().parents[2] / "conf"
LARGEST_CHANNELS = 10


class RoundTrip:
    """A cache whose states go through fp8."""

    def __init__(self, reader: CaptureReader) -> None:
        self.reader, self.manifest, self.index = reader, reader.manifest, reader.index

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, sample_index: int, states: Tensor | None = None) -> CapturedSample:
        sample = self.reader.read(sample_index)
        codes, factors = fp8.encode(sample.tap_hidden, self.manifest.num_taps)
        return dataclasses.replace(sample, tap_hidden=fp8.decode(codes, factors, states))

    def prefetch(self, sample_indices: Iterable[int]) -> None:
        self.reader.prefetch(sample_indices)


def load(experiment: str, overrides: list[str]) -> RunConfig:
    """The experiment's configuration."""
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load_config(compose("config", [f"+experiment={experiment}", *overrides]))


def row_plan(config: RunConfig, reader: CaptureReader) -> RowPlan:
    """The trainer's own order."""
    documents = trainable(
        Document(sample_id=row.sample_id, num_tokens=row.num_tokens, num_supervised=row.num_supervised)
        for row in reader.index
    )
    return RowPlan(
        documents,
        row_tokens=config.train.row_tokens,
        seed=config.train.seed,
        segment_rows=config.data.stream.segment_rows,
    )


def loader(config: RunConfig, store: CaptureReader | RoundTrip, plan: RowPlan) -> WindowLoader:
    """The trainer's own loader over ``store``."""
    train = config.train
    return WindowLoader(
        CachedRows(store),
        plan,
        rows=train.rows,
        accumulation=1,
        anchors_per_document=train.anchors_per_document,
        seed=train.seed,
    )


def loss_and_gradient(objective: Objective, batch: PackedBatch) -> tuple[float, Tensor]:
    """Loss of one window and its gradient over all parameters, flat."""
    shape = objective.drafter.shape
    blocks = build_blocks(batch, block_size=shape.block_size, mask_token_id=shape.mask_token_id)
    objective.zero_grad()
    output = objective(batch, blocks, denominator=objective.window_weight(blocks), scale=1.0, selector_ramp=1.0)
    torch.autograd.backward(output.loss)
    parts = [parameter.grad.flatten() for parameter in objective.parameters() if parameter.grad is not None]
    return float(output.loss.detach()), torch.cat(parts).clone()


def compare_windows(config: RunConfig, reader: CaptureReader, windows: int) -> Table:
    """Loss and gradient of each window under both dtypes."""
    plan = row_plan(config, reader)
    first = FirstSamples(reader.manifest, plan.segment_documents(0), CachedRows(reader).sample)
    objective = build_objective(config, first).float()
    objective.frozen.to(torch.device("cpu"), torch.float32)
    loaders = [loader(config, store, plan) for store in (reader, RoundTrip(reader))]
    table = Table("window", "loss bf16", "loss fp8", "change", "gradient change", "cosine", "cosine to the last window")
    previous: Tensor | None = None
    changes, cosines = [], []
    for window in range(windows):
        place = window * loaders[0].rows_per_window
        batches = [one.window(place)[0].to(torch.device("cpu"), torch.float32) for one in loaders]
        (loss, gradient), (loss8, gradient8) = (loss_and_gradient(objective, batch) for batch in batches)
        changes.append(loss8 / loss - 1)
        cosines.append(cosine(gradient, gradient8))
        cells = [f"{loss:.5f}", f"{loss8:.5f}", f"{changes[-1]:+.2e}", f"{relative_error(gradient, gradient8):.4f}"]
        cells += [f"{cosines[-1]:.6f}", "" if previous is None else f"{cosine(gradient, previous):.3f}"]
        table.add_row(str(window), *cells)
        previous = gradient
    spread = f"{statistics.stdev(changes):.1e}" if len(changes) > 1 else "-"
    table.caption = (
        f"mean change {statistics.mean(changes):+.2e} (spread of one window {spread}), "
        f"mean cosine {statistics.mean(cosines):.6f}"
    )
    return table


def cosine(one: Tensor, other: Tensor) -> float:
    """Of two flat gradients, summed in fp64."""
    return float(torch.cosine_similarity(one.double(), other.double(), 0))


def relative_error(exact: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((other - exact).double().norm() / exact.double().norm())


def describe_taps(reader: CaptureReader, samples: int) -> Table:
    """Channels and errors, tap by tap."""
    num_taps = reader.manifest.num_taps
    states = torch.cat([reader.read(index).tap_hidden for index in range(min(samples, len(reader)))])
    codes, factors = fp8.encode(states, num_taps)
    shape = (len(states), num_taps, -1)
    exact, read = states.float().view(shape), fp8.decode(codes, factors).float().view(shape)
    power = factors.log2().ceil().exp2()[..., None]
    other = (exact / power).to(torch.float8_e4m3fn).float() * power
    below = exact.abs() < factors[..., None] * 2.0**-6
    columns = (
        "tap",
        "largest / median channel",
        "error",
        "error of the rest",
        "below full accuracy",
        "by powers of 2",
    )
    table = Table(*columns, title=f"{len(states):,} tokens")
    for tap, layer in enumerate(reader.manifest.content["target_layer_ids"]):
        channels = exact[:, tap].pow(2).mean(0).sqrt()  # [H]
        rest = channels.argsort()[:-LARGEST_CHANNELS]
        parts = [(tried[:, tap], part) for tried in (read, other) for part in (slice(None), rest)]
        errors = [relative_error(exact[:, tap][:, part], tried[:, part]) for tried, part in parts]
        table.add_row(
            str(layer),
            f"{float(channels.max() / channels.median()):.0f}",
            f"{errors[0]:.4f}",
            f"{errors[1]:.4f}",
            f"{float(below[:, tap].float().mean()):.2%}",
            f"{errors[2]:.4f}, {errors[3]:.4f}",
        )
    return table


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--experiment", default="smollm2_cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--warm-start")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warm = [f"train.warm_start={options.warm_start}"] if options.warm_start else []
    config = load(options.experiment, [*warm, *options.overrides])
    reader = CaptureReader(options.data_root / "capture", verify_checksums=False)
    if reader.manifest.cache_dtype != BFLOAT16:
        parser.error(f"{options.data_root} is stored as {reader.manifest.cache_dtype}; a bf16 cache is needed")
    console = Console(width=130)
    console.print(describe_taps(reader, options.samples))
    console.print(compare_windows(config, reader, options.windows))


if __name__ == "__main__":
    main()

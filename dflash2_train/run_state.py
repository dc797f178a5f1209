"""Where a run stands, and what a resume must share with the run that it continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash2_train.config import RunConfig, to_plain

if TYPE_CHECKING:
    from dflash2_train.training_data import TrainingData

# Settings that may change between two starts of one run: they shape where and how often, not what is learned.
FREE_TO_CHANGE = (
    "output_dir",
    "plan",
    "save_every",
    "keep_checkpoints",
    "log_every",
    "validate_every",
    "validation",  # what is held back shows in the order of the rows
    "max_bad_steps",
    "max_seconds",
    "guard",
    "wandb",
    "wandb_project",
    "tensorboard",
    "gradient_share_every",
    "peak_tflops",
    "num_threads",
    "prefetch_windows",
    "zero_stage",
    "gradient_checkpointing",
    "compile_layers",
    # Their product with the number of ranks is what counts, and stands in the fingerprint.
    "rows",
    "accumulation",
)


@dataclass(kw_only=True)
class Progress:
    """Where a run stands; saved with every checkpoint."""

    step: int = 0  # windows done, dropped ones included
    rows_consumed: int = 0
    dropped: int = 0  # windows not applied because a loss or gradient was not finite
    seconds: float = 0.0  # training time over all attempts
    attempt: int = 1
    run_id: str = ""
    bad_in_a_row: int = 0
    selector_share: float = 1.0  # of the last window, for loss.selector_denominator=hits; 1 for the other setting
    best_metric: str = ""  # of the validation that did best so far: which figure, its value, and after which step
    best_value: float = 0.0
    best_step: int = 0

    def takes_for_best(self, metric: str, value: float | None) -> bool:
        """Remember the present step as the best if this value beats all before of the same metric."""
        if value is None or (metric == self.best_metric and value <= self.best_value):
            return False
        self.best_metric, self.best_value, self.best_step = metric, value, self.step
        return True


def fingerprint(config: RunConfig, data: TrainingData, world_size: int) -> dict[str, Any]:
    """All that shapes what is learned; a resume must share it."""
    plain = to_plain(config)
    train = {key: value for key, value in plain["train"].items() if key not in FREE_TO_CHANGE}
    train["rows_per_window"] = world_size * config.train.rows * config.train.accumulation
    content = {"cache": data.manifest.fingerprint, "order": data.order()}
    return {"drafter": plain["drafter"], "loss": plain["loss"], "train": train, **content}

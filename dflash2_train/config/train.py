"""Optimisation, batching, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash2_train.config.drafter import DrafterConfig
from dflash2_train.config.guard import GuardConfig
from dflash2_train.config.rules import DTYPES, require
from dflash2_train.config.target import TargetConfig
from dflash2_train.config.validation import ValidationConfig

ATTENTION_PATHS = ("auto", "chunked", "flex", "dense")  # see model/attend.py
SCHEDULES = ("cosine", "linear", "wsd")
COUNTS = (
    "steps",
    "row_tokens",
    "rows",
    "accumulation",
    "anchors_per_document",
    "save_every",
    "keep_checkpoints",
    "log_every",
    "prefetch_windows",
    "max_bad_steps",
)


@dataclass(kw_only=True)
class TrainConfig:
    """Optimisation, batching, checkpoints."""

    output_dir: str = MISSING  # folder of checkpoints, metrics.jsonl and run.json
    plan: bool = False  # only show what a step would take and whether it fits, from shapes alone
    steps: int = MISSING  # optimizer steps of the whole run
    seed: int = 0  # of weights, order of the data, anchors and block sizes
    dtype: str = "bfloat16"  # bfloat16 with fp32 masters, or float32
    row_tokens: int = MISSING  # context tokens a packed row
    rows: int = MISSING  # packed rows a rank and micro-step
    accumulation: int = 1  # micro-steps an optimizer step
    anchors_per_document: int = 512  # at most; drawn from (seed, epoch, sample id)
    short_block_size: int | None = None  # block size of the windows that train short blocks; None = all are whole
    short_block_share: float = 0.0  # share of windows with short blocks, drawn from (seed, window)
    short_block_random: bool = False  # their sizes are drawn between short_block_size and drafter.block_size - 1
    lr: float = 6e-4  # peak learning rate
    schedule: str = "cosine"  # cosine | linear | wsd (stable, then down over the last `decay`)
    decay: float = 0.2  # share of the steps at the end over which wsd falls
    final_lr_ratio: float = 0.1  # learning rate of the last step, as a share of lr
    warmup: float = 0.04  # share of the steps over which the rate rises from 0
    weight_decay: float = 0.0  # of matrices, decoupled as in AdamW; never of gains, mask vector and codebooks
    conv_lr_scale: float = 1.0  # factor on lr of the convolutions' kernel projections
    selector_lr_scale: float = 2.0  # factor on lr of the selector: its projection and both codebooks
    mask_lr_scale: float = 1.0  # factor on lr of the mask embedding
    gain_lr_scale: float = 1.0  # factor on lr of elementwise gains: norm weights and base kernels
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of Adam's two averages
    grad_clip: float = 1.0  # largest norm of the whole gradient; 0 = never clipped
    zero_stage: int = 1  # 0, 1 or 2
    gradient_checkpointing: bool = False  # run each layer again for its gradient in place of keeping its activations
    compile_layers: bool = False  # torch.compile of the layers, CUDA only
    ema_decay: float | None = None  # keep a moving average of the fp32 weights, as 0.999; export.weights=ema takes it
    init_layers: list[int] = field(default_factory=list)  # target layer each drafter layer starts from; empty = random
    init_tap_weights: list[float] = field(default_factory=list)  # fc starts as this sum of taps; empty = random
    init_norm_scale: float = 1.0  # factor on the target's final norm; below 1 starts nearer to uniform logits
    init_recent_gain: float = 0.0  # layer 0 starts as a look at the newest context, this sharp; 0 = random
    warm_start: str | None = None  # checkpoint, run folder, or exported DFlash or DFlash 2 folder to start from
    save_every: int = 200  # steps between checkpoints; the last step is always saved
    keep_checkpoints: int = 2  # newest ones that stay, beside the best
    log_every: int = 1  # steps between lines of metrics.jsonl
    validate_every: int = 0  # steps; 0 = never, else the last step is validated too
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    max_bad_steps: int = 5  # consecutive non-finite steps that end the run
    max_seconds: float | None = None  # wall time of one start, then save and stop in good order; None = no limit
    guard: GuardConfig = field(default_factory=GuardConfig)  # lost and hanging ranks, limits in time
    wandb: str = "disabled"  # disabled | offline | online: a copy of metrics.jsonl for Weights & Biases
    wandb_project: str = "dflash2"  # where the run appears there
    tensorboard: bool = False  # write events into output_dir/tensorboard; needs the package tensorboard
    gradient_share_every: int = 100  # steps between looks at how each loss pulls at the backbone; 0 = never
    peak_tflops: float | None = None  # of one device, 1e12 operations a second, for `utilisation`; None = by GPU name
    prefetch_windows: int = 2  # windows read ahead in the background
    attention: str = "auto"  # flex on CUDA, chunked elsewhere; dense is the reference, for small shapes
    num_threads: int | None = None  # torch intra-op threads a rank; None = torch's own choice

    def check(self, drafter: DrafterConfig, target: TargetConfig) -> None:
        for key in COUNTS:
            value = getattr(self, key)
            require(value > 0, f"train.{key}", value, "must be positive", "Use the experiment's value.")
        self._check_start(drafter, target)
        self._check_step()
        self._check_short_blocks(drafter)
        self._check_optimizer()
        self._check_running()

    def _check_start(self, drafter: DrafterConfig, target: TargetConfig) -> None:
        require(
            len(self.init_layers) in (0, drafter.num_layers)
            and all(0 <= i < target.num_layers for i in self.init_layers),
            "train.init_layers",
            self.init_layers,
            f"names a target layer (0..{target.num_layers - 1}) for each of {drafter.num_layers} drafter layers",
            "Leave it empty for a random start.",
        )
        require(
            len(self.init_tap_weights) in (0, len(drafter.target_layer_ids)),
            "train.init_tap_weights",
            self.init_tap_weights,
            f"needs one weight for each of {len(drafter.target_layer_ids)} taps",
            "Leave it empty for a random start.",
        )
        require(
            self.init_norm_scale > 0, "train.init_norm_scale", self.init_norm_scale, "is a positive factor", "Use 1.0."
        )
        require(
            self.init_recent_gain >= 0, "train.init_recent_gain", self.init_recent_gain, "must be at least 0", "Use 0."
        )

    def _check_step(self) -> None:
        require(
            self.attention in ATTENTION_PATHS,
            "train.attention",
            self.attention,
            f"must be one of {ATTENTION_PATHS}",
            "Use auto.",
        )
        require(self.dtype in DTYPES, "train.dtype", self.dtype, f"must be one of {DTYPES}", "Pick one.")
        require(
            self.zero_stage in (0, 1, 2),
            "train.zero_stage",
            self.zero_stage,
            "must be 0, 1 or 2: stage 3 splits each weight for a gain that a drafter of 1-2 B parameters does not need",
            "Use 1, or 2 to split gradients too.",
        )
        require(
            not (self.zero_stage == 0 and self.dtype == "bfloat16"),
            "train.zero_stage",
            0,
            "DeepSpeed has no bf16 with fp32 accumulation at stage 0",
            "Use train.zero_stage=1 (it works on one rank) or train.dtype=float32.",
        )

    def _check_short_blocks(self, drafter: DrafterConfig) -> None:
        short = self.short_block_size
        require(
            short is None or 2 <= short < drafter.block_size,
            "train.short_block_size",
            short,
            f"must lie between 2 and drafter.block_size - 1 = {drafter.block_size - 1}",
            "Leave it null to train whole blocks only.",
        )
        require(
            0 <= self.short_block_share < 1 and (short is not None or self.short_block_share == 0),
            "train.short_block_share",
            self.short_block_share,
            "is a share below 1 and needs train.short_block_size",
            "Use 0, or set both.",
        )
        require(
            short is not None or not self.short_block_random,
            "train.short_block_random",
            self.short_block_random,
            "needs train.short_block_size, the shortest of the random sizes",
            "Set both.",
        )

    def _check_optimizer(self) -> None:
        require(0 < self.lr < 1, "train.lr", self.lr, "must lie in (0, 1)", "Use 6e-4.")
        for key in ("conv_lr_scale", "selector_lr_scale", "mask_lr_scale", "gain_lr_scale"):
            value = getattr(self, key)
            require(value > 0, f"train.{key}", value, "is a factor and must be positive", "Use 1.0.")
        require(
            0 <= self.final_lr_ratio <= 1, "train.final_lr_ratio", self.final_lr_ratio, "must lie in [0, 1]", "Use 0.1."
        )
        require(0 <= self.warmup < 1, "train.warmup", self.warmup, "is a share of the steps", "Use 0.04.")
        require(
            self.schedule in SCHEDULES, "train.schedule", self.schedule, f"must be one of {SCHEDULES}", "Use cosine."
        )
        require(
            self.schedule != "wsd" or (0 < self.decay and self.warmup + self.decay <= 1),
            "train.decay",
            self.decay,
            f"is a share of the steps and must fit beside train.warmup={self.warmup}",
            "Use 0.2.",
        )
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            "train.ema_decay",
            self.ema_decay,
            "must lie in (0, 1), and be null for no average",
            "Use 0.999.",
        )
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "train.betas",
            self.betas,
            "needs two values in [0, 1)",
            "Use [0.9, 0.95].",
        )
        require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, "must be at least 0", "Use 0.")
        require(self.grad_clip >= 0, "train.grad_clip", self.grad_clip, "is a norm; 0 never clips", "Use 1.0.")

    def _check_running(self) -> None:
        require(
            self.validate_every >= 0,
            "train.validate_every",
            self.validate_every,
            "is a number of steps",
            "Use 0 for no validation.",
        )
        require(
            self.gradient_share_every >= 0,
            "train.gradient_share_every",
            self.gradient_share_every,
            "is a number of steps and at least 0",
            "Use 100, or 0 for never.",
        )
        require(
            self.peak_tflops is None or self.peak_tflops > 0,
            "train.peak_tflops",
            self.peak_tflops,
            "is the peak of one device in 1e12 operations a second and must be positive",
            "Use the figure of its data sheet without sparsity, or null.",
        )
        require(
            self.wandb in ("disabled", "offline", "online"),
            "train.wandb",
            self.wandb,
            "must be disabled, offline or online",
            "Pick one.",
        )
        require(
            self.max_seconds is None or self.max_seconds >= 0,
            "train.max_seconds",
            self.max_seconds,
            "must be at least 0, which stops after one step",
            "Use null for no limit.",
        )
        require(
            self.num_threads is None or self.num_threads > 0,
            "train.num_threads",
            self.num_threads,
            "must be positive",
            "Use null for torch's own choice.",
        )

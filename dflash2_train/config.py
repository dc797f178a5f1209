"""The typed configuration of an experiment: every key, its type, unit, default and rule.

One experiment drives all four commands, so there is one schema. YAML under ``conf/`` holds the
structural numbers of each experiment; universal knobs have their one default here. Hydra composes
(``dflash2_train.app``), this module types and checks: :func:`load_config` is the only place where an
OmegaConf object becomes the dataclasses that the rest of the code reads.

Enumerations are plain strings with a check, because OmegaConf's structured configs take no Literal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

DTYPES = ("bfloat16", "float32")
BACKENDS = ("vllm", "hf")
STAGES = ("all", "plan", "regenerate", "capture", "verify")
LAYER_TYPES = ("full_attention", "sliding_attention")
KL_KINDS = ("tail_bucket", "truncated", "renormalised")
MISSING_CANDIDATE = ("mask", "inject")


class UserError(Exception):
    """A fault that the user can mend. The text names key or file, value, rule and next step; no traceback is shown."""


class ConfigError(UserError, ValueError):
    """A configuration that cannot be run."""


def _require(condition: bool, key: str, value: object, rule: str, next_step: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {rule}. {next_step}")


@dataclass(kw_only=True)
class TargetConfig:
    """The frozen model that is served and whose text and states train the drafter."""

    name: str = MISSING  # Hugging Face folder or Hub id
    revision: str | None = None  # commit of a Hub id; None for a local folder
    dtype: str = "bfloat16"  # weights during regenerate and capture
    trust_remote_code: bool = False  # running code from a model repository is opt-in
    license: str = MISSING  # stated in the card of every export
    # Declared shapes, checked against the model's own config.json when it is opened.
    hidden_size: int = MISSING
    num_layers: int = MISSING
    vocab_size: int = MISSING
    tensor_parallel_size: int = 1  # GPUs for one copy of the target inside vLLM
    setup: str = ""  # the command that makes a local target folder; quoted in the error if it is missing

    def check(self) -> None:
        _require(self.dtype in DTYPES, "target.dtype", self.dtype, f"must be one of {DTYPES}", "Pick one.")
        for key in ("hidden_size", "num_layers", "vocab_size", "tensor_parallel_size"):
            value = getattr(self, key)
            _require(value > 0, f"target.{key}", value, "must be positive", "Copy it from the model's config.json.")


@dataclass(kw_only=True)
class DrafterConfig:
    """Shape of the DFlash 2 drafter. Published field names (config.json) win where there is one."""

    num_layers: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING
    intermediate_size: int = MISSING
    block_size: int = 8  # W: the anchor and K = W - 1 drafted tokens
    target_layer_ids: list[int] = MISSING  # taps: 0-based target layers, ascending and unique
    mask_token_id: int = MISSING  # an existing, never generated row of the target's embedding
    layer_types: list[str] = field(default_factory=list)  # one per layer; empty = all full attention
    sliding_window: int | None = None  # W of sliding layers, the current token counted
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16  # C: candidates a position
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = MISSING  # at least the target's served context
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02

    @property
    def num_drafted(self) -> int:
        """K: tokens proposed a block."""
        return self.block_size - 1

    def resolved_layer_types(self) -> list[str]:
        """``layer_types`` with the default written out."""
        return list(self.layer_types) or ["full_attention"] * self.num_layers

    def check(self, target: TargetConfig) -> None:
        taps = self.target_layer_ids
        _require(
            len(taps) > 0,
            "drafter.target_layer_ids",
            taps,
            "must name at least one tap",
            "Spread taps over the layers.",
        )
        _require(
            taps == sorted(set(taps)),
            "drafter.target_layer_ids",
            taps,
            "must be ascending and unique, since vLLM sorts them silently",
            "Sort the list.",
        )
        _require(
            0 <= taps[0] and taps[-1] < target.num_layers,
            "drafter.target_layer_ids",
            taps,
            f"ids are 0-based layers of the target, so below {target.num_layers}",
            "Do not add 1; servers do.",
        )
        _require(
            self.block_size >= 2,
            "drafter.block_size",
            self.block_size,
            "needs the anchor and one drafted token",
            "Use 8.",
        )
        _require(
            0 <= self.mask_token_id < target.vocab_size,
            "drafter.mask_token_id",
            self.mask_token_id,
            f"must be an existing row of the target's embedding (0..{target.vocab_size - 1})",
            "Choose a reserved token of the tokenizer that the target never writes.",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "drafter.num_heads",
            self.num_heads,
            f"must be a multiple of drafter.num_kv_heads={self.num_kv_heads}",
            "Change one of them.",
        )
        _require(
            self.head_dim % 2 == 0,
            "drafter.head_dim",
            self.head_dim,
            "rotary embedding needs an even size",
            "Use 64 or 128.",
        )
        _require(
            target.hidden_size % self.conv_group_size == 0,
            "drafter.conv_group_size",
            self.conv_group_size,
            f"must divide the hidden size {target.hidden_size}",
            "Use 16.",
        )
        _require(
            2 <= self.selector_top_k <= target.vocab_size,
            "drafter.selector_top_k",
            self.selector_top_k,
            "must lie between 2 and the vocabulary size",
            "Use 16.",
        )
        _require(
            self.output_multiplier > 0,
            "drafter.output_multiplier",
            self.output_multiplier,
            "must be positive",
            "Use 1.0.",
        )
        kinds = self.resolved_layer_types()
        _require(
            len(kinds) == self.num_layers,
            "drafter.layer_types",
            self.layer_types,
            f"needs {self.num_layers} entries, one a layer",
            "Leave it empty for full attention everywhere.",
        )
        for kind in kinds:
            _require(
                kind in LAYER_TYPES, "drafter.layer_types", kind, f"must be one of {LAYER_TYPES}", "Fix the entry."
            )
        if "sliding_attention" in kinds:
            _require(
                self.sliding_window is not None and self.sliding_window >= self.block_size,
                "drafter.sliding_window",
                self.sliding_window,
                f"sliding layers need a window of at least drafter.block_size={self.block_size}",
                "Use 2048.",
            )
        else:
            _require(
                self.sliding_window is None,
                "drafter.sliding_window",
                self.sliding_window,
                "is set but no layer is sliding_attention",
                "Set it to null or change drafter.layer_types.",
            )


@dataclass(kw_only=True)
class PromptSourceConfig:
    """One source of prompts: the built-in starter set, a local JSONL file, or a ``datasets`` id."""

    kind: str = MISSING  # starter | jsonl | datasets
    path: str = ""  # file (jsonl) or data set id (datasets); empty for the starter set
    split: str = ""  # starter: train | holdout; datasets: the split name
    subset: str | None = None  # datasets: configuration name
    revision: str | None = None  # datasets: pinned commit
    messages_column: str = "messages"  # column holding a list of {role, content}
    prompt_column: str = ""  # column holding plain text; wins over messages_column when set
    license: str = ""  # licence of every row, where rows do not name their own
    max_prompts: int | None = None


@dataclass(kw_only=True)
class SamplingConfig:
    """How the target writes. Every field is sent with every request and recorded with every row."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0  # 0 = off
    max_tokens: int = MISSING  # completion tokens at most
    seed: int = 0  # row seeds derive from (seed, prompt_id, repeat)
    repeats: int = 1  # completions a prompt

    def check(self) -> None:
        _require(self.temperature >= 0, "data.sampling.temperature", self.temperature, "must be at least 0", "Use 1.0.")
        _require(0 < self.top_p <= 1, "data.sampling.top_p", self.top_p, "must lie in (0, 1]", "Use 0.95.")
        _require(self.top_k >= 0, "data.sampling.top_k", self.top_k, "must be 0 (off) or positive", "Use 0.")
        _require(self.max_tokens > 0, "data.sampling.max_tokens", self.max_tokens, "must be positive", "Use 4096.")
        _require(self.repeats > 0, "data.sampling.repeats", self.repeats, "must be positive", "Use 1.")


@dataclass(kw_only=True)
class DataConfig:
    """Prompts, regeneration, capture and the cache."""

    root: str = MISSING  # folder of conversations/ and capture/
    train_prompts: list[PromptSourceConfig] = MISSING
    holdout_prompts: list[PromptSourceConfig] = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    enable_thinking: bool | None = None  # chat-template argument; None = the template has none
    backend: str = "vllm"  # vllm | hf, for both stages; never changed silently
    max_prompt_tokens: int = MISSING  # longer prompts are dropped and counted
    drop_cut: bool = False  # True drops completions that ended for length
    teacher_top_k: int = 20
    conversations_per_shard: int = 128
    max_num_seqs: int = 96  # requests in flight inside the engine
    kv_cache_gib: float = 2.0  # vLLM on CPU: memory for its KV cache
    gpu_memory_utilization: float = 0.9  # vLLM on GPU
    min_attested_tokens: int = 32  # cached tokens compared with a plain forward before training
    min_agreement: float = 0.3  # share of supervised tokens in the teacher's top-k below which training is refused

    def check(self) -> None:
        _require(self.backend in BACKENDS, "data.backend", self.backend, f"must be one of {BACKENDS}", "Pick one.")
        _require(self.teacher_top_k > 0, "data.teacher_top_k", self.teacher_top_k, "must be positive", "Use 20.")
        _require(
            self.conversations_per_shard > 0,
            "data.conversations_per_shard",
            self.conversations_per_shard,
            "must be positive",
            "Use 128.",
        )
        _require(
            self.max_prompt_tokens > 0, "data.max_prompt_tokens", self.max_prompt_tokens, "must be positive", "Use 512."
        )
        self.sampling.check()


@dataclass(kw_only=True)
class LossConfig:
    """Weights of the objective; formulas in DESIGN terms are at the top of ``losses.py``."""

    gamma: float = 6.5  # w_k = exp(-(k - 1) / gamma)
    ce_weight: float = 1.0
    kl_weight: float = 1.0  # beta
    kl_kind: str = "tail_bucket"
    selector_weight: float = 1.0
    selector_ramp: float = 0.001  # share of the steps over which the selector's weight rises from 0
    missing_candidate: str = "mask"
    detach_unary: bool = False
    chunk_mib: int = 256  # fp32 logits alive at once in the chunked loss, MiB

    def check(self) -> None:
        _require(self.gamma > 0, "loss.gamma", self.gamma, "must be positive", "Use 6.5.")
        _require(self.kl_kind in KL_KINDS, "loss.kl_kind", self.kl_kind, f"must be one of {KL_KINDS}", "Pick one.")
        _require(
            self.missing_candidate in MISSING_CANDIDATE,
            "loss.missing_candidate",
            self.missing_candidate,
            f"must be one of {MISSING_CANDIDATE}",
            "Pick one.",
        )
        for key in ("ce_weight", "kl_weight", "selector_weight"):
            value = getattr(self, key)
            _require(value >= 0, f"loss.{key}", value, "must be at least 0", "Use 1.0.")
        _require(
            self.ce_weight + self.kl_weight > 0,
            "loss.ce_weight",
            self.ce_weight,
            "with loss.kl_weight=0 nothing is left to train",
            "Set one of them.",
        )
        _require(
            0 <= self.selector_ramp <= 1,
            "loss.selector_ramp",
            self.selector_ramp,
            "is a share of the steps",
            "Use 0.001.",
        )
        _require(self.chunk_mib > 0, "loss.chunk_mib", self.chunk_mib, "must be positive", "Use 256.")


@dataclass(kw_only=True)
class TrainConfig:
    """Optimisation, batching, checkpoints."""

    output_dir: str = MISSING
    steps: int = MISSING  # optimizer steps of the whole run
    seed: int = 0
    dtype: str = "bfloat16"  # bfloat16 with fp32 masters, or float32
    row_tokens: int = MISSING  # context tokens a packed row
    rows: int = MISSING  # packed rows a rank and micro-step
    accumulation: int = 1
    anchors_per_document: int = 512  # at most; drawn from (seed, epoch, sample id)
    short_block_size: int | None = None  # block size of the windows that train short blocks; None = all are whole
    short_block_share: float = 0.0  # share of windows with short blocks, drawn from (seed, window)
    lr: float = 6e-4
    final_lr_ratio: float = 0.1
    warmup: float = 0.04  # share of the steps
    weight_decay: float = 0.0
    mask_lr_scale: float = 1.0  # factor on lr of the mask embedding
    gain_lr_scale: float = 1.0  # factor on lr of elementwise gains: norm weights and base kernels
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    grad_clip: float = 1.0
    zero_stage: int = 1
    init_layers: list[int] = field(default_factory=list)  # target layer each drafter layer starts from; empty = random
    init_tap_weights: list[float] = field(default_factory=list)  # fc starts as this sum of taps; empty = random
    init_norm_scale: float = 1.0  # factor on the target's final norm; below 1 starts nearer to uniform logits
    init_recent_gain: float = 0.0  # layer 0 starts as a look at the newest context, this sharp; 0 = random
    warm_start: str | None = None  # exported DFlash 2 folder to start from
    save_every: int = 200  # steps
    keep_checkpoints: int = 2
    log_every: int = 1
    max_bad_steps: int = 5  # consecutive non-finite steps that end the run
    max_seconds: float | None = None  # save and stop in good order after this wall time; resume continues
    wandb: str = "disabled"  # disabled | offline | online
    wandb_project: str = "dflash2"
    num_threads: int | None = None  # torch intra-op threads a rank; None = torch's own choice

    def check(self, drafter: DrafterConfig, target: TargetConfig) -> None:
        _require(
            len(self.init_layers) in (0, drafter.num_layers)
            and all(0 <= i < target.num_layers for i in self.init_layers),
            "train.init_layers",
            self.init_layers,
            f"names a target layer (0..{target.num_layers - 1}) for each of {drafter.num_layers} drafter layers",
            "Leave it empty for a random start.",
        )
        _require(
            len(self.init_tap_weights) in (0, len(drafter.target_layer_ids)),
            "train.init_tap_weights",
            self.init_tap_weights,
            f"needs one weight for each of {len(drafter.target_layer_ids)} taps",
            "Leave it empty for a random start.",
        )
        _require(self.dtype in DTYPES, "train.dtype", self.dtype, f"must be one of {DTYPES}", "Pick one.")
        for key in (
            "steps",
            "row_tokens",
            "rows",
            "accumulation",
            "anchors_per_document",
            "save_every",
            "keep_checkpoints",
            "log_every",
        ):
            value = getattr(self, key)
            _require(value > 0, f"train.{key}", value, "must be positive", "Use the experiment's value.")
        _require(self.zero_stage in (0, 1, 2, 3), "train.zero_stage", self.zero_stage, "must be 0, 1, 2 or 3", "Use 1.")
        _require(
            not (self.zero_stage == 0 and self.dtype == "bfloat16"),
            "train.zero_stage",
            0,
            "DeepSpeed has no bf16 with fp32 accumulation at stage 0",
            "Use train.zero_stage=1 (it works on one rank) or train.dtype=float32.",
        )
        short = self.short_block_size
        _require(
            short is None or 2 <= short < drafter.block_size,
            "train.short_block_size",
            short,
            f"must lie between 2 and drafter.block_size - 1 = {drafter.block_size - 1}",
            "Leave it null to train whole blocks only.",
        )
        _require(
            0 <= self.short_block_share < 1 and (short is not None or self.short_block_share == 0),
            "train.short_block_share",
            self.short_block_share,
            "is a share below 1 and needs train.short_block_size",
            "Use 0, or set both.",
        )
        _require(
            self.init_recent_gain >= 0, "train.init_recent_gain", self.init_recent_gain, "must be at least 0", "Use 0."
        )
        for key in ("init_norm_scale", "mask_lr_scale", "gain_lr_scale"):
            value = getattr(self, key)
            _require(value > 0, f"train.{key}", value, "is a factor and must be positive", "Use 1.0.")
        _require(0 < self.lr < 1, "train.lr", self.lr, "must lie in (0, 1)", "Use 6e-4.")
        _require(
            0 <= self.final_lr_ratio <= 1, "train.final_lr_ratio", self.final_lr_ratio, "must lie in [0, 1]", "Use 0.1."
        )
        _require(0 <= self.warmup < 1, "train.warmup", self.warmup, "is a share of the steps", "Use 0.04.")
        _require(len(self.betas) == 2, "train.betas", self.betas, "needs two values", "Use [0.9, 0.95].")
        _require(
            self.wandb in ("disabled", "offline", "online"),
            "train.wandb",
            self.wandb,
            "must be disabled, offline or online",
            "Pick one.",
        )


@dataclass(kw_only=True)
class ExportConfig:
    """The serve-ready folder."""

    output_dir: str = MISSING
    format: str = "hf"  # hf
    checkpoint: str | None = None  # checkpoint folder; None = the newest complete one of train.output_dir
    dtype: str = "bfloat16"

    def check(self) -> None:
        _require(self.format == "hf", "export.format", self.format, "only hf is written so far", "Use hf.")
        _require(self.dtype in DTYPES, "export.dtype", self.dtype, f"must be one of {DTYPES}", "Use bfloat16.")


@dataclass(kw_only=True)
class EvalConfig:
    """The built-in runner's measurement."""

    output_dir: str = MISSING
    mode: str = "runner"
    drafter: str | None = None  # exported folder; None = export.output_dir
    max_new_tokens: int = MISSING
    max_prompts: int | None = None
    num_drafted: int | None = None  # K; None = the drafter's block_size - 1
    temperature: float = 0.0  # of the extra sampled pass; 0 = greedy only
    top_p: float = 1.0
    draft_sampling: str = "argmax"  # argmax | selector: how proposals are made when temperature > 0
    dtype: str = "float32"  # greedy equality is exact in fp32
    baseline: bool = True  # plain decoding of the same prompts, for equality and speed
    seed: int = 0

    def check(self, drafter: DrafterConfig) -> None:
        _require(self.mode == "runner", "eval.mode", self.mode, "only runner is built in so far", "Use runner.")
        _require(self.dtype in DTYPES, "eval.dtype", self.dtype, f"must be one of {DTYPES}", "Use float32.")
        _require(self.max_new_tokens > 0, "eval.max_new_tokens", self.max_new_tokens, "must be positive", "Use 128.")
        _require(self.temperature >= 0, "eval.temperature", self.temperature, "must be at least 0", "Use 0 for greedy.")
        _require(
            self.draft_sampling in ("argmax", "selector"),
            "eval.draft_sampling",
            self.draft_sampling,
            "must be argmax or selector",
            "Use argmax.",
        )
        _require(
            self.num_drafted is None or 1 <= self.num_drafted <= drafter.num_drafted,
            "eval.num_drafted",
            self.num_drafted,
            f"must lie between 1 and drafter.block_size - 1 = {drafter.num_drafted}",
            "Leave it null for all of them.",
        )


@dataclass(kw_only=True)
class RunConfig:
    """Everything that one experiment fixes."""

    name: str = MISSING  # experiment name, names the run folder
    run_dir: str = "runs/${name}"
    stage: str = "all"  # dflash2-gen-data only
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def check(self) -> None:
        """Raise :class:`ConfigError` for the first rule that the values break."""
        _require(self.stage in STAGES, "stage", self.stage, f"must be one of {STAGES}", "Pick one.")
        self.target.check()
        self.drafter.check(self.target)
        self.data.check()
        self.loss.check()
        self.train.check(self.drafter, self.target)
        self.export.check()
        self.eval.check(self.drafter)


def load_config(composed: DictConfig) -> RunConfig:
    """Type, complete and check a composed configuration.

    Args:
        composed: what Hydra composed, interpolations unresolved. Keys outside the schema are refused
            here, those added with ``+`` included.

    Raises:
        ConfigError: an unknown key, a wrong type, a missing value or a broken rule; one line.
    """
    # Through plain containers: a composed node remembers keys added with "+" and would wave them through.
    plain = OmegaConf.create(OmegaConf.to_container(composed, resolve=False))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
        missing = [] if OmegaConf.is_missing(merged, "name") else sorted(OmegaConf.missing_keys(merged))
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        key = error.full_key or error.key
        raise ConfigError(f"config key {key}: {first}. See dflash2-train --cfg job for the keys there are.") from error
    if OmegaConf.is_missing(merged, "name"):
        raise ConfigError("no experiment is named. Add one, as in: dflash2-train +experiment=smollm2_cpu")
    if missing:
        raise ConfigError(
            f"config keys without a value: {', '.join(missing)}. Set them on the command line or in YAML."
        )
    config = OmegaConf.to_object(merged)
    assert isinstance(config, RunConfig)
    config.check()
    return config


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain nested dicts and lists, for run records."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def absolute(path: str) -> Path:
    """A configured path as an absolute one, relative to where the command was started."""
    return Path(path).expanduser().resolve()

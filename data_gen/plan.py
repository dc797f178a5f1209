"""Stage ``plan``: tokens, bytes, hours and cost of an experiment before anything starts, and what will not fit.

Every number says where it comes from: *counted* (sources read, answers on disk), *measured* (a probe, or a rate in the
config), *estimated* (from the hardware's peaks) or *assumed* (config). Formulas of the estimates:

* regenerate, one replica of ``tensor_parallel_size`` devices: a decoding step reads every weight once, and computes 2
  operations for each weight that a token meets and each sequence in flight. The slower of the two counts. Key-value
  reads are left out, so long contexts are slower than this.
* capture: 2 operations a token and active weight.
* train: 6 operations a weight of the drafter for each slot (context projections: for each context token), attention on
  half a document and the block, and 4 for each element of the frozen head and supervised slot (logits and the gradient
  of the hidden state).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash2_train.config import RunConfig, absolute

COUNTED, MEASURED, PROBED, ESTIMATED, ASSUMED = "counted", "measured", "probe", "estimated", "assumed"
WEIGHT_BYTES = 2  # bf16
# bf16 weight and gradient and the fp32 sum of gradients; fp32 master and two moments, which ZeRO-1 divides by the ranks
WHOLE_BYTES, SHARED_BYTES = 2 + 2 + 4, 12
MEMORY_SHARE = 0.9  # of a device that weights may take before it counts as not fitting
MIB = 2**20
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much text there is to make."""

    prompts: int
    prompts_origin: str
    prompt_tokens: float  # mean of a prompt
    prompt_tokens_origin: str
    answer_tokens: float  # mean of an answer
    answer_tokens_origin: str


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A speed of the whole machine and how it is known."""

    value: float  # units a second
    origin: str


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage's work; without a rate its hours are unknown."""

    stage: str
    units: float
    unit: str
    rate: Rate | None

    @property
    def hours(self) -> float | None:
        """Wall time."""
        return None if self.rate is None else self.units / self.rate.value / 3600


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Something that must fit somewhere."""

    what: str
    needed: float
    available: float | None  # None = unknown
    unit: str
    advice: str

    @property
    def verdict(self) -> str:
        """Fits | does not fit | unknown."""
        if self.available is None:
            return "unknown"
        return "fits" if self.needed <= self.available else "does not fit"


@dataclass(kw_only=True)
class Plan:
    """All of it."""

    amounts: Amounts
    stages: list[StagePlan]
    sizes: list[tuple[str, float]]  # name, bytes
    fits: list[Fit]
    assumptions: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The plan as a JSON value."""
        return {
            "amounts": asdict(self.amounts),
            "stages": [{**asdict(stage), "hours": stage.hours} for stage in self.stages],
            "bytes": dict(self.sizes),
            "fits": [{**asdict(fit), "verdict": fit.verdict} for fit in self.fits],
            "assumptions": self.assumptions,
        }


def short(value: float, unit: str = "") -> str:
    """A number with three digits and a decimal prefix: 33.2 TB."""
    for size, prefix in UNITS:
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def slot_weights(config: RunConfig) -> int:
    """Weights of the drafter that a slot of a block meets: its layers and the selector's hidden projection."""
    drafter, hidden = config.drafter, config.target.hidden_size
    heads = 2 * (drafter.num_heads + drafter.num_kv_heads) * drafter.head_dim  # q, o, k, v
    kernel = 2 * drafter.conv_kernel_size * hidden // drafter.conv_group_size  # one convolution's projection
    layer = hidden * (heads + 3 * drafter.intermediate_size + 2 * kernel)
    return drafter.num_layers * layer + drafter.selector_rank * hidden


def context_weights(config: RunConfig) -> int:
    """Weights that a context token meets: the fusion of its taps, and keys and values of every layer."""
    drafter, hidden = config.drafter, config.target.hidden_size
    fusion = len(drafter.target_layer_ids) * hidden * hidden
    return fusion + drafter.num_layers * 2 * drafter.num_kv_heads * drafter.head_dim * hidden


def drafter_parameters(config: RunConfig) -> int:
    """Trained weights, norms and base kernels left out: fusion, layers, selector with both codebooks."""
    drafter, hidden = config.drafter, config.target.hidden_size
    codebooks = 2 * config.target.vocab_size * drafter.selector_rank
    return len(drafter.target_layer_ids) * hidden * hidden + slot_weights(config) + codebooks


def train_step_flops(config: RunConfig, document_tokens: float, ranks: int) -> float:
    """Operations of one optimizer step over all ranks, see the module's formulas."""
    drafter, train = config.drafter, config.train
    rows = train.rows * train.accumulation * ranks
    documents = max(1.0, train.row_tokens / document_tokens)  # in a row
    anchors = min(train.anchors_per_document, document_tokens) * documents
    slots = anchors * drafter.block_size
    seen = min(document_tokens / 2, float(drafter.sliding_window or document_tokens)) + drafter.block_size
    attention = 3 * 4 * drafter.num_layers * drafter.num_heads * drafter.head_dim * slots * seen
    head = 4 * config.target.vocab_size * config.target.hidden_size * anchors * drafter.num_drafted
    weights = 6 * (context_weights(config) * train.row_tokens + slot_weights(config) * slots)
    return rows * (weights + attention + head)


def decode_rate(config: RunConfig) -> Rate | None:
    """Answer tokens a second of all replicas together, from the peaks; None if the config does not have them."""
    hardware, target, plan = config.plan.hardware, config.target, config.plan
    if hardware.memory_gb_per_s is None or hardware.bf16_tflops is None or target.num_parameters is None:
        return None
    width = target.tensor_parallel_size
    reading = target.num_parameters * WEIGHT_BYTES
    reading /= hardware.memory_gb_per_s * 1e9 * plan.decode_bandwidth_share * width
    active = target.num_active_parameters or target.num_parameters
    computing = 2 * active * config.data.max_num_seqs
    computing /= hardware.bf16_tflops * 1e12 * plan.prefill_flops_share * width
    replicas = hardware.devices // width
    if replicas == 0:
        return None
    return Rate(value=replicas * config.data.max_num_seqs / max(reading, computing), origin=ESTIMATED)


def prefill_rate(config: RunConfig) -> Rate | None:
    """Tokens a second of capture, from the peaks; None if the config does not have them."""
    hardware, target = config.plan.hardware, config.target
    if hardware.bf16_tflops is None or target.num_parameters is None:
        return None
    active = target.num_active_parameters or target.num_parameters
    usable = hardware.devices // target.tensor_parallel_size * target.tensor_parallel_size
    flops = usable * hardware.bf16_tflops * 1e12 * config.plan.prefill_flops_share
    return Rate(value=flops / (2 * active), origin=ESTIMATED) if usable else None


def step_rate(config: RunConfig, document_tokens: float) -> Rate | None:
    """Optimizer steps a second."""
    plan, hardware = config.plan, config.plan.hardware
    if plan.train_seconds_per_step is not None:
        return Rate(value=1 / plan.train_seconds_per_step, origin=MEASURED)
    if hardware.bf16_tflops is None:
        return None
    flops = hardware.devices * hardware.bf16_tflops * 1e12 * plan.train_flops_share
    return Rate(value=flops / train_step_flops(config, document_tokens, hardware.devices), origin=ESTIMATED)


def choose_rate(configured: float | None, probed: float | None, estimate: Rate | None) -> Rate | None:
    """A probe wins over the config's measured rate, and that over an estimate."""
    if probed is not None:
        return Rate(value=probed, origin=PROBED)
    return Rate(value=configured, origin=MEASURED) if configured is not None else estimate


def make_plan(
    config: RunConfig,
    amounts: Amounts,
    *,
    token_bytes: int,
    probed: tuple[float, float] | None = None,
) -> Plan:
    """The plan of an experiment.

    Args:
        config: everything but the amounts.
        amounts: prompts and lengths, counted or assumed.
        token_bytes: bytes of the cache a token.
        probed: (answer tokens a second, captured tokens a second) that a probe found on this machine.
    """
    plan, data = config.plan, config.data
    answers = amounts.prompts * data.sampling.repeats
    document = amounts.prompt_tokens + amounts.answer_tokens
    tokens = answers * document
    generate, capture = probed or (None, None)
    stages = [
        StagePlan(
            stage="regenerate",
            units=answers * amounts.answer_tokens,
            unit="tokens",
            rate=choose_rate(plan.regenerate_tokens_per_s, generate, decode_rate(config)),
        ),
        StagePlan(
            stage="capture",
            units=tokens,
            unit="tokens",
            rate=choose_rate(plan.capture_tokens_per_s, capture, prefill_rate(config)),
        ),
        StagePlan(stage="train", units=config.train.steps, unit="steps", rate=step_rate(config, document)),
    ]
    sizes = [("a token in the cache", float(token_bytes)), ("cache", tokens * token_bytes)]
    return Plan(
        amounts=amounts,
        stages=stages,
        sizes=sizes,
        fits=find_fits(config, tokens * token_bytes),
        assumptions=list_assumptions(config, document, answers),
    )


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system on which ``folder`` lies or will lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def find_fits(config: RunConfig, cache_bytes: float) -> list[Fit]:
    """Cache or ring on disk, target and drafter in device memory, the longest document in a row."""
    hardware, target, train = config.plan.hardware, config.target, config.train
    room = None if hardware.memory_gb is None else hardware.memory_gb * 1e9 * MEMORY_SHARE
    drafter = drafter_parameters(config)
    fits = [
        _storage_fit(config, cache_bytes),
        Fit(
            what="longest prompt and answer in a row",
            needed=config.data.max_prompt_tokens + config.data.sampling.max_tokens,
            available=train.row_tokens,
            unit="tokens",
            advice="raise train.row_tokens or lower data.sampling.max_tokens",
        ),
        Fit(
            what="drafter with optimizer state, a device",
            needed=drafter * (WHOLE_BYTES + SHARED_BYTES / hardware.devices),
            available=room,
            unit="B",
            advice="raise train.zero_stage or add devices; dflash2-train plan=true tells the rest",
        ),
    ]
    if target.num_parameters is not None:
        fits.append(
            Fit(
                what=f"target's weights, a device of {target.tensor_parallel_size}",
                needed=target.num_parameters * WEIGHT_BYTES / target.tensor_parallel_size,
                available=room,
                unit="B",
                advice="raise target.tensor_parallel_size",
            )
        )
    return fits


def _storage_fit(config: RunConfig, cache_bytes: float) -> Fit:
    """The whole cache, or in stream mode the ring, on the disk that would hold it."""
    root = absolute(config.data.root)
    if config.data.mode == "stream":
        return Fit(
            what="ring on this machine's disk",
            needed=float(config.data.stream.budget_mib * MIB),
            available=float(free_bytes(config.data.stream.folder(root))),
            unit="B",
            advice="lower data.stream.budget_mib or choose another data.stream.root",
        )
    return Fit(
        what="cache on this machine's disk",
        needed=cache_bytes,
        available=float(free_bytes(root)),
        unit="B",
        advice="keep a part of it at a time with data.mode=stream, halve it with data.store.dtype=float8_e4m3, choose "
        "a larger data.root, or fewer prompts or shorter answers",
    )


def list_assumptions(config: RunConfig, document_tokens: float, answers: int) -> list[str]:
    """What the estimates rest on, in words."""
    plan, train, hardware = config.plan, config.train, config.plan.hardware
    rows = train.rows * train.accumulation * hardware.devices
    epochs = train.steps * rows * train.row_tokens / max(1.0, answers * document_tokens)
    lines = [
        f"{hardware.name}: {hardware.devices} device(s)"
        + (f" of {hardware.bf16_tflops:g} TFLOP/s bf16" if hardware.bf16_tflops else "")
        + (f", {hardware.memory_gb_per_s:g} GB/s" if hardware.memory_gb_per_s else ""),
        f"training reads each answer about {epochs:.1f} times ({rows} rows of {train.row_tokens} tokens a step)",
    ]
    if hardware.bf16_tflops is not None:
        lines.append(
            f"estimates reach {plan.decode_bandwidth_share:.0%} of the memory's peak in decoding, "
            f"{plan.prefill_flops_share:.0%} of the arithmetic peak in prefill, "
            f"{plan.train_flops_share:.0%} in training"
        )
        lines.append(f"{config.data.max_num_seqs} answers in flight on each copy of the target")
    return lines


def cost(stages: Sequence[StagePlan], devices: int, price_per_hour: float | None) -> list[float | None]:
    """Cost of each stage; None where hours or price are unknown."""
    return [
        None if stage.hours is None or price_per_hour is None else stage.hours * devices * price_per_hour
        for stage in stages
    ]

"""Gates that take a plain forward of the target: tap values, tap layers, teacher.

A sample's beginning is enough, since no state depends on later tokens. Layers beside each tap are read too: where one
of them fits better, layers were counted in another way.

S tokens, T taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from data_gen.cache.format import CapturedSample
from dflash2_train.attest.gate import Gate, judge, unknown
from dflash2_train.attest.labels import spread
from dflash2_train.attest.samples import Samples
from dflash2_train.config import AttestConfig, TargetConfig
from dflash2_train.streams import TapRecorder
from dflash2_train.target import load_target_model

# Largest median relative error of a tap that arithmetic in another order explains, by how states are stored;
# neighbouring layers differ by more than 0.2 on the models looked at. fp8 rounds each value by about 0.03 on top.
MAX_RELATIVE_ERROR = {"bfloat16": 0.08, "float8_e4m3": 0.11}
MAX_LOGPROB_ERROR = 0.1  # median over rows, of the teacher's first choice
MAX_PREFIX = 1024  # tokens of one sample that are run
SAME_FIRST = 0.13  # logits this close are one rounding step of bf16 apart, and may swap


@dataclass(kw_only=True)
class ForwardFindings:
    """Cached states and teacher beside those of plain forwards."""

    tokens: int = 0
    errors: dict[tuple[int, int], float] = field(default_factory=dict)  # (tap, layer) -> median relative error
    teacher_rows: int = 0
    same_first: int = 0  # rows whose first choice is the target's
    logprob_error: float = 0.0  # median

    def error(self, tap: int) -> float:
        """Of a tap against its own layer."""
        return self.errors[tap, tap]


@torch.inference_mode()
def compare_with_forward(samples: Samples, target: TargetConfig, taps: list[int], min_tokens: int) -> ForwardFindings:
    """Run the target over beginnings of samples, until ``min_tokens`` tokens and some teacher rows were compared."""
    model = load_target_model(target)
    layers = sorted({layer for tap in taps for layer in (tap - 1, tap, tap + 1) if 0 <= layer < target.num_layers})
    found = ForwardFindings()
    errors: dict[tuple[int, int], list[Tensor]] = {}
    logprob_errors: list[Tensor] = []
    with TapRecorder(model, layers) as recorder:
        for index in spread(range(len(samples))):
            if found.tokens >= min_tokens and found.teacher_rows:
                break
            sample = samples.read(index)
            ids = sample.input_ids[:MAX_PREFIX].long()
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()  # [S, V]
            streams = {layer: state[0].float() for layer, state in recorder.take().items()}  # [S, H]
            _note_errors(sample.tap_hidden[: len(ids)].float().unflatten(-1, (len(taps), -1)), streams, taps, errors)
            logprob_errors.append(_note_teacher(sample, logits, found))
            found.tokens += len(ids)
    found.errors = {key: _median(parts) for key, parts in errors.items()}
    found.logprob_error = _median(logprob_errors)
    return found


def _median(parts: list[Tensor]) -> float:
    """Median of all values; infinite where there is none, or one that is no number."""
    values = torch.cat(parts).nan_to_num(nan=torch.inf) if parts else torch.empty(0)
    return float(values.median()) if len(values) else float("inf")


def _note_errors(
    cached: Tensor, streams: dict[int, Tensor], taps: list[int], errors: dict[tuple[int, int], list[Tensor]]
) -> None:
    """Relative errors [S] of ``cached`` [S, T, H] against each tap's own layer and its neighbours."""
    for slot, tap in enumerate(taps):
        for layer in (tap - 1, tap, tap + 1):
            if layer in streams:
                fresh = streams[layer]  # [S, H]
                error = (cached[:, slot] - fresh).norm(dim=-1) / fresh.norm(dim=-1).clamp_min(1e-6)
                errors.setdefault((tap, layer), []).append(error)


def _note_teacher(sample: CapturedSample, logits: Tensor, found: ForwardFindings) -> Tensor:
    """Count rows whose cached first choice is the target's; returns the errors of its log probability."""
    rows = torch.isfinite(sample.teacher_logprobs[: len(logits), 0].float())  # rows that hold a teacher
    first = sample.teacher_ids[: len(logits), 0][rows].long()  # [R]
    mine = logits[rows].gather(1, first[:, None])[:, 0]  # [R]
    found.teacher_rows += len(first)
    found.same_first += int((logits[rows].amax(dim=-1) - mine <= SAME_FIRST).sum())
    logprobs = mine - logits[rows].logsumexp(dim=-1)
    return (logprobs - sample.teacher_logprobs[: len(logits), 0][rows].float()).abs()


def forward_gates(found: ForwardFindings | None, taps: list[int], cache_dtype: str, limits: AttestConfig) -> list[Gate]:
    """The three gates; ``found`` is None where they are switched off."""
    limit = MAX_RELATIVE_ERROR.get(cache_dtype)
    rules = (
        f"median relative error at most {limit} in {cache_dtype}",
        "every tap fits its own layer best",
        f"same first choice in {limits.min_teacher_agreement:.1%} of rows, log probability within {MAX_LOGPROB_ERROR}",
    )
    if found is None:
        off = "data.attest.tokens=0"
        return [unknown(name, off, rule) for name, rule in zip(("taps", "tap layers", "teacher"), rules, strict=True)]
    worst = max(taps, key=found.error)
    return [
        judge(
            "taps",
            limit is not None and found.error(worst) <= limit,
            f"{found.error(worst):.4f} at tap {worst}, the worst, over {found.tokens} tokens",
            rules[0],
            "Target, dtype or layers differ from the capture's: capture again.",
        ),
        _layer_gate(found, taps, rules[1]),
        judge(
            "teacher",
            found.same_first >= limits.min_teacher_agreement * found.teacher_rows
            and found.logprob_error <= MAX_LOGPROB_ERROR,
            f"same in {found.same_first} of {found.teacher_rows} rows, log probability off by "
            f"{found.logprob_error:.3f} (median)",
            rules[2],
            "The teacher was made with another norm, head or scale than the target's: capture again, with "
            "data.backend=hf if it happens again.",
        ),
    ]


def _layer_gate(found: ForwardFindings, taps: list[int], rule: str) -> Gate:
    """Whether a neighbouring layer fits better than the tap's own."""
    shifts = {}
    for tap in taps:
        best = min((layer for own, layer in found.errors if own == tap), key=lambda layer: found.errors[tap, layer])
        if best != tap:
            shifts[tap] = best
    parts = [
        f"tap {tap} fits layer {layer} ({found.errors[tap, layer]:.3f}) better than its own ({found.error(tap):.3f})"
        for tap, layer in shifts.items()
    ]
    nearest = min((error for (tap, layer), error in found.errors.items() if layer != tap), default=float("inf"))
    fits = f"yes; the nearest neighbour is off by {nearest:.3f}"
    return judge(
        "tap layers",
        not shifts,
        "; ".join(parts) or fits,
        rule,
        "Layers were counted in another way at capture; see dflash2_train/taps.py, and capture again.",
    )

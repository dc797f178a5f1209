"""Before a step is spent: does the cache hold what the target would compute, and do its labels agree with the target?

Two checks, both cheap next to a run. *Attestation*: a plain forward of the target over one or two cached samples must
give the cached tap states (a shifted layer or another target differs by far more than rounding). *Agreement*: the
share of supervised tokens that lie in the teacher's stored top-k, and the share that are its first choice. Text that
the target did not write shows here, before it costs a week.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.reader import CaptureReader
from data_gen.cache.verify import teacher_hits
from dflash2_train.config import DataConfig, DrafterConfig, TargetConfig
from dflash2_train.runner.target_session import TargetSession
from dflash2_train.target import load_target_model

logger = logging.getLogger(__name__)
# Largest relative error of a tap row that bf16 arithmetic in another order explains; neighbouring layers differ by
# more than 0.2 on the models looked at.
MAX_RELATIVE_ERROR = 0.08
AGREEMENT_SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class Attestation:
    """What the checks found; printed before training and kept in the run record."""

    tokens: int  # compared with a plain forward
    relative_error: float  # median over tokens and taps of |cached - fresh| / |fresh|
    in_top_k: float  # share of supervised tokens inside the teacher's top-k
    argmax: float  # share that are the teacher's first choice


@torch.inference_mode()
def compare_taps(reader: CaptureReader, target: TargetConfig, taps: list[int], min_tokens: int) -> tuple[int, float]:
    """Median relative error of cached tap rows against a plain forward of the target, and the tokens compared.

    Raises:
        CacheIntegrityError: the error is beyond rounding.
    """
    model = load_target_model(target)
    errors: list[torch.Tensor] = []
    tokens = 0
    for index in range(len(reader)):
        if tokens >= min_tokens:
            break
        sample = reader.read(index)
        with TargetSession(model, taps) as session:
            states = session.forward(sample.input_ids.long(), num_logit_rows=1).tap_hidden
        fresh = states.float().unflatten(-1, (len(taps), -1))  # [S, T, H]
        cached = sample.tap_hidden.float().unflatten(-1, (len(taps), -1))  # [S, T, H]
        errors.append(((cached - fresh).norm(dim=-1) / fresh.norm(dim=-1).clamp_min(1e-6)).flatten())
        tokens += len(sample.input_ids)
    error = float(torch.cat(errors).median())
    if not error <= MAX_RELATIVE_ERROR:
        raise CacheIntegrityError(
            f"the cached tap states differ from a plain forward of {target.name} by {error:.3f} (median relative "
            f"error, limit {MAX_RELATIVE_ERROR}). Layers, target or dtype differ from the capture's: capture again."
        )
    return tokens, error


def label_agreement(reader: CaptureReader, mask_token_id: int) -> tuple[float, float]:
    """Shares of supervised tokens (in the teacher's top-k, equal to its first choice) over the first samples.

    Raises:
        CacheIntegrityError: the mask token stands in the text, where the drafter could not tell it from a mask.
    """
    totals = [0, 0, 0]
    for index in range(min(AGREEMENT_SAMPLES, len(reader))):
        sample = reader.read(index)
        if bool((sample.input_ids == mask_token_id).any()):
            raise CacheIntegrityError(
                f"drafter.mask_token_id={mask_token_id} occurs in the text of sample {sample.sample_id}. "
                "Choose a reserved token that the target never writes."
            )
        totals = [total + new for total, new in zip(totals, teacher_hits(sample), strict=True)]
    supervised, inside, first = totals
    return inside / max(supervised, 1), first / max(supervised, 1)


def attest(reader: CaptureReader, target: TargetConfig, drafter: DrafterConfig, data: DataConfig) -> Attestation:
    """Run both checks.

    Raises:
        CacheIntegrityError: tap states beyond rounding, or agreement under ``data.min_agreement``.
    """
    inside, first = label_agreement(reader, drafter.mask_token_id)
    if inside < data.min_agreement:
        raise CacheIntegrityError(
            f"only {inside:.1%} of the supervised tokens lie in the teacher's top-{data.teacher_top_k}, below "
            f"data.min_agreement={data.min_agreement}: this text was not written by {target.name} under this template. "
            "Regenerate it."
        )
    tokens, error = (0, 0.0)
    if data.min_attested_tokens > 0:
        tokens, error = compare_taps(reader, target, drafter.target_layer_ids, data.min_attested_tokens)
    logger.info(
        "cache attested: %d tokens against a plain forward, median relative error %.4f; "
        "labels in the teacher's top-%d %.1f%%, its first choice %.1f%%",
        tokens,
        error,
        data.teacher_top_k,
        100 * inside,
        100 * first,
    )
    return Attestation(tokens=tokens, relative_error=error, in_top_k=inside, argmax=first)

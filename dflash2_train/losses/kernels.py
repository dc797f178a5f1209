"""Triton kernels over a chunk of logits [M, V]. Each reads the vocabulary once and holds no more than a tile of it.

``raw`` is the product of states and head in the parameters' dtype; a logit is ``softcap(multiplier * raw)`` in fp32.
Rows are contiguous, so a row starts at ``row * vocab``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shaped(raw, inside, multiplier, cap, HAS_CAP: tl.constexpr):  # noqa: N803 - Triton's way to name constants
    """Logits of raw products, -inf outside the vocabulary."""
    logits = raw.to(tl.float32) * multiplier
    if HAS_CAP:
        # tanh in terms of exp: the one form that compiles and interprets alike; exact to an fp32 rounding of 1
        small = tl.exp(-2.0 * tl.abs(logits / cap))
        size = cap * (1.0 - small) / (1.0 + small)
        logits = tl.where(logits < 0, -size, size)
    return tl.where(inside, logits, float("-inf"))


@triton.jit
def statistics(
    raw,
    log_normaliser,
    group_max,
    vocab,
    num_groups,
    multiplier,
    cap,
    HAS_CAP: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Per row: log sum exp, and the maximum of every ``GROUP`` neighbouring logits. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < vocab
        logits = shaped(tl.load(raw + row * vocab + columns, mask=inside, other=0.0), inside, multiplier, cap, HAS_CAP)
        new_peak = tl.maximum(peak, tl.max(logits, 0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(logits - new_peak), 0)
        peak = new_peak
        groups = start // GROUP + tl.arange(0, TILE // GROUP)
        maxima = tl.max(tl.reshape(logits, (TILE // GROUP, GROUP)), 1)
        tl.store(group_max + row * num_groups + groups, maxima, mask=groups < num_groups)
    tl.store(log_normaliser + row, peak + tl.log(total))


@triton.jit
def full_divergence(
    raw,
    teacher_raw,
    log_normaliser,
    teacher_normaliser,
    divergence,
    overlap,
    vocab,
    multiplier,
    cap,
    HAS_CAP: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Per row: sum_V p (log p - log q) and sum_V min(p, q). One program a row."""
    row = tl.program_id(0).to(tl.int64)
    own, teachers = tl.load(log_normaliser + row), tl.load(teacher_normaliser + row)
    distance = tl.full((), 0.0, tl.float32)
    shared = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < vocab
        places = row * vocab + columns
        logits = shaped(tl.load(raw + places, mask=inside, other=0.0), inside, multiplier, cap, HAS_CAP)
        teacher = shaped(tl.load(teacher_raw + places, mask=inside, other=0.0), inside, multiplier, cap, HAS_CAP)
        log_p, log_q = teacher - teachers, logits - own
        p = tl.exp(log_p)
        distance += tl.sum(tl.where(inside, p * (log_p - log_q), 0.0), 0)
        shared += tl.sum(tl.minimum(p, tl.exp(log_q)), 0)
    tl.store(divergence + row, distance)
    tl.store(overlap + row, shared)


@triton.jit
def gradient(
    raw,
    teacher_raw,
    log_normaliser,
    teacher_normaliser,
    row_scale,
    teacher_scale,
    vocab,
    multiplier,
    cap,
    HAS_CAP: tl.constexpr,  # noqa: N803
    HAS_TEACHER: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """In place: raw becomes (row_scale q - teacher_scale p) d logit / d raw. One program a row and tile."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < vocab
    places = row * vocab + columns
    logits = shaped(tl.load(raw + places, mask=inside, other=0.0), inside, multiplier, cap, HAS_CAP)
    result = tl.load(row_scale + row) * tl.exp(logits - tl.load(log_normaliser + row))
    if HAS_TEACHER:
        teacher = shaped(tl.load(teacher_raw + places, mask=inside, other=0.0), inside, multiplier, cap, HAS_CAP)
        result -= teacher_scale * tl.exp(teacher - tl.load(teacher_normaliser + row))
    slope = multiplier
    if HAS_CAP:
        bent = logits / cap
        slope = multiplier * (1.0 - bent * bent)
    tl.store(raw + places, (result * slope).to(raw.dtype.element_ty), mask=inside)

"""Speculative decoding of one prompt, and plain decoding by the same means as its baseline.

    prefill: target over the prompt -> first token; prompt taps -> drafter context
    round:   draft K tokens after the anchor -> target over [anchor, drafts] -> verdict: m accepted + 1 of its own
             -> target cache cut to the anchor and the m accepted -> their m + 1 taps -> drafter context

Between rounds, with the anchor at position a, both the target's cache and the drafter's context hold the a tokens
before it. Nothing outlives a call. Output is the target's own: equal to plain greedy decoding token for token (exactly
so in float32, up to rounding of near ties otherwise), or distributed as plain sampling.

Counting: a round's ``num_accepted`` is what the target verified, *before* a stop token or the length limit cuts the
output, which is how servers count; ``num_emitted`` is what reached the output after the cut.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash2_train.config import ConfigError
from dflash2_train.model.drafter import Drafter
from dflash2_train.runner.propose import DraftProposer, Proposal, Proposer
from dflash2_train.runner.target_session import TargetSession
from dflash2_train.runner.verify import Verdict, sample_ids, target_probabilities, verify_greedy, verify_sampled

DRAFT_SAMPLING = ("argmax", "selector")
STOP, LENGTH = "stop", "length"


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How one prompt is decoded. The same settings serve the speculative and the plain path."""

    max_new_tokens: int
    num_drafted: int  # K; unused by plain decoding
    stop_ids: frozenset[int]  # every id of a list-valued EOS; the stop token itself is part of the output
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    draft_sampling: str = "argmax"  # argmax: one-hot q; selector: paths sampled with their true q

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1.")
        if self.num_drafted < 1:
            raise ValueError(f"num_drafted={self.num_drafted}: must be at least 1. Use plain_decode for none.")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be at least 0.")
        if self.draft_sampling not in DRAFT_SAMPLING:
            raise ValueError(f"draft_sampling={self.draft_sampling!r}: must be one of {DRAFT_SAMPLING}.")

    @property
    def draft_temperature(self) -> float:
        """Temperature of the selector's walk; 0 proposes the argmax path."""
        return self.temperature if self.draft_sampling == "selector" else 0.0


class Round(NamedTuple):
    """One verification."""

    num_proposed: int
    num_accepted: int  # as verified, before a stop cuts the output
    num_emitted: int  # tokens that this round added to the output, 1..num_accepted + 1


@dataclass(kw_only=True)
class Timings:
    """Seconds by part. Plain decoding fills prefill, verify (its forwards) and sample."""

    prefill: float = 0.0  # target over the prompt, up to and with the first token
    context: float = 0.0  # drafter context, the prompt's included
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0  # acceptance rule and bookkeeping of the output

    @property
    def decode(self) -> float:
        """Everything after the first token, the drafter's view of the prompt included."""
        return self.context + self.draft + self.verify + self.sample


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What a call produced."""

    token_ids: list[int]  # at most max_new_tokens; ends with the first stop token if there was one
    finish_reason: str  # stop | length
    rounds: list[Round] = field(default_factory=list)  # empty for plain decoding
    timings: Timings


class _Clock:
    """Adds the time since the last reading to one part of :class:`Timings`."""

    def __init__(self, device: torch.device) -> None:
        self.timings = Timings()
        self._synchronize = device.type == "cuda"
        self._last = self._now()

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()

    def charge(self, part: str) -> None:
        now = self._now()
        setattr(self.timings, part, getattr(self.timings, part) + now - self._last)
        self._last = now


class _Output:
    """The tokens so far and the one rule by which both paths stop."""

    def __init__(self, settings: DecodeSettings) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._limit = settings.max_new_tokens
        self._stop_ids = settings.stop_ids

    def extend(self, ids: Sequence[int]) -> int:
        """Add tokens up to the first stop token or the limit; returns how many were added."""
        for added, token in enumerate(ids, start=1):
            self.token_ids.append(token)
            if token in self._stop_ids:
                self.finish_reason = STOP
            elif len(self.token_ids) == self._limit:
                self.finish_reason = LENGTH
            if self.finish_reason is not None:
                return added
        return len(ids)


def _check_prompt(prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise ValueError("prompt_ids is empty: decoding starts from at least one token.")


def _next_id(logits: Tensor, settings: DecodeSettings, generator: torch.Generator | None) -> int:
    """The target's own next token after one row of logits [1, V]."""
    if settings.temperature == 0:
        return int(logits.argmax(dim=-1))
    return int(sample_ids(_probabilities(logits, settings), generator))


def _probabilities(logits: Tensor, settings: DecodeSettings) -> Tensor:
    return target_probabilities(logits, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)


def _verify(proposal: Proposal, logits: Tensor, settings: DecodeSettings, generator: torch.Generator | None) -> Verdict:
    if settings.temperature == 0:
        return verify_greedy(proposal.draft_ids, logits)
    return verify_sampled(proposal.draft_ids, proposal.distribution, _probabilities(logits, settings), generator)


@torch.inference_mode()
def plain_decode(
    target_model: PreTrainedModel,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> GenerationResult:
    """Decode without a drafter, one target forward a token.

    Raises:
        ValueError: an empty prompt.
        ConfigError: a target whose cache is not supported.
    """
    _check_prompt(prompt_ids)
    device = target_model.device
    output = _Output(settings)
    with TargetSession(target_model) as session:
        clock = _Clock(device)
        rows = session.forward(torch.tensor(prompt_ids, device=device), num_logit_rows=1)
        output.extend([_next_id(rows.logits, settings, generator)])
        clock.charge("prefill")
        while output.finish_reason is None:
            rows = session.forward(torch.tensor(output.token_ids[-1:], device=device), num_logit_rows=1)
            clock.charge("verify")
            output.extend([_next_id(rows.logits, settings, generator)])
            clock.charge("sample")
    return GenerationResult(token_ids=output.token_ids, finish_reason=output.finish_reason, timings=clock.timings)


def generate(
    target_model: PreTrainedModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> GenerationResult:
    """Decode one prompt speculatively.

    Args:
        target_model: Hugging Face causal language model, evaluation mode, full attention throughout.
        drafter: a drafter trained for it, in the same dtype and on the same device.
        prompt_ids: at least one token.
        settings: K and the stop rule; greedy or sampled.
        generator: all randomness of the call, on the models' device; None uses torch's global one.

    Raises:
        ValueError: an empty prompt.
        ConfigError: K beyond the drafter's block, positions beyond its limit, dtypes that differ, or a target whose
            cache is not supported.
    """
    _check_prompt(prompt_ids)
    # The last anchor stands at most one before the last token, and its block reaches K further.
    capacity = len(prompt_ids) + settings.max_new_tokens
    limit = drafter.shape.max_position_embeddings
    if capacity + settings.num_drafted > limit:
        raise ConfigError(
            f"{len(prompt_ids)} prompt + {settings.max_new_tokens} new + {settings.num_drafted} drafted tokens exceed "
            f"the drafter's max_position_embeddings={limit}. Lower max_new_tokens or shorten the prompt."
        )
    proposer = DraftProposer(
        drafter,
        embedding_weight=target_model.get_input_embeddings().weight,
        head_weight=target_model.get_output_embeddings().weight,
        num_drafted=settings.num_drafted,
        capacity=capacity,
        temperature=settings.draft_temperature,
        generator=generator,
    )
    return speculate(target_model, proposer, drafter.shape.target_layer_ids, prompt_ids, settings, generator)


@torch.inference_mode()
def speculate(
    target_model: PreTrainedModel,
    proposer: Proposer,
    taps: Collection[int],
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> GenerationResult:
    """The loop of :func:`generate` with any :class:`Proposer` that knows nothing of the prompt yet."""
    _check_prompt(prompt_ids)
    device = target_model.device
    output = _Output(settings)
    rounds: list[Round] = []
    with TargetSession(target_model, tuple(taps)) as session:
        clock = _Clock(device)
        rows = session.forward(torch.tensor(prompt_ids, device=device), num_logit_rows=1)
        output.extend([_next_id(rows.logits, settings, generator)])
        clock.charge("prefill")
        if output.finish_reason is None:
            proposer.observe(rows.tap_hidden)
            clock.charge("context")
        while output.finish_reason is None:
            anchor_id, anchor_position = output.token_ids[-1], session.length
            proposal = proposer.propose(anchor_id, anchor_position)
            block_ids = torch.cat([torch.tensor([anchor_id], device=device), proposal.draft_ids])  # [K + 1]
            clock.charge("draft")
            rows = session.forward(block_ids, num_logit_rows=block_ids.shape[0])
            clock.charge("verify")
            verdict = _verify(proposal, rows.logits, settings, generator)
            accepted_ids = proposal.draft_ids[: verdict.num_accepted].tolist()
            num_emitted = output.extend([*accepted_ids, verdict.next_id])
            rounds.append(Round(proposal.draft_ids.shape[0], verdict.num_accepted, num_emitted))
            session.crop(anchor_position + verdict.num_accepted + 1)  # the anchor and the accepted drafts
            clock.charge("sample")
            if output.finish_reason is None:
                proposer.observe(rows.tap_hidden[: verdict.num_accepted + 1])
                clock.charge("context")
    return GenerationResult(
        token_ids=output.token_ids, finish_reason=output.finish_reason, rounds=rounds, timings=clock.timings
    )

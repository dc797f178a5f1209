"""Speculative decoding of a batch of prompts, and plain decoding by the same means as its baseline.

    prefill: target over each prompt -> first token; the prompt's taps -> drafter context
    round:   draft K tokens after every anchor -> target over [anchor, drafts] -> verdict: m accepted + 1 of its own
             -> the anchor and the m accepted stay in the target's cache, their m + 1 taps enter the drafter context

Rows have their own lengths and accept their own number of drafts; nothing is padded, and a row's greedy output is the
one that it has alone. Between rounds, with a row's anchor at position a, both the target's cache and the drafter's
context hold the a tokens before it. Nothing outlives a call. Output is the target's own: equal to plain greedy decoding
token for token (exactly so in float32, up to rounding of near ties otherwise), or distributed as plain sampling.

Counting: a round's ``num_accepted`` is what the target verified, *before* a stop token or the length limit cuts the
output, which is how servers count; ``num_emitted`` is what reached the output after the cut.

Letters: B rows, K drafted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash2_train.config import ConfigError
from dflash2_train.model.drafter import Drafter
from dflash2_train.runner.outcome import Clock, GenerationResult, Round, RowOutput
from dflash2_train.runner.propose import DraftProposer, Proposal, Proposer
from dflash2_train.runner.settings import DecodeSettings
from dflash2_train.runner.target_session import TargetSession, open_session
from dflash2_train.runner.verify import (
    DraftDistribution,
    Verdict,
    sample_ids,
    target_probabilities,
    verify_greedy,
    verify_sampled,
)


class Emission(NamedTuple):
    """Tokens that one row gained: its first, or those of one round."""

    row: int  # place of the prompt in the batch
    token_ids: list[int]
    finish_reason: str | None  # None = the row goes on


def generate(
    target_model: PreTrainedModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> GenerationResult:
    """Decode one prompt speculatively; :func:`generate_batch` with one row."""
    return generate_batch(target_model, drafter, [prompt_ids], settings, generator)[0]


def generate_batch(
    target_model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> list[GenerationResult]:
    """Decode prompts of any lengths speculatively, all at once.

    Args:
        target_model: Hugging Face causal language model in evaluation mode; full, sliding, indexed and recurrent
            layers, on one device or spread by accelerate.
        drafter: a drafter trained for it, in the same dtype.
        prompts: token ids, at least one each.
        settings: K and the stop rule; greedy or sampled.
        generator: all randomness of the call, on the target's device; None uses torch's global one.

    Returns:
        a result a prompt, in their order; the timings are the batch's.

    Raises:
        ValueError: no prompt, or an empty one.
        ConfigError: K beyond the drafter's block, positions beyond its limit, a drafter of another vocabulary or
            dtype, or a target whose cache can't be rolled back.
    """
    proposer = _open_proposer(target_model, drafter, prompts, settings, generator)
    outputs, clock = _new_outputs(prompts, settings), Clock(target_model.device)
    taps = drafter.shape.target_layer_ids
    return _drain(speculate(target_model, proposer, taps, prompts, settings, generator, outputs, clock), outputs, clock)


def stream(
    target_model: PreTrainedModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> Iterator[list[int]]:
    """The tokens of :func:`generate` as they are accepted: one list a round, the first with one token.

    Nothing runs before the first item is asked for; an iterator that is left early frees its caches when closed.
    Errors as :func:`generate_batch`, raised on the first item.
    """
    proposer = _open_proposer(target_model, drafter, [prompt_ids], settings, generator)
    taps = drafter.shape.target_layer_ids
    outputs, clock = _new_outputs([prompt_ids], settings), Clock(target_model.device)
    emissions = speculate(target_model, proposer, taps, [prompt_ids], settings, generator, outputs, clock)
    with closing(emissions):
        for emission in emissions:
            yield emission.token_ids


def plain_decode(
    target_model: PreTrainedModel,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> GenerationResult:
    """Decode one prompt without a drafter, one target forward a token. Errors as :func:`plain_decode_batch`."""
    return plain_decode_batch(target_model, [prompt_ids], settings, generator)[0]


def plain_decode_batch(
    target_model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> list[GenerationResult]:
    """Decode without a drafter.

    Raises:
        ValueError: no prompt, or an empty one.
        ConfigError: a target whose cache is not supported.
    """
    outputs, clock = _new_outputs(prompts, settings), Clock(target_model.device)
    return _drain(speculate(target_model, None, (), prompts, settings, generator, outputs, clock), outputs, clock)


@torch.inference_mode()
def speculate(
    target_model: PreTrainedModel,
    proposer: Proposer | None,
    taps: Sequence[int],
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    generator: torch.Generator | None,
    outputs: Sequence[RowOutput],
    clock: Clock,
) -> Generator[Emission]:
    """The loop of all of the above, with any :class:`Proposer` that knows nothing of the prompts yet.

    Args:
        target_model: see :func:`generate_batch`.
        proposer: None decodes plainly.
        taps: layers whose output the proposer is fed, ascending.
        prompts: token ids.
        settings: see :class:`DecodeSettings`.
        generator: source of randomness.
        outputs: an empty output a prompt; filled on the way.
        clock: charged on the way; the caller's time between two items is left out.
    """
    session = open_session(
        target_model,
        num_rows=len(prompts),
        capacity=_capacity(prompts, settings),
        taps=taps,
        static=settings.static_cache,
        compiled=settings.compile_target,
    )
    with session:
        clock.skip()
        for emission in _first_tokens(session, proposer, prompts, outputs, settings, generator, clock):
            yield emission
            clock.skip()
        live = _drop_finished(session, proposer, list(outputs))
        while any(row.finish_reason is None for row in live):
            for emission in _one_round(session, proposer, live, settings, generator, clock):
                yield emission
            clock.skip()
            live = _drop_finished(session, proposer, live)


def _first_tokens(
    session: TargetSession,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[RowOutput],
    settings: DecodeSettings,
    generator: torch.Generator | None,
    clock: Clock,
) -> Iterator[Emission]:
    """Prefill every prompt, unpadded, and draw its first token."""
    for output, prompt in zip(outputs, prompts, strict=True):
        rows = session.prefill(output.row, torch.tensor(prompt, device=session.device))
        first = int(_own_ids(rows.logits[:, -1], settings, generator))
        output.extend([first])
        clock.charge("prefill")
        if proposer is not None and (output.finish_reason is None or session.static):
            proposer.start(output.row, rows.tap_hidden[0])
            clock.charge("context")
        yield Emission(output.row, [first], output.finish_reason)


def _one_round(
    session: TargetSession,
    proposer: Proposer | None,
    live: Sequence[RowOutput],
    settings: DecodeSettings,
    generator: torch.Generator | None,
    clock: Clock,
) -> list[Emission]:
    """Draft, verify and commit one block in every live row. A finished row of a static cache stands still."""
    anchor_ids = [row.token_ids[-1] for row in live]
    block_ids = torch.tensor(anchor_ids, device=session.device)[:, None]  # [B, 1]
    proposal = None
    if proposer is not None:
        proposal = proposer.propose(anchor_ids, session.lengths)
        block_ids = torch.cat([block_ids, proposal.draft_ids.to(session.device)], dim=1)  # [B, K + 1]
        clock.charge("draft")
    rows = session.forward(block_ids)
    clock.charge("verify")
    verdict = _verify(proposal, block_ids, rows.logits, settings, generator)
    emissions, num_kept = _book(live, block_ids[:, 1:], verdict)
    session.commit(num_kept)
    clock.charge("sample")
    if proposer is not None and any(row.finish_reason is None for row in live):
        proposer.observe(rows.tap_hidden, num_kept)
        clock.charge("context")
    return emissions


def _verify(
    proposal: Proposal | None,
    block_ids: Tensor,
    logits: Tensor,
    settings: DecodeSettings,
    generator: torch.Generator | None,
) -> Verdict:
    draft_ids = block_ids[:, 1:].to(logits.device)
    if settings.temperature == 0:
        return verify_greedy(draft_ids, logits)
    if proposal is None:
        next_ids = _own_ids(logits[:, 0], settings, generator)
        return Verdict(torch.zeros_like(next_ids), next_ids)
    draft = proposal.distribution
    if draft is not None:
        draft = DraftDistribution(draft.candidate_ids.to(logits.device), draft.probabilities.to(logits.device))
    return verify_sampled(draft_ids, draft, _probabilities(logits, settings), generator)


def _book(live: Sequence[RowOutput], draft_ids: Tensor, verdict: Verdict) -> tuple[list[Emission], list[int]]:
    """Write the verdict into the outputs; returns what was emitted and the tokens of each block that stay."""
    emissions, num_kept = [], []
    accepted, following = verdict.num_accepted.tolist(), verdict.next_ids.tolist()
    for row, drafts, num_accepted, next_id in zip(live, draft_ids.tolist(), accepted, following, strict=True):
        if row.finish_reason is not None:
            num_kept.append(0)
            continue
        new_ids = [*drafts[:num_accepted], next_id]
        num_emitted = row.extend(new_ids)
        if drafts:
            row.rounds.append(Round(len(drafts), num_accepted, num_emitted))
        num_kept.append(num_accepted + 1)  # the anchor and the accepted drafts
        emissions.append(Emission(row.row, new_ids[:num_emitted], row.finish_reason))
    return emissions, num_kept


def _drop_finished(session: TargetSession, proposer: Proposer | None, live: list[RowOutput]) -> list[RowOutput]:
    """Take finished rows out of both caches, unless nobody is left or the shapes must stay."""
    going = [index for index, row in enumerate(live) if row.finish_reason is None]
    if not going or len(going) == len(live) or session.static:
        return live
    session.keep_rows(going)
    if proposer is not None:
        proposer.keep_rows(going)
    return [live[index] for index in going]


def _own_ids(logits: Tensor, settings: DecodeSettings, generator: torch.Generator | None) -> Tensor:
    """The target's own next tokens after rows of logits [B, V]: [B]."""
    if settings.temperature == 0:
        return logits.argmax(dim=-1)
    return sample_ids(_probabilities(logits, settings), generator)


def _probabilities(logits: Tensor, settings: DecodeSettings) -> Tensor:
    return target_probabilities(
        logits,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
    )


def _check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    if not prompts:
        raise ValueError("prompts is empty: decoding starts from at least one prompt.")
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("prompt_ids is empty: decoding starts from at least one token.")


def _new_outputs(prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> list[RowOutput]:
    _check_prompts(prompts)
    return [RowOutput(row, settings) for row in range(len(prompts))]


def _drain(emissions: Iterator[Emission], outputs: Sequence[RowOutput], clock: Clock) -> list[GenerationResult]:
    for _ in emissions:
        pass
    return [output.result(clock.timings) for output in outputs]


def _capacity(prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> int:
    """Places a row needs: the last anchor stands at most one before the last token, its block reaches K further."""
    return max(len(prompt) for prompt in prompts) + settings.max_new_tokens + settings.num_drafted


def _open_proposer(
    target_model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    generator: torch.Generator | None,
) -> DraftProposer:
    _check_prompts(prompts)
    limit, capacity = drafter.shape.max_position_embeddings, _capacity(prompts, settings)
    if capacity > limit:
        raise ConfigError(
            f"{capacity - settings.max_new_tokens - settings.num_drafted} prompt + {settings.max_new_tokens} new + "
            f"{settings.num_drafted} drafted tokens exceed the drafter's max_position_embeddings={limit}. Lower "
            "max_new_tokens or shorten the prompt."
        )
    head: nn.Module = target_model.get_output_embeddings()
    embedding_weight: Tensor = target_model.get_input_embeddings().weight
    if embedding_weight.shape[0] != drafter.shape.vocab_size:
        raise ConfigError(
            f"the target has {embedding_weight.shape[0]} embedding rows, the drafter a vocabulary of "
            f"{drafter.shape.vocab_size}: it was made for another target."
        )
    return DraftProposer(
        drafter,
        embedding_weight=embedding_weight,
        head=head,
        num_drafted=settings.num_drafted,
        num_rows=len(prompts),
        capacity=capacity,
        temperature=settings.draft_temperature,
        generator=generator,
    )

"""Decode every hold-out prompt with and without the drafter, record each prompt as soon as it is done.

The two decoders alternate in who goes first, so that drift of the machine hits both alike. One prompt is decoded
beforehand and thrown away. Prompts that the results file already holds are not decoded again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from transformers import PreTrainedModel

from dflash2_train.evaluate.holdout import HoldoutPrompt
from dflash2_train.evaluate.records import DecodeRecord, EqualityRecord, PromptRecord, ResultsFile
from dflash2_train.model.drafter import Drafter
from dflash2_train.progress import ProgressReporter
from dflash2_train.runner import DecodeSettings, GenerationResult, generate, plain_decode

logger = logging.getLogger(__name__)
WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is decoded how. ``sampled`` None leaves the second pass out."""

    target_model: PreTrainedModel
    drafter: Drafter
    greedy: DecodeSettings
    sampled: DecodeSettings | None
    baseline: bool
    seed: int


def measure_prompts(measurement: Measurement, prompts: Sequence[HoldoutPrompt], results: ResultsFile) -> None:
    """Fill ``results`` with every prompt that it lacks."""
    waiting = [prompt for prompt in prompts if prompt.prompt_id not in results.records]
    if len(waiting) < len(prompts):
        logger.info("%d of %d prompts are already measured", len(prompts) - len(waiting), len(prompts))
    if not waiting:
        return
    warm_up(measurement, waiting[0])
    done = len(prompts) - len(waiting)
    with ProgressReporter("prompts", len(prompts), done=done) as progress:
        for prompt in waiting:
            results.append(measure_prompt(measurement, prompt, baseline_first=len(results.records) % 2 == 0))
            done += 1
            progress.update(done, f"acceptance length {running_length(results)}")


def running_length(results: ResultsFile) -> str:
    """Pooled acceptance length of the greedy pass so far, for the progress line."""
    rounds = [one for record in results.records.values() for one in record.greedy.rounds]
    if not rounds:
        return "-"
    return f"{1 + sum(one[1] for one in rounds) / len(rounds):.3f}"


def warm_up(measurement: Measurement, prompt: HoldoutPrompt) -> None:
    """Decode a few tokens both ways, so that first-use costs fall outside the measurement."""
    settings = replace(measurement.greedy, max_new_tokens=min(WARM_UP_TOKENS, measurement.greedy.max_new_tokens))
    generate(measurement.target_model, measurement.drafter, prompt.prompt_ids, settings)
    plain_decode(measurement.target_model, prompt.prompt_ids, settings)


def measure_prompt(measurement: Measurement, prompt: HoldoutPrompt, *, baseline_first: bool) -> PromptRecord:
    """All decodings of one prompt and the equality check."""
    model, ids = measurement.target_model, prompt.prompt_ids
    plain = plain_decode(model, ids, measurement.greedy) if measurement.baseline and baseline_first else None
    greedy = generate(model, measurement.drafter, ids, measurement.greedy)
    if measurement.baseline and plain is None:
        plain = plain_decode(model, ids, measurement.greedy)
    sampled = None
    if measurement.sampled is not None:
        generator = torch.Generator(device=model.device).manual_seed(prompt_seed(measurement.seed, prompt.prompt_id))
        sampled = generate(model, measurement.drafter, ids, measurement.sampled, generator)
    return PromptRecord(
        prompt_id=prompt.prompt_id,
        num_prompt_tokens=len(ids),
        greedy=to_record(greedy),
        baseline=to_record(plain) if plain is not None else None,
        equality=check_equality(model, ids, greedy.token_ids, plain.token_ids) if plain is not None else None,
        sampled=to_record(sampled) if sampled is not None else None,
    )


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed that depends on the prompt alone, not on its place or on what ran before."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:7])


def to_record(result: GenerationResult) -> DecodeRecord:
    """A generation as JSON values."""
    return DecodeRecord(
        token_ids=result.token_ids,
        finish_reason=result.finish_reason,
        rounds=[list(one) for one in result.rounds],
        seconds={part: round(seconds, 6) for part, seconds in asdict(result.timings).items()},
    )


def check_equality(
    model: PreTrainedModel, prompt_ids: Sequence[int], speculative: Sequence[int], plain: Sequence[int]
) -> EqualityRecord:
    """Compare outputs. Where they differ, measure how far each emitted token is from the target's argmax."""
    if list(speculative) == list(plain):
        return EqualityRecord(equal=True)
    differences = [i for i, (a, b) in enumerate(zip(speculative, plain, strict=False)) if a != b]
    gaps = teacher_forced_gaps(model, prompt_ids, speculative)
    return EqualityRecord(
        equal=False,
        first_difference=differences[0] if differences else min(len(speculative), len(plain)),
        num_departures=int((gaps > 0).sum()),
        largest_gap=float(gaps.max()),
    )


@torch.inference_mode()
def teacher_forced_gaps(model: PreTrainedModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    """By how many logits each emitted token falls short of the target's best at its place: [n] float32, >= 0."""
    ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]], device=model.device)  # [1, S]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(token_ids)).logits[0].float()  # [n, V]
    emitted = logits.gather(-1, torch.tensor(token_ids, device=model.device)[:, None]).squeeze(-1)  # [n, 1] -> [n]
    return logits.amax(dim=-1) - emitted

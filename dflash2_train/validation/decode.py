"""Real decoding of a few held-back prompts with the target, and the forecast for just these.

The target samples as it did when it wrote the captured answers, drafts are argmax proposals, and every prompt has a
generator of its own, so that weights alone tell two validations apart. The forecast of the same prompts follows the
served chain over the captured answer for as many tokens as are decoded: two draws of one law.

The target is loaded for each validation and let go of afterwards: training keeps its memory.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data_gen.cache.format import CapturedSample
from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.data import PackedBatch
from dflash2_train.draws import document_keys
from dflash2_train.metrics import MetricSums
from dflash2_train.model.drafter import Drafter
from dflash2_train.runner import DecodeSettings, GenerationResult, generate
from dflash2_train.runner.outcome import STOP
from dflash2_train.target import load_target_model, open_target_config
from dflash2_train.validation.captures import Captures
from dflash2_train.validation.figures import LENGTH

REAL, FORECAST = f"{LENGTH}_real", f"{LENGTH}_forecast"
SQUARES = {REAL: "real_squares", FORECAST: "forecast_squares"}  # of accepted drafts a round, for the standard error
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
REHEARSED_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class DecodePrompt:
    """A prompt of a captured answer."""

    sample_id: str
    prompt_ids: list[int]
    answer_tokens: int  # of the captured answer


class RealDecoding:
    """The prompts that are decoded, and how.

    Args:
        config: the experiment.
        captures: of which prompts and sampling are taken.
        device: of the drafter.
        rank: this process, which decodes its share.
        world_size: of all.

    Raises:
        ConfigError: the runner cannot sample as the answers were, or a prompt runs past the drafter's positions.
    """

    def __init__(
        self, config: RunConfig, captures: Captures, *, device: torch.device, rank: int, world_size: int
    ) -> None:
        validation = config.train.validation
        self._config, self._device, self._seed = config, device, validation.seed
        self.settings = decode_settings(config, captures.manifest.content.get("sampling", {}))
        self.prompts = [
            read_prompt(captures.sample(document))
            for document in captures.one_a_conversation(validation.decode_prompts)
        ]
        self._own = self.prompts[rank::world_size]
        longest = max(len(prompt.prompt_ids) for prompt in self.prompts)
        needed = longest + validation.decode_tokens + config.drafter.num_drafted
        if needed > config.drafter.max_position_embeddings:
            raise ConfigError(
                f"train.validation.decode_tokens={validation.decode_tokens}: with a prompt of {longest} tokens that is "
                f"past drafter.max_position_embeddings={config.drafter.max_position_embeddings}. Lower it."
            )

    def rehearse(self, drafter: Drafter) -> None:
        """Decode a few tokens, so that a target that cannot be run here is known before the first step."""
        self._decode(drafter, self._own[:1], min(REHEARSED_TOKENS, self.settings.max_new_tokens))

    def run(self, drafter: Drafter) -> MetricSums:
        """Decode this rank's prompts."""
        sums = MetricSums()
        add_rounds(sums, REAL, torch.zeros(0, dtype=torch.int64))
        for result in self._decode(drafter, self._own, self.settings.max_new_tokens):
            add_rounds(sums, REAL, counted_rounds(result))
        return sums

    def compared(self, batch: PackedBatch, anchors: Tensor) -> Tensor:
        """Which blocks [n] of a row at ``anchors`` [n] stand where real decoding would start one, bool."""
        ends = {
            prompt.sample_id: len(prompt.prompt_ids) + min(self.settings.max_new_tokens - 1, prompt.answer_tokens)
            for prompt in self.prompts
        }
        end = torch.tensor([ends.get(name, 0) for name in batch.sample_ids[0]])
        return batch.position_ids[0][anchors] < end[batch.document_ids[0][anchors]]

    def _decode(self, drafter: Drafter, prompts: Collection[DecodePrompt], tokens: int) -> list[GenerationResult]:
        if not prompts:
            return []
        train = self._config.train
        model = load_target_model(self._config.target, train.dtype, device=self._device)
        settings = replace(self.settings, max_new_tokens=tokens)
        results = []
        with uncompiled(train.compile_layers):
            for prompt in prompts:
                generator = torch.Generator(device=self._device).manual_seed(self._prompt_seed(prompt))
                results.append(generate(model, drafter, prompt.prompt_ids, settings, generator))
        return results

    def _prompt_seed(self, prompt: DecodePrompt) -> int:
        return int(document_keys([[prompt.sample_id]], seed=self._seed, purpose="validation"))


def decode_settings(config: RunConfig, recorded: dict[str, Any]) -> DecodeSettings:
    """How the captured answers were sampled, as the runner takes it.

    Args:
        config: the experiment, for what is not on record.
        recorded: ``sampling`` of the captures' manifest.

    Raises:
        ConfigError: a sampling option that the runner does not have.
    """
    sampling = {**asdict(config.data.sampling), **recorded}
    foreign = [f"{key}={sampling[key]}" for key, value in NEUTRAL.items() if sampling[key] != value]
    if foreign:
        raise ConfigError(
            f"train.validation.decode_prompts={config.train.validation.decode_prompts}: the captured answers were "
            f"sampled with {', '.join(foreign)}, which the built-in runner does not do, so real decoding could not be "
            "compared. Use 0; the forecast stays."
        )
    stop_ids = sampling.get("stop_ids") or open_target_config(config.target).eos_token_ids
    return DecodeSettings(
        max_new_tokens=config.train.validation.decode_tokens,
        num_drafted=config.drafter.num_drafted,
        stop_ids=frozenset(stop_ids),
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        min_p=sampling["min_p"],
    )


def read_prompt(sample: CapturedSample) -> DecodePrompt:
    """What stands before the first answer of a captured sample."""
    mask = sample.loss_mask.long()
    first = int(mask.argmax())
    answer = int(mask[first:].cumprod(0).sum())
    prompt_ids = sample.input_ids[:first].tolist()
    return DecodePrompt(sample_id=sample.sample_id, prompt_ids=prompt_ids, answer_tokens=answer)


def counted_rounds(result: GenerationResult) -> Tensor:
    """Accepted drafts of each round, [rounds] int64; drafts behind a stop token count for nothing.

    Servers count them, a captured text cannot: it ends with the stop token, and the two are to be compared.
    """
    accepted = [one.num_accepted for one in result.rounds]
    if accepted and result.finish_reason == STOP:
        accepted[-1] = min(accepted[-1], result.rounds[-1].num_emitted)
    return torch.tensor(accepted, dtype=torch.int64)


def add_rounds(sums: MetricSums, name: str, accepted: Tensor) -> None:
    """Length and, for its standard error, squares of rounds with these accepted counts [rounds]."""
    sums.add(name, (accepted + 1).sum(), len(accepted))
    sums.add(SQUARES[name], accepted.square().sum(), len(accepted))


def uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """Run compiled layers plainly: the shapes of decoding would use up what torch compiles for one function."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()

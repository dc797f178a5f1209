"""Speculative decoding in plain PyTorch: propose a block, verify it with the target, commit, repeat.

    from dflash2_train.runner import DecodeSettings, generate, stream

    settings = DecodeSettings(max_new_tokens=256, num_drafted=7, stop_ids=frozenset({2}))
    result = generate(target_model, drafter, prompt_ids, settings)  # token_ids, finish_reason, rounds, timings
    for token_ids in stream(target_model, drafter, prompt_ids, settings):
        ...  # the tokens of one round

``target_model`` is any Hugging Face causal language model in evaluation mode, ``drafter`` a
:class:`~dflash2_train.model.drafter.Drafter` of the same dtype. Output is the target's own (see ``runner.loop``);
``generate_batch`` takes prompts of unequal length, ``plain_decode`` is the baseline without a drafter, and
``with packed_linears(target_model, drafter):`` makes either faster on a CPU.
"""

from dflash2_train.runner.loop import generate, generate_batch, plain_decode, plain_decode_batch, stream
from dflash2_train.runner.outcome import GenerationResult, Round, Timings
from dflash2_train.runner.packing import packed_linears
from dflash2_train.runner.settings import DecodeSettings

__all__ = [
    "DecodeSettings",
    "GenerationResult",
    "Round",
    "Timings",
    "generate",
    "generate_batch",
    "packed_linears",
    "plain_decode",
    "plain_decode_batch",
    "stream",
]

"""A random target of the Llama architecture on disk, and a capture cache made by a plain forward of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data_gen.cache.format import CapturedSample, CaptureManifest
from data_gen.cache.writer import CaptureWriter
from dflash2_train.config import RunConfig
from dflash2_train.provenance import hash_model_folder
from dflash2_train.taps import TAP_CONVENTION

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

EOS = (1, 2)


def save_tiny_llama(folder: Path, config: RunConfig) -> LlamaForCausalLM:
    """Write a random Llama of the declared shapes to ``folder`` and return it; fp32, deterministic."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    target = config.target
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=target.hidden_size,
            num_hidden_layers=target.num_layers,
            vocab_size=target.vocab_size,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=0,
            eos_token_id=list(EOS),
            tie_word_embeddings=True,
            initializer_range=0.2,  # wide enough that the target has opinions to learn
        )
    ).eval()
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=list(EOS), pad_token_id=0)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def captured(model: LlamaForCausalLM, config: RunConfig, sample_id: str, ids: list[int], prompt: int) -> CapturedSample:
    """One sample as the capture stage would store it; ``prompt`` tokens are unsupervised."""
    top_k = config.data.teacher_top_k
    output = model(torch.tensor([ids]), output_hidden_states=True)
    taps = [output.hidden_states[tap + 1][0] for tap in config.drafter.target_layer_ids]  # [S, H] each
    logits = output.logits[0].float()  # [S, V]
    normaliser = logits.logsumexp(-1)
    values, indices = logits.topk(top_k, -1)
    mask = torch.arange(len(ids)) >= prompt
    return CapturedSample(
        sample_id=sample_id,
        input_ids=torch.tensor(ids, dtype=torch.int32),
        loss_mask=mask,
        tap_hidden=torch.cat(taps, -1).to(torch.bfloat16),
        teacher_ids=indices.to(torch.int32),
        teacher_logprobs=(values - normaliser[:, None]).to(torch.float16),
        teacher_log_normaliser=normaliser,
    )


def cache_manifest(config: RunConfig) -> CaptureManifest:
    """The manifest of a cache for ``config``, with the fields that the trainer reads."""
    return CaptureManifest(
        content={
            "target": config.target.name,
            "target_hash": hash_model_folder(Path(config.target.name)),
            "target_layer_ids": list(config.drafter.target_layer_ids),
            "tap_convention": TAP_CONVENTION,
            "hidden_size": config.target.hidden_size,
            "teacher_top_k": config.data.teacher_top_k,
            "enable_thinking": config.data.enable_thinking,
        }
    )


@torch.inference_mode()
def write_cache(model: LlamaForCausalLM, config: RunConfig, *, samples: int, length: int) -> None:
    """Fill ``data.root/capture`` with text that the target itself sampled."""
    generator = torch.Generator().manual_seed(11)
    writer = CaptureWriter(Path(config.data.root) / "capture", cache_manifest(config))
    rows = []
    for number in range(samples):
        ids = torch.randint(3, config.target.vocab_size - 1, (4,), generator=generator).tolist()
        size = length - number % 5
        while len(ids) < size:
            logits = model(torch.tensor([ids])).logits[0, -1].float()
            logits[config.drafter.mask_token_id] = -torch.inf  # as in real targets, where it is reserved
            ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        rows.append(captured(model, config, f"sample-{number}", ids, prompt=4))
    writer.write_shard(0, rows)

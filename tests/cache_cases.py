"""Small random capture caches, shared by test modules and by the chaos runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import CapturedSample, CaptureManifest
from data_gen.cache.writer import CaptureWriter
from dflash2_train.provenance import safetensors_header

TAPS, HIDDEN, VOCAB, TOP_K = [0, 2], 4, 50, 3
CONTENT = {
    "target": "toy",
    "target_layer_ids": TAPS,
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "teacher_top_k": TOP_K,
    "cache_dtype": "bfloat16",
    "sampling": {"temperature": 1.0, "seed": 0},
}
MANIFEST = CaptureManifest(content=CONTENT)
FP8_MANIFEST = CaptureManifest(content={**CONTENT, "cache_dtype": "float8_e4m3"})


def make_sample(name: str, length: int = 6, prompt: int = 2) -> CapturedSample:
    """Random states; the teacher's first choice is the next token."""
    ids = torch.randint(0, VOCAB - TOP_K, (length,), dtype=torch.int32)
    following = torch.cat([ids[1:], ids[:1]])
    logprobs = torch.tensor([0.5, 0.3, 0.1]).log().half().repeat(length, 1)
    return CapturedSample(
        sample_id=name,
        input_ids=ids,
        loss_mask=torch.arange(length) >= prompt,
        tap_hidden=torch.randn(length, len(TAPS) * HIDDEN).bfloat16(),
        teacher_ids=following[:, None] + torch.arange(TOP_K, dtype=torch.int32),
        teacher_logprobs=logprobs,
        teacher_log_normaliser=torch.randn(length),
    )


def make_group(shard: int, rows: int = 3) -> list[CapturedSample]:
    """The samples of one shard, of growing length."""
    return [make_sample(f"s{shard}-{row}", length=4 + row) for row in range(rows)]


def make_cache(root: Path, shards: int = 2, manifest: CaptureManifest = MANIFEST) -> list[CapturedSample]:
    """A cache of ``shards`` shards; its samples in order."""
    writer = CaptureWriter(root, manifest)
    samples = []
    for shard in range(shards):
        group = make_group(shard)
        writer.write_shard(shard, group)
        samples += group
    return samples


def equal(one: CapturedSample, other: CapturedSample) -> bool:
    """Same id, values and dtypes, bit for bit."""
    fields = [field.name for field in dataclasses.fields(one) if field.name != "sample_id"]
    same = [torch.equal(getattr(one, name), getattr(other, name)) for name in fields]
    types = [getattr(one, name).dtype == getattr(other, name).dtype for name in fields]
    return one.sample_id == other.sample_id and all(same) and all(types)


def flip_bit(path: Path, place: int | None = None) -> None:
    """Change one bit of a file, in a shard by default one of the tap states."""
    if place is None:
        header = safetensors_header(path)
        place = 8 + len(header) + json.loads(header)["tap_hidden"]["data_offsets"][0]
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def write_conversations(root: Path, shard: int, samples: list[CapturedSample], source: str = "toy") -> None:
    """The conversation shard that ``samples`` were captured from, under ``root``/conversations."""
    store = ConversationStore(root)
    store.open({"target": "toy"})
    rows = []
    for sample in samples:
        prompt = int((~sample.loss_mask).sum())
        ids = sample.input_ids.tolist()
        row = dict.fromkeys(("completion_text", "dropped", "license", "revision", "target_hash"), "")
        row |= {"row_id": sample.sample_id, "prompt_id": sample.sample_id, "messages": "[]", "source": source}
        row |= {"prompt_ids": ids[:prompt], "completion_ids": ids[prompt:], "finish_reason": "stop", "target": "toy"}
        row |= dict.fromkeys(("repeat", "turn", "seed", "top_k"), 0) | {"max_tokens": 8, "stop_ids": [1], "tools": ""}
        row |= dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), 1.0)
        row |= dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0) | {"enable_thinking": None}
        rows.append(row)
    store.write(shard, rows)

"""The runner on a GPU: static caches, compiled forwards, CUDA graphs. Output as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash2_train.runner import DecodeSettings, generate_batch, plain_decode
from tests.architectures import BUILDERS, SMALL
from tests.drafters import random_drafter

PROMPTS = ([3, 14, 15, 92, 65, 35], [(7 * i) % 90 for i in range(23)], [46])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "options", [{}, {"static_cache": True}, {"static_cache": True, "compile_target": True}], ids=str
)
def test_a_gpu_decodes_every_row_as_plain_decoding_does(name: str, options: dict[str, bool]) -> None:
    torch.manual_seed(5)
    target = BUILDERS[name](SMALL).eval().cuda()
    shape: dict[str, Any] = {"vocab_size": 96, "mask_token_id": 95, "num_target_layers": 5}
    drafter = random_drafter(**shape).eval().cuda()
    chosen = DecodeSettings(max_new_tokens=20, num_drafted=3, stop_ids=frozenset(), **options)
    plain = DecodeSettings(max_new_tokens=20, num_drafted=3, stop_ids=frozenset())
    results = generate_batch(target, drafter, PROMPTS, chosen)
    assert [one.token_ids for one in results] == [plain_decode(target, list(ids), plain).token_ids for ids in PROMPTS]

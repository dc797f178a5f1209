"""How each server is started with an exported drafter, and what it makes of the folder.

Flags and behaviour: vllm 0.32.0 (``qwen3_dflash2.py``, ``config/speculative.py``), sgl-project/sglang PRs 35371 and
34524, ggml-org/llama.cpp PRs 22105 and 27342.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

THIS_FOLDER = "THIS_FOLDER"


def serving_commands(target: str, drafter: str, block_size: int) -> dict[str, str]:
    """Server -> its launch command with the right number: K for vLLM and llama.cpp, W for SGLang.

    Args:
        target: Hub id or folder of the target.
        drafter: Hub id or folder of the exported drafter.
        block_size: W, the anchor included.
    """
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    return {
        "vLLM": f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {drafter} --speculative-num-draft-tokens {block_size}"
        ),
        "llama.cpp": (
            "llama-server -m target.gguf --spec-type draft-dflash --spec-draft-model drafter.gguf "
            f"--spec-draft-n-max {block_size - 1}"
        ),
    }


def server_notes(
    published: Mapping[str, Any], *, mask_folded: bool = False, targets_mask: bool = False
) -> dict[str, str]:
    """Server -> what it makes of this drafter; acceptance is where the differences show.

    Args:
        published: content of ``config.json``.
        mask_folded: the folder has an embedding of its own with the mask vector in its row.
        targets_mask: mask slots take the target's own row, with ``mask_embedding.pt`` or without it.
    """
    sliding = "sliding_attention" in published["layer_types"]
    causal = " Builds before PR 34524 take the sliding layers as causal: use a later one." if sliding else ""
    window = " Convert with the target's folder at hand; `sliding_window` must show up in the metadata."
    loaded = (
        "Reads `mask_embedding.pt` and logs `Loaded DFlash mask embedding` at start; without that line the drafts are "
        "worse. "
    )
    ignored = (
        "Does not read `mask_embedding.pt`: it embeds the target's own row of the mask token, so expect fewer accepted "
        "tokens."
    )
    table = (
        "; the mask vector is in the embedding of this folder, which the converter must keep."
        if mask_folded
        else "; the stock converter leaves `mask_embedding.pt` out, so expect fewer accepted tokens; `dflash2-export` "
        "with `export.format=gguf` writes files that carry it."
    )
    if targets_mask:
        loaded, ignored, table = "", "Embeds the target's own row of the mask token, as it is meant here.", "."
    return {
        "vLLM": f"Needs its model runner V2 and Triton. {loaded}Positions beyond `max_position_embeddings` are clamped "
        "silently.",
        "SGLang": f"{ignored}{causal}",
        "llama.cpp": f"Needs this folder as GGUF{table}{window if sliding else ''}",
    }


def serving_lines(
    published: Mapping[str, Any],
    target: str,
    drafter: str,
    *,
    num_proposals: int | None = None,
    mask_folded: bool = False,
    targets_mask: bool = False,
) -> list[str]:
    """The card's section about serving.

    Args:
        published: content of ``config.json``.
        target: Hub id or folder of the target.
        drafter: Hub id, or what stands for the folder.
        num_proposals: drafted tokens a round; None = all that a block has.
        mask_folded: as :func:`server_notes`.
        targets_mask: as :func:`server_notes`.
    """
    trained = published["dflash_config"]["block_size"]
    size = trained if num_proposals is None else num_proposals + 1
    notes = server_notes(published, mask_folded=mask_folded, targets_mask=targets_mask)
    lines = ["## Serving", ""]
    for server, command in serving_commands(target, drafter, size).items():
        lines += [f"{server}:", "", "```sh", command, "```", "", notes[server], ""]
    return [
        *lines,
        f"vLLM and llama.cpp count drafted tokens ({size - 1}), SGLang the whole block ({size}). More than "
        f"{trained - 1} drafted tokens were never trained; fewer works and can be faster under load.",
        "",
    ]

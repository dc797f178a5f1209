"""vLLM's own drafter class on exported folders, piece by piece, in a process of its own.

Usage: python -m tests.integration.run_vllm_class CASES_JSON

A case is a folder with ``target/config.json``, ``drafter/`` and ``inputs.safetensors``; ``outputs.safetensors`` and
``facts.json`` are written beside them. Loading is vLLM's whole, sharing of embedding and head with the target included.
In place of the paged cache stands plain attention over kept keys, with the window and the direction that vLLM read from
the configuration.

Letters: R requests, S context tokens, W slots a block, N query heads, M key heads, D head size.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.integration import triton_on_cpu
from tests.integration.vllm_witness import Witness

if __name__ == "__main__":
    triton_on_cpu.install()

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Blocks of R requests over a context of S tokens each."""

    def __init__(self, served: Any, requests: int) -> None:
        super().__init__()
        self.served, self.requests = [served], requests  # in a list: no submodule of this one
        self.kv_cache = None
        self.impl = SimpleNamespace(do_kv_cache_update=self.keep)

    def keep(self, _layer: Any, keys: Tensor, values: Tensor, _cache: Any, _slots: Any) -> None:
        """Context keys and values [R * S, M, D]."""
        self.keys, self.values = (part.unflatten(0, (self.requests, -1)).clone() for part in (keys, values))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R * W, N * D], [R * W, M * D] twice -> [R * W, N * D]."""
        served = self.served[0]
        queries, keys, values = (
            part.unflatten(-1, (-1, served.head_dim)).unflatten(0, (self.requests, -1))
            for part in (queries, keys, values)
        )
        keys, values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)  # [R, S + W, M, D]
        group = queries.shape[2] // keys.shape[2]
        keys, values = keys.repeat_interleave(group, 2), values.repeat_interleave(group, 2)
        scores = torch.einsum("rwnd,rtnd->rnwt", queries, keys) * served.scaling
        end, width = keys.shape[1], queries.shape[1]
        distance = torch.arange(end - width, end)[:, None] - torch.arange(end)[None]  # query - key
        hidden = torch.zeros(width, end, dtype=torch.bool)
        if served.causal:
            hidden |= distance < 0
        if served.sliding_window is not None:
            hidden |= distance.abs() >= served.sliding_window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("rnwt,rtnd->rwnd", weights, values).flatten(2).flatten(0, 1)


class Target(nn.Module):
    """The two tables that a drafter shares with its target."""

    def __init__(self, embedding: Tensor, head: Tensor) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        super().__init__()
        vocab, hidden = embedding.shape
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(vocab, hidden)
        self.lm_head = ParallelLMHead(vocab, hidden)
        for layer, table in ((self.model.embed_tokens, embedding), (self.lm_head, head)):
            layer.weight.data[:vocab] = table
            layer.quant_method.process_weights_after_loading(layer)


def load(folder: Path, num_proposals: int, inputs: dict[str, Tensor]) -> tuple[Any, Target, Witness]:
    """vLLM's drafter as its speculator would load it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model

    speculative = {"method": "dflash", "model": str(folder / "drafter"), "num_speculative_tokens": num_proposals}
    config = EngineArgs(
        model=str(folder / "target"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        speculative_config=speculative,
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            meeting = f"file://{tempfile.mkdtemp()}/meeting"
            init_distributed_environment(1, 0, meeting, local_rank=0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        target = Target(inputs["embedding"], inputs["head"])
        model = load_dflash_model(target, config)
    return model, target, WITNESS


@torch.inference_mode()
def run(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every piece of one drafting step."""
    taps, ids = inputs["taps"], inputs["ids"]  # [R, S, T*H], [R, W]
    requests, length = taps.shape[:2]
    width = ids.shape[1]
    for layer in model.model.layers:
        layer.self_attn.attn = PlainAttention(layer.self_attn, requests)
    model.model._attn_layers = [layer.self_attn.attn for layer in model.model.layers]
    states = model.combine_hidden_states(taps.flatten(0, 1))
    positions = torch.arange(length).repeat(requests)
    model.precompute_and_store_context_kv(states, positions, torch.zeros(requests * length, dtype=torch.int64))
    slots = torch.arange(length, length + width).repeat(requests)
    hidden = model(ids.flatten(), slots).unflatten(0, (requests, width))
    drafted = hidden[:, 1:]
    candidate_ids, unary = model.compute_candidates(drafted.flatten(0, 1))
    candidate_ids, unary = (part.unflatten(0, (requests, width - 1)) for part in (candidate_ids, unary))
    scores = model.model.candidate_selector(candidate_ids, unary, drafted, ids[:, 0])
    attentions = [layer.self_attn.attn for layer in model.model.layers]
    return {
        "embedded": model.embed_input_ids(ids.flatten()).unflatten(0, (requests, width)),
        "keys": torch.stack([attention.keys for attention in attentions]),  # [L, R, S, M, D]
        "values": torch.stack([attention.values for attention in attentions]),
        "hidden": hidden,
        "candidate_ids": candidate_ids,
        "unary": unary,
        "scores": scores,
    }


WITNESS = Witness()


def main() -> None:
    """All cases, one after the other."""
    import vllm.v1.worker.cpu.shm  # noqa: F401 - as vLLM's CPU worker does: calls to an accelerator become no-ops

    triton_on_cpu.norm_keys_by_layer()
    WITNESS.watch_loading()
    for case in json.loads(sys.argv[1]):
        folder = Path(case["folder"])
        inputs = load_file(folder / "inputs.safetensors")
        model, target, witness = load(folder, case["num_proposals"], inputs)
        facts = witness.to_json() | {
            "embedding_is_targets": model.model.embed_tokens is target.model.embed_tokens,
            "head_is_targets": model.lm_head is target.lm_head,
            "causal": [layer.self_attn.causal for layer in model.model.layers],
            "windows": [layer.self_attn.sliding_window for layer in model.model.layers],
        }
        outputs = run(model, inputs)
        save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, folder / "outputs.safetensors")
        (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()

"""Watching vLLM load and use a drafter: what was set by the checkpoint, and every block that was proposed.

Results are not changed. Before the checkpoint is read, every floating-point parameter is filled with NaN, since vLLM
does not notice a missing tensor and serves whatever the memory held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

MASK_PARAMETER = "model.mask_embedding"


@dataclass(kw_only=True)
class Witness:
    """What was seen. Call :meth:`watch` before the engine starts."""

    tensors: list[str] = field(default_factory=list)  # names that the checkpoint brought
    unset: list[str] = field(default_factory=list)  # parameters that are still NaN after loading
    mask: list[float] = field(default_factory=list)  # the mask vector that is in use
    drafts: list[tuple[str, int, int, list[int]]] = field(default_factory=list)  # request, position, anchor, drafted

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def watch(self) -> None:
        """Wrap loading and proposing."""
        self.watch_loading()
        self._watch_proposals()

    def watch_loading(self) -> None:
        """Poison every parameter before a checkpoint is read and note which are left."""
        import torch
        from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM as Model

        load = Model.load_weights

        def watched(model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
            parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
            for parameter in parameters.values():
                parameter.data.fill_(float("nan"))
            listed = list(weights)
            self.tensors = [name for name, _ in listed]
            result = load(model, iter(listed))
            self.unset = [name for name, p in parameters.items() if bool(torch.isnan(p).any())]
            self.mask = parameters[MASK_PARAMETER].float().tolist()
            return result

        Model.load_weights = watched

    def _watch_proposals(self) -> None:
        from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator as Speculator

        propose = Speculator.propose

        def watched(speculator: Any, batch: Any, *arguments: Any, **settings: Any) -> Any:
            drafted = propose(speculator, batch, *arguments, **settings)
            if not settings.get("dummy_run"):
                width, count = speculator.num_query_per_req, batch.num_reqs
                buffers = speculator.input_buffers
                anchors = buffers.input_ids[: count * width : width].tolist()
                positions = buffers.positions[: count * width : width].tolist()
                for row, request in enumerate(batch.req_ids):
                    self.drafts.append((request, positions[row], anchors[row], drafted[row].tolist()))
            return drafted

        Speculator.propose = watched

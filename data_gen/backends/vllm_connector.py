"""A KV connector that hands the tap states of finished requests from vLLM's cache to the capture stage.

vLLM's ``extract_hidden_states`` method writes the states on entry to chosen layers into a cache of its own, block by
block like keys and values. vLLM calls the two halves of a connector at these moments:

* scheduler: ``request_finished`` when a request ends; answering True keeps its blocks until the worker is done;
* scheduler: ``build_connector_meta`` before the next step; sends the worker the requests to save;
* worker: ``get_finished`` in that step; copies the rows out of the blocks, stores them and frees the request.

States go through one file a request in a scratch folder (``state_files``): worker and engine may be different
processes (tensor parallelism, of which rank 0 writes). The stock example connector needs CUDA streams and pinned
memory; this one copies synchronously and runs on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, UniformTypeKVCacheSpecs

from data_gen.backends.state_files import gather_rows, write_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

SCRATCH_KEY = "scratch_folder"
STATES_FILE = "states_file"  # key under which a finished request's output names its file


@dataclass(frozen=True)
class _Save:
    request_id: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class TapConnectorMetadata(KVConnectorMetadata):
    """Requests whose states the worker is to save in this step."""

    saves: list[_Save] = field(default_factory=list)


def states_file(scratch: Path, request_id: str) -> Path:
    """Where the states of a request appear; vLLM's internal id, which is not the caller's."""
    return scratch / f"{request_id}.safetensors"


def find_group(kv_cache_config: KVCacheConfig) -> int:
    """Number of the cache group that holds the hidden states.

    vLLM puts their layer into the attention layers' group where the blocks fit together (then there is one group, and
    the scheduler sees some layer's spec for all of it), else into a group of its own.
    """
    groups = kv_cache_config.kv_cache_groups
    own = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(own) == 1:
        return own[0]
    if len(groups) == 1:
        return 0
    raise ValueError(f"no single one of {len(groups)} cache groups holds the hidden states; use data.backend=hf")


def find_layer(kv_cache_config: KVCacheConfig, group: int) -> str:
    """Name of the layer, worker side, that holds the hidden states."""
    layers = kv_cache_config.kv_cache_groups[group]
    spec = layers.kv_cache_spec
    own = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(layers.layer_names, spec)
    found = [name for name in layers.layer_names if isinstance(own[name], HiddenStateCacheSpec)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} cache layers hold hidden states, expected 1; use data.backend=hf")
    return found[0]


class TapConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only: never loads anything into vLLM's cache."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._scratch = Path(extra[SCRATCH_KEY])
        self._kv_cache_config = kv_cache_config
        self._group = find_group(kv_cache_config)
        self._saves: list[_Save] = []  # scheduler side
        self._cache: torch.Tensor | None = None  # worker side, [blocks, slots, block_size, H]

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ARG002
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks until the worker has saved the prompt's states."""
        token_ids = list(request.prompt_token_ids or [])
        if not block_ids or not token_ids:
            return False, None
        self._saves.append(_Save(request.request_id, token_ids, list(block_ids)))
        return True, {STATES_FILE: str(states_file(self._scratch, request.request_id))}

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same where vLLM keeps several cache groups: only the states' own group counts."""
        return self.request_finished(request, block_ids[self._group])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:  # noqa: ARG002
        """Hand the finished requests over to the worker."""
        saves, self._saves = self._saves, []
        return TapConnectorMetadata(saves=saves)

    def get_finished_count(self) -> int:
        """One worker, tensor-parallel rank 0, reports a request as saved."""
        return 1

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember the tensor that holds the states."""
        self._cache = kv_caches[find_layer(self._kv_cache_config, self._group)]

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """The states already lie in vLLM's cache; they are copied when the request is finished."""

    def wait_for_save(self) -> None:
        """Saving is synchronous."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Save what the scheduler asked for; the requests saved may be freed."""
        if not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TapConnectorMetadata)
        if not metadata.saves or get_tensor_model_parallel_rank() != 0:
            return None, None
        for save in metadata.saves:
            self._save(save)
        return {save.request_id for save in metadata.saves}, None

    def _save(self, save: _Save) -> None:
        assert self._cache is not None
        rows = gather_rows(self._cache, save.block_ids, len(save.token_ids))  # [S, slots, H]
        write_states(states_file(self._scratch, save.request_id), rows, save.token_ids)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:  # noqa: ARG003
        """Slots of a token lie together."""
        return "LBNHC"

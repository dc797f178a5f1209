"""Start a drafter from another one, as an exact no-op: at step 0 it computes what its source computed.

Sources: a checkpoint of ours or the run folder that holds some (the fp32 masters are taken), and any folder in the
published layout, of DFlash 2 or of DFlash 1, from this tool or another. The configured drafter may be larger:

    conv and selector missing   identity kernels, zero projections, zero successor codebook
    more layers                 appended; a new layer's output projections are zero, so it adds nothing
    more taps                   zero columns in ``fc``
    no mask vector              the target's embedding row of the source's mask token, as every server would use

All equal their source to the last bit but for taps: there one sum has more terms and is rounded in another order.
All that shapes the function of what is taken over must agree; what only steers (block size, candidates, position
limit) may change and is logged.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash2_train.checkpoint import MANIFEST, newest_checkpoint, verified_checkpoint
from dflash2_train.config import ConfigError, absolute
from dflash2_train.engine import MASTERS
from dflash2_train.export.payload import CONFIG
from dflash2_train.export.published import SECOND_KEYS, open_published
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape

logger = logging.getLogger(__name__)
LAYER_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
MAY_GROW = ("num_layers", "layer_types", "target_layer_ids")
MAY_CHANGE = ("block_size", "mask_token_id", "selector_top_k", "max_position_embeddings", "initializer_range")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A drafter to start from."""

    shape: DrafterShape
    tensors: dict[str, Tensor]  # published names; those of conv and selector are missing in a DFlash 1
    mask: Tensor | None  # [H]; None: the target's embedding row of shape.mask_token_id


def warm_drafter(folder: str, shape: DrafterShape, embedding: Tensor) -> Drafter:
    """A drafter of ``shape`` that computes what the one in ``folder`` computes.

    Args:
        folder: checkpoint, run folder or published folder.
        shape: as configured; at least as large as the source's.
        embedding: the target's [V, H], for a source without a mask vector of its own.

    Raises:
        ConfigError: no drafter there, one that cannot be read, or one that ``shape`` cannot continue; the text names
            the tensors and their shapes, or the differing settings.
    """
    try:
        source = read_source(absolute(folder), shape)
        refuse_other_function(source.shape, shape)
    except (ValueError, SafetensorError) as error:
        raise ConfigError(f"train.warm_start={folder}: {error}") from error
    return grown(source, shape, embedding)


def read_source(folder: Path, wanted: DrafterShape) -> Source:
    """Whatever drafter ``folder`` holds; ``wanted`` gives a DFlash 1 the sizes of the parts that it lacks.

    Raises:
        ValueError: nothing there, or something that is no whole drafter.
    """
    if (folder / CONFIG).exists():
        return read_published(folder, wanted)
    if (folder / MANIFEST).exists():
        return read_checkpoint(folder)
    newest = newest_checkpoint(folder)
    if newest is None:
        raise ValueError(
            f"neither a published drafter ({CONFIG}) nor a checkpoint ({MANIFEST}) nor a run folder with checkpoints. "
            "Name one of these."
        )
    return read_checkpoint(newest.folder)


def read_checkpoint(folder: Path) -> Source:
    """The fp32 masters of a checkpoint of ours.

    Raises:
        ValueError: files of it are missing or changed, or it is of an earlier layout.
    """
    if verified_checkpoint(folder) is None:
        raise ValueError(f"{folder}: files are missing or changed (see the log). Take another checkpoint.")
    stored = json.loads((folder / MANIFEST).read_text()).get("shape")
    if stored is None:
        raise ValueError(f"{folder} is of an earlier version. Export it with dflash2-export and start from the export.")
    tuples = {key: tuple(stored[key]) for key in ("target_layer_ids", "layer_types")}
    tensors = load_file(folder / f"{MASTERS}.safetensors")
    mask = tensors.pop("mask_embedding")
    return Source(shape=DrafterShape(**{**stored, **tuples}), tensors=tensors, mask=mask)


def read_published(folder: Path, wanted: DrafterShape) -> Source:
    """A folder in the published layout, in one file or in shards.

    Raises:
        ValueError: as :func:`dflash2_train.export.published.open_published`.
    """
    found = open_published(folder, {key: getattr(wanted, key) for key in SECOND_KEYS})
    if found.tables:  # training uses the target's own
        logger.warning("%s: its own embedding or head is not taken over; training uses the target's", folder)
    tensors = {name: found.read(name) for name in found.names}
    return Source(shape=found.shape, tensors=tensors, mask=found.mask)


def refuse_other_function(source: DrafterShape, wanted: DrafterShape) -> None:
    """Raise ValueError unless ``wanted`` is ``source`` or larger, and otherwise of the same function."""
    old, new = asdict(source), asdict(wanted)
    if not source.has_sliding_layers:
        old["sliding_window"] = new["sliding_window"]  # of new layers only
    differing = [key for key in old if old[key] != new[key]]
    refused = [f"{key}: {old[key]} -> {new[key]}" for key in differing if key not in MAY_GROW + MAY_CHANGE]
    if wanted.layer_types[: source.num_layers] != source.layer_types:
        refused.append(
            f"layer_types: {list(source.layer_types)} -> {list(wanted.layer_types)}, must begin with the source's"
        )
    old_taps, new_taps = list(source.target_layer_ids), list(wanted.target_layer_ids)
    if not set(old_taps) <= set(new_taps):
        refused.append(f"target_layer_ids: {old_taps} -> {new_taps}, must hold the source's")
    if refused:
        listed = "\n  ".join(refused)
        raise ValueError(
            f"its drafter computes something else than the config's (file -> config):\n  {listed}\n"
            "Set drafter.* (and target) to the file's; layers and taps may be added."
        )
    for key in differing:
        logger.info("warm start: %s %s -> %s", key, old[key], new[key])


@torch.no_grad()
def grown(source: Source, shape: DrafterShape, embedding: Tensor) -> Drafter:
    """A drafter of ``shape`` in fp32 with the function of ``source``, which :func:`refuse_other_function` let pass."""
    drafter = Drafter(shape)
    own = drafter.state_dict()  # shares storage with the parameters
    for name, tensor in source.tensors.items():
        if name != "fc.weight":
            own[name].copy_(tensor)
    taps = [shape.target_layer_ids.index(tap) for tap in source.shape.target_layer_ids]
    columns = own["fc.weight"].zero_().unflatten(1, (shape.num_taps, -1))  # [H, T, H]
    columns[:, taps] = source.tensors["fc.weight"].float().unflatten(1, (len(taps), -1))
    for layer in range(source.shape.num_layers, shape.num_layers):
        for output in LAYER_OUTPUTS:
            own[f"layers.{layer}.{output}"].zero_()
    mask = embedding[source.shape.mask_token_id] if source.mask is None else source.mask
    drafter.reset_mask_embedding(mask.float())
    added = len(own) - 1 - len(source.tensors)
    logger.info("warm start: %d tensors taken over, %d added as a no-op", len(source.tensors), added)
    return drafter

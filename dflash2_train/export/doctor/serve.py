"""What one server makes of a drafter: the keys that it reads, the pitfalls that apply, and how it is started.

W block size, the anchor counted; N proposed tokens, W - 1 unless told otherwise.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash2_train.export.doctor.findings import ERROR, LLAMA_CPP, SERVERS, SGLANG, VLLM, Finding
from dflash2_train.export.payload import MASK
from dflash2_train.export.serving import serving_commands
from dflash2_train.export.weight_files import TABLES

if TYPE_CHECKING:
    from dflash2_train.export.doctor.gguf_file import OpenedGguf
    from dflash2_train.export.doctor.opened import OpenedDrafter

CHOICES = {"vllm": VLLM, "sglang": SGLANG, "llama.cpp": LLAMA_CPP}


@dataclass(frozen=True, kw_only=True)
class Read:
    """One thing that a server reads, and what follows from its value."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, kw_only=True)
class ServingView:
    """What a server will do with a drafter."""

    server: str
    command: str
    reads: list[Read]
    pitfalls: list[str]


def proposals_finding(block_size: int | None, proposals: int | None) -> Finding | None:
    """The finding about a number of proposed tokens that the drafter was not trained for, or None."""
    if block_size is None or proposals is None or 1 <= proposals < block_size:
        return None
    return Finding(
        check="proposals",
        severity=ERROR,
        message=f"{proposals} proposed tokens for blocks of {block_size}, the anchor counted",
        rule="at least 1 and at most block_size - 1 tokens are proposed",
        servers=SERVERS,
        next_step=f"Propose {block_size - 1}; servers take more without a word, at offsets that were never trained",
    )


def serving_view(
    drafter: OpenedDrafter,
    server: str,
    findings: list[Finding],
    *,
    name: str,
    target: str | None = None,
    proposals: int | None = None,
) -> ServingView | None:
    """The view of ``server`` (a value of ``CHOICES``).

    Args:
        drafter: the opened folder.
        server: whose view.
        findings: of the examination; those that touch the server are among its pitfalls.
        name: of the drafter, for the command.
        target: of the target, for the command; None is the one that the drafter's record names.
        proposals: N; None is what the drafter's record says, else W - 1.

    Returns:
        None where the configuration has no block size, so that no command fits.
    """
    width = drafter.block_size
    if width is None or width < 2:
        return None
    count = (drafter.num_proposals or width - 1) if proposals is None else proposals
    return ServingView(
        server=server,
        command=serving_commands(target or _recorded_target(drafter) or "TARGET", name, count + 1)[server],
        reads=[*_common(drafter, server), *_READS[server](drafter, count)],
        pitfalls=[*_touching(findings, server), *_PITFALLS[server](drafter, name), *_count_pitfall(width, count)],
    )


def _recorded_target(drafter: OpenedDrafter) -> str | None:
    """The target's name in the drafter's own record."""
    recorded = (drafter.record or {}).get("target")
    name = recorded.get("name") if isinstance(recorded, dict) else None
    return name if isinstance(name, str) else None


def _touching(findings: list[Finding], server: str) -> list[str]:
    """The findings that touch the server, with what to do about each."""
    return [f"{found.message} [{found.check}]. {found.next_step}" for found in findings if server in found.servers]


def _count_pitfall(width: int, count: int) -> Iterator[str]:
    if 0 < count < width - 1:
        yield (
            f"{count} proposals from a drafter of blocks of {width}: a block has {count + 1} slots instead of {width}, "
            "and slots see fewer neighbours than a full block has"
        )


def _attention(drafter: OpenedDrafter, server: str) -> str:
    causal, sliding = drafter.config.get("is_causal"), drafter.has_sliding_layers
    kinds = drafter.layer_types or []
    slides = sum(kind == "sliding_attention" for kind in kinds)
    window = f"{slides} sliding with a window of {drafter.config.get('sliding_window')}, " if slides else ""
    inside = "bidirectional"
    if server != LLAMA_CPP and (causal is True or (causal is None and sliding)):
        inside = "causal" if causal is True else "causal in sliding layers"
    return f"{window}{len(kinds) - slides} full; blocks {inside} inside"


def _common(drafter: OpenedDrafter, server: str) -> Iterator[Read]:
    yield Read(key="architectures", value=str(drafter.config.get("architectures")), effect="chooses the model class")
    taps = drafter.taps or []
    listed = taps if server == LLAMA_CPP else sorted(set(taps))
    yield Read(
        key="target_layer_ids",
        value=str(taps),
        effect=f"captures the input of layers {[tap + 1 for tap in listed]}, that is the output of those listed",
    )
    yield Read(
        key="layer_types, is_causal",
        value=f"is_causal={drafter.config.get('is_causal')}",
        effect=_attention(drafter, server),
    )
    halves = all(drafter.config.get(key, True) is True for key in ("is_neox_style", "rope_is_neox_style"))
    yield Read(
        key="rope_parameters",
        value=str(drafter.config.get("rope_parameters")),
        effect="rotates halves of each head (NeoX layout)" if halves else "the layout is not the same for all readers",
    )
    for key in ("output_multiplier", "final_logit_softcapping"):
        if drafter.nested.get(key) is not None:
            yield Read(key=key, value=str(drafter.nested[key]), effect="shapes the logits before the top candidates")


def _own_tables(drafter: OpenedDrafter) -> str:
    return ", ".join(name for name in TABLES if name in drafter.weights.tensors)


def _vllm_reads(drafter: OpenedDrafter, count: int) -> Iterator[Read]:
    yield Read(
        key="num_speculative_tokens",
        value=str(count),
        effect=f"blocks of {count + 1}; block_size={drafter.block_size} in config.json is never read",
    )
    log = f"logs 'Loaded DFlash mask embedding for mask_token_id {drafter.mask_token_id} from {MASK}'"
    yield Read(
        key=MASK,
        value="there" if drafter.mask else "absent",
        effect=f"{log}: look for it" if drafter.mask else f"embeds the target's row {drafter.mask_token_id}",
    )
    own = _own_tables(drafter)
    yield Read(key="embedding, head", value=own or "the target's", effect="kept where it differs" if own else "shared")
    limit = drafter.top("max_position_embeddings")
    yield Read(
        key="max_position_embeddings", value=str(limit), effect="longer contexts are drafted at clamped positions"
    )


def _vllm_pitfalls(drafter: OpenedDrafter, name: str) -> Iterator[str]:
    lowered = name.lower()
    if "eagle-" in lowered or "eagle3" in lowered or "dflash" not in lowered:
        yield 'the method is guessed from the path: this one would be guessed wrongly, so keep "method": "dflash"'
    slides = [kind == "sliding_attention" for kind in drafter.layer_types or []]
    if any(slides) and not all(slides):
        yield "layers that slide beside full ones need model runner V2"
    yield "needs model runner V2 and Triton; draft_sample_method is greedy unless set to probabilistic"


def _sglang_reads(drafter: OpenedDrafter, count: int) -> Iterator[Read]:
    yield Read(
        key="block_size",
        value=str(drafter.block_size),
        effect=f"default of --speculative-num-draft-tokens, which counts the anchor: {count + 1}, not {count}",
    )
    token = drafter.mask_token_id
    yield Read(key="mask_token_id", value=str(token), effect=f"embeds the target's row {token}")
    layers = drafter.either("num_target_layers")
    yield Read(key="num_target_layers", value=str(layers), effect="range of target_layer_ids")


def _sglang_pitfalls(drafter: OpenedDrafter, name: str) -> Iterator[str]:
    if drafter.mask:
        yield f"{MASK} is not read: every drafted slot starts from the target's row, so expect fewer accepted tokens"
    if _own_tables(drafter):
        yield f"{_own_tables(drafter)}: not used, the target's are"
    if drafter.has_sliding_layers:
        yield "builds before pull request 34524 do not read is_causal and make sliding layers causal"
    yield "builds before pull request 35496 refuse a target whose output head is quantised"


def _llama_reads(drafter: OpenedDrafter, count: int) -> Iterator[Read]:
    yield Read(key="dflash.block_size", value=str(drafter.block_size), effect=f"at most {count} drafted tokens")
    yield Read(
        key="tokenizer.ggml.mask_token_id",
        value=str(drafter.mask_token_id),
        effect="embeds this row, of the GGUF's own token_embd.weight if there is one, else the target's",
    )
    if drafter.has_sliding_layers:
        yield Read(
            key="dflash.attention.sliding_window",
            value=str(drafter.config.get("sliding_window")),
            effect="written if use_sliding_window, sliding_window and layer_types are all there",
        )


def _llama_pitfalls(drafter: OpenedDrafter, name: str) -> Iterator[str]:
    yield "the folder must become a GGUF first, with the target's tokenizer; check that file too"
    if drafter.mask:
        yield (
            f"{MASK} is not read by the stock converter: the GGUF needs a token embedding whose mask row is that "
            "vector, as dflash2-export writes it with export.format=gguf"
        )


_READS: dict[str, Callable[[OpenedDrafter, int], Iterator[Read]]] = {
    VLLM: _vllm_reads,
    SGLANG: _sglang_reads,
    LLAMA_CPP: _llama_reads,
}
_PITFALLS: dict[str, Callable[[OpenedDrafter, str], Iterator[str]]] = {
    VLLM: _vllm_pitfalls,
    SGLANG: _sglang_pitfalls,
    LLAMA_CPP: _llama_pitfalls,
}


def gguf_view(
    gguf: OpenedGguf, findings: list[Finding], *, name: str, proposals: int | None = None
) -> ServingView | None:
    """What llama.cpp makes of a GGUF; arguments as of :func:`serving_view`."""
    width = gguf.number("block_size")
    if width is None or width < 2:
        return None
    count = width - 1 if proposals is None else proposals
    token = gguf.mask_token_id
    own = "token_embd.weight" in gguf.tensors
    command = serving_commands("target.gguf", name, count + 1)[LLAMA_CPP].replace("drafter.gguf", shlex.quote(name))
    return ServingView(
        server=LLAMA_CPP,
        command=command,
        reads=[
            Read(key="dflash.block_size", value=str(width), effect=f"at most {width - 1} drafted tokens"),
            Read(
                key="dflash.target_layers",
                value=str(gguf.target_layers),
                effect="captures the input of these layers, in this order",
            ),
            Read(
                key="tokenizer.ggml.mask_token_id",
                value=str(token),
                effect=f"embeds row {token} of {'token_embd.weight' if own else 'the target'}",
            ),
            Read(
                key="dflash.attention.sliding_window",
                value=str(gguf.number("attention.sliding_window")),
                effect="full attention"
                if gguf.number("attention.sliding_window") is None
                else "layers of the pattern slide",
            ),
        ],
        pitfalls=[
            *_touching(findings, LLAMA_CPP),
            *([] if own else ["no embedding of its own: a mask vector, if the drafter has one, is not in this file"]),
            *_count_pitfall(width, count),
        ],
    )

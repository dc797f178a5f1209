"""Names, shapes, types and values of the tensors. Values are read a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

from dflash2_train.export.doctor.findings import LLAMA_CPP, READERS, REFERENCE, RUNNER, SGLANG, VLLM, WARNING
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS, OpenedDrafter
from dflash2_train.export.payload import PLAIN_DTYPES
from dflash2_train.export.weight_files import TABLES

check = DRAFTER_CHECKS.check
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
NEAR_ZERO = 1e-8  # below it a whole tensor counts as zero
# What a drafter starts as zero, and what reads as "adds nothing" rather than as lost.
MAY_BE_ZERO = ("kernel_projection.weight", "candidate_selector.")
MAPPED = ("d2t", "t2d")
LISTED = 8  # more than so many tensors with one fault make one finding


def _plain(name: str) -> bool:
    """Whether the name is judged by the rule about missing and unknown tensors, and by no other."""
    own = name in TABLES or name.startswith(("model.", "mask_"))
    return not (own or any(part in name for part in MAPPED) or name.removesuffix(".weight") in CODEBOOKS)


def _found(drafter: OpenedDrafter, name: str) -> bool:
    """Whether the tensor is there, be it under a name that only some readers take."""
    tensors = drafter.weights.tensors
    return name in tensors or f"model.{name}" in tensors or (name in CODEBOOKS and f"{name}.weight" in tensors)


def _as_expected(drafter: OpenedDrafter) -> list[str]:
    """Names of the published tensors that are there in a plain type and in their shape, sorted."""
    tensors, expected = drafter.weights.tensors, drafter.expected_tensors or {}
    there = sorted(tensors.keys() & expected.keys())
    return [name for name in there if tensors[name].dtype in PLAIN_DTYPES and tensors[name].shape == expected[name]]


def _brief(names: list[str]) -> str:
    """At most four names, and how many more."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


@check(
    "tensors-missing",
    group="tensors",
    rule="every published tensor is there",
    servers=READERS,
    next_step="Export again: vLLM and SGLang load without it and compute with whatever memory holds",
)
def _missing(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.weights.unreadable:  # said already, once instead of for each tensor
        return
    expected = drafter.expected_tensors or {}
    missing = sorted(name for name in expected if not _found(drafter, name))
    if len(missing) > LISTED:
        yield f"{len(missing)} of {len(expected)} tensors are missing: {_brief(missing)}"
        return
    yield from (f"{name} {list(expected[name])} is missing" for name in missing)


@check(
    "tensors-unknown",
    group="tensors",
    rule="there is no other tensor",
    servers=(VLLM, LLAMA_CPP),
    next_step="Remove it: vLLM and the GGUF converter refuse it, the others ignore it",
)
def _unknown(drafter: OpenedDrafter) -> Iterator[str]:
    expected = drafter.expected_tensors
    if expected is not None:
        unknown = sorted(name for name in drafter.weights.tensors.keys() - expected.keys() if _plain(name))
        if len(unknown) > LISTED:
            yield f"{len(unknown)} tensors: {_brief(unknown)}"
            return
        yield from (f"{name} {list(drafter.weights.tensors[name].shape)}" for name in unknown)


@check(
    "tensor-prefix",
    group="tensors",
    rule="names have no model. in front",
    servers=(VLLM, REFERENCE, RUNNER),
    next_step="Rename the tensors; vLLM refuses them and the reference leaves its own at random",
)
def _prefix(drafter: OpenedDrafter) -> Iterator[str]:
    found = sorted(name for name in drafter.weights.tensors if name.startswith("model."))
    if found:
        yield f"{_brief(found)}"


@check(
    "codebook-name",
    group="tensors",
    rule="codebooks are bare parameters, their names do not end in .weight",
    servers=(VLLM, RUNNER),
    next_step="Rename it; a plain save of the reference class writes it so, and vLLM refuses it",
)
def _codebook_name(drafter: OpenedDrafter) -> Iterator[str]:
    yield from (f"{name}.weight" for name in CODEBOOKS if f"{name}.weight" in drafter.weights.tensors)


@check(
    "mask-tensor",
    group="tensors",
    rule="the mask vector stands in mask_embedding.pt, not among the tensors",
    servers=READERS,
    next_step="Move it to mask_embedding.pt; vLLM reads it from there alone",
)
def _mask_tensor(drafter: OpenedDrafter) -> Iterator[str]:
    for name in sorted(drafter.weights.tensors):
        if name.startswith("mask_"):
            effect = "vLLM stops at it" if "mask_hidden" in name else "vLLM takes it and does not use it"
            yield f"{name}: {effect}"


@check(
    "vocabulary-map",
    group="tensors",
    rule="the drafter speaks the target's whole vocabulary",
    servers=READERS,
    next_step="Remove the map; a drafter of fewer words is another format",
)
def _vocabulary_map(drafter: OpenedDrafter) -> Iterator[str]:
    for name in sorted(drafter.weights.tensors):
        if any(part in name for part in MAPPED):
            yield f"{name} maps the drafter's vocabulary to the target's"


@check(
    "own-tables",
    group="tensors",
    severity=WARNING,
    rule="embedding and head are the target's",
    servers=(SGLANG, REFERENCE, RUNNER),
    next_step="Leave them out unless they were trained: vLLM and llama.cpp use them, the others take the target's",
)
def _own_tables(drafter: OpenedDrafter) -> Iterator[str]:
    meant = drafter.recorded_export.get("tables")  # names without .weight, put in on purpose by this project's export
    for name in TABLES:
        asked_for = isinstance(meant, list) and name.removesuffix(".weight") in meant
        if name in drafter.weights.tensors and not asked_for:
            yield f"{name} is the drafter's own"


@check(
    "tensor-shapes",
    group="tensors",
    rule="shapes are those that config.json gives",
    servers=READERS,
    next_step="Take config.json and weights from one export; base kernels are [2, taps, hidden]",
)
def _shapes(drafter: OpenedDrafter) -> Iterator[str]:
    expected = dict(drafter.expected_tensors or {})
    vocab, hidden = drafter.top("vocab_size"), drafter.top("hidden_size")
    if vocab and hidden:
        expected |= dict.fromkeys(TABLES, (vocab, hidden))
    for name in sorted(expected.keys() & drafter.weights.tensors.keys()):
        shape = drafter.weights.tensors[name].shape
        if shape != expected[name]:
            yield f"{name} is {list(shape)}, expected {list(expected[name])}"


@check(
    "tensor-types",
    group="tensors",
    rule=f"tensors are of one plain type ({', '.join(PLAIN_DTYPES)})",
    servers=READERS,
    next_step="Export again in bfloat16; few readers take a quantised or mixed drafter",
)
def _types(drafter: OpenedDrafter) -> Iterator[str]:
    tensors = {name: stored for name, stored in drafter.weights.tensors.items() if not any(m in name for m in MAPPED)}
    odd = sorted(name for name, stored in tensors.items() if stored.dtype not in PLAIN_DTYPES)
    if odd:
        yield f"{_brief(odd)}: {', '.join(sorted({tensors[name].dtype for name in odd}))}"
    plain = sorted({stored.dtype for stored in tensors.values()} & PLAIN_DTYPES.keys())
    if len(plain) > 1:
        yield f"tensors mix {', '.join(plain)}"


@check(
    "float32",
    group="tensors",
    severity=WARNING,
    rule="weights are bfloat16",
    servers=(VLLM, SGLANG),
    next_step="Export with export.dtype=bfloat16: half the size, and what servers cast to anyway",
)
def _float32(drafter: OpenedDrafter) -> Iterator[str]:
    if {stored.dtype for stored in drafter.weights.tensors.values()} == {"F32"}:
        yield "weights are float32"


@check(
    "stated-type",
    group="tensors",
    severity=WARNING,
    rule="dtype in config.json is that of the weights",
    servers=(VLLM, SGLANG),
    next_step="Write the type of the weights; servers take it as the type to load in",
)
def _stated_type(drafter: OpenedDrafter) -> Iterator[str]:
    stated = drafter.config.get("dtype", drafter.config.get("torch_dtype"))
    found = {PLAIN_DTYPES.get(stored.dtype) for stored in drafter.weights.tensors.values()}
    if stated is not None and len(found) == 1 and None not in found and str(stated) not in found:
        yield f"dtype={stated!r}, weights are {found.pop()}"


@check(
    "tensor-finite",
    group="tensors",
    rule="every value is finite",
    servers=READERS,
    next_step="Export from an earlier checkpoint",
)
def _finite(drafter: OpenedDrafter) -> Iterator[str]:
    weights = drafter.weights
    # in the order of the file, so that its sha256 comes with its values
    for name in sorted({*_as_expected(drafter), *(name for name in TABLES if name in weights.tensors)}):
        if not weights.figures(name).finite:
            yield f"{name} holds values that are not finite"


@check(
    "tensor-zero",
    group="tensors",
    rule="no tensor is zero, or next to it, throughout",
    servers=READERS,
    next_step="Export again, or from another checkpoint: such a tensor was lost or never trained",
)
def _zero(drafter: OpenedDrafter) -> Iterator[str]:
    for name in _as_expected(drafter):
        largest = drafter.weights.figures(name).largest
        if largest < NEAR_ZERO and not any(part in name for part in MAY_BE_ZERO):
            yield f"{name} is zero (largest value {largest:.1e})"


@check(
    "tensor-constant",
    group="tensors",
    rule="no matrix holds one value throughout",
    servers=READERS,
    next_step="Export again, or from another checkpoint: such a tensor was filled, not trained",
)
def _constant(drafter: OpenedDrafter) -> Iterator[str]:
    for name in _as_expected(drafter):
        if len(drafter.weights.tensors[name].shape) < 2 or "base_kernel" in name:
            continue
        figures = drafter.weights.figures(name)
        if figures.finite and figures.low == figures.high and figures.largest >= NEAR_ZERO:
            yield f"{name} is {figures.low:g} throughout"


@check(
    "conv-untrained",
    group="tensors",
    severity=WARNING,
    rule="convolutions do something",
    servers=READERS,
    next_step="Train on: these pass their input through unchanged, as at the start",
)
def _conv_untrained(drafter: OpenedDrafter) -> Iterator[str]:
    idle = [name for name in _as_expected(drafter) if name.endswith("base_kernel") and _is_identity(drafter, name)]
    if idle:
        yield f"{_brief([name.removesuffix('.base_kernel') for name in idle])}: the identity"


def _is_identity(drafter: OpenedDrafter, name: str) -> bool:
    """Base tap 0 is one, the others zero, and nothing depends on the input."""
    projection = name.replace("base_kernel", "kernel_projection.weight")
    weights = drafter.weights
    if projection not in weights.tensors or weights.figures(projection).largest >= NEAR_ZERO:
        return False
    kernel = weights.values(name)  # [2, taps, H]
    return bool((kernel[:, 0] == 1).all()) and not bool(kernel[:, 1:].any())


@check(
    "selector-untrained",
    group="tensors",
    severity=WARNING,
    rule="the selector does something",
    servers=READERS,
    next_step="Train on: with one zero factor it adds nothing to any score",
)
def _selector_untrained(drafter: OpenedDrafter) -> Iterator[str]:
    for name in _as_expected(drafter):
        if name.startswith("candidate_selector.") and drafter.weights.figures(name).largest < NEAR_ZERO:
            yield f"{name} is zero"

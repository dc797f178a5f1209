"""The table of faults that the doctor must find. ``python -m tests.contract.fault_table`` plants each and prints it.

Every silent failure and every loader row of the serving contract is among them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch

from dflash2_train.export.doctor import Finding
from dflash2_train.export.doctor.examine import examine
from dflash2_train.export.doctor.serve import proposals_finding
from tests.contract.drafter_families import export_family
from tests.contract.faults import (
    MASK_ID,
    Fault,
    TinyTarget,
    add,
    both,
    config,
    cut,
    file,
    mask,
    measured,
    put,
    record,
    rename,
    reseal,
    shard,
    sharded,
    tensors,
)
from tests.contract.gguf_faults import GGUF_FAULTS, SWA, GgufFault, found_in_gguf
from tests.families import EXPERIMENTS, HIDDEN, VOCAB

KERNEL = "layers.0.attention_conv.base_kernel"
PROJECTION = "layers.0.attention_conv.kernel_projection.weight"
SUCCESSOR = "candidate_selector.successor_codebook"
SILENT, LOADER = "silent failure", "loader row"
RECORDS = ("run.json", "PROVENANCE.txt")


class Code:
    """What a pickle can carry beside data."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path, ("touched",)


def _identity(stored: dict[str, torch.Tensor]) -> None:
    """One convolution as at the start of training."""
    stored[KERNEL].zero_()
    stored[KERNEL][:, 0] = 1
    stored[PROJECTION].zero_()


def _beside_shards(folder: Path) -> None:
    """The one file that the shards were made of stays."""
    whole = (folder / "model.safetensors").read_bytes()
    shard(folder)
    (folder / "model.safetensors").write_bytes(whole)


SILENT_FAULTS = (
    Fault(what="is_causal left out", check="is-causal", plant=config(is_causal=...), contract=SILENT),
    Fault(
        what="taps out of order",
        check="taps-order",
        plant=config(dflash_config__target_layer_ids=[14, 5, 24, 33, 42]),
        contract=SILENT,
    ),
    Fault(
        what="a tap twice",
        check="taps-unique",
        plant=config(dflash_config__target_layer_ids=[5, 14, 14, 33, 42]),
        contract=SILENT,
    ),
    Fault(
        what="a tensor left out",
        check="tensors-missing",
        plant=tensors(lambda stored: stored.pop("layers.3.mlp.up_proj.weight")),
        contract=f"{SILENT}, {LOADER}",
    ),
    Fault(
        what="mask_embedding.pt not copied",
        check="mask-missing",
        plant=mask(None),
        contract=SILENT,
        keep_record=True,
        also=("record-file-missing",),
    ),
    Fault(what="a foreign drafter without a mask vector", check="mask-absent", plant=mask(None), contract=SILENT),
    Fault(
        what="the mask vector under another key",
        check="mask-payload",
        plant=mask({"weight": torch.randn(HIDDEN)}),
        contract=SILENT,
    ),
    Fault(
        what="use_sliding_window left out",
        check="use-sliding-window",
        plant=config(use_sliding_window=...),
        contract=SILENT,
    ),
    Fault(
        what="as many proposals as the block is long", check="proposals", plant=config(), proposals=8, contract=SILENT
    ),
    Fault(what="no proposals", check="proposals", plant=config(), proposals=0, contract=SILENT),
    Fault(
        what="neighbours rotated (vLLM's key)", check="rope-layout", plant=config(is_neox_style=False), contract=SILENT
    ),
    Fault(
        what="neighbours rotated (SGLang's key)",
        check="rope-layout-sglang",
        plant=config(rope_is_neox_style=False),
        contract=SILENT,
    ),
    Fault(
        what="no rotary base",
        check="rope-theta",
        plant=config(rope_parameters=..., rope_theta=...),
        contract=SILENT,
    ),
    Fault(what="two rotary bases", check="rope-theta", plant=config(rope_theta=5e5), contract=SILENT),
    Fault(
        what="embeddings scaled",
        check="embedding-scale",
        plant=config(dflash_config__input_embedding_scale=2.0),
        contract=SILENT,
    ),
    Fault(
        what="an embedding of its own",
        check="own-tables",
        plant=add("embed_tokens.weight", VOCAB, HIDDEN),
        contract=f"{SILENT}, {LOADER}",
    ),
    Fault(
        what="a head of its own",
        check="own-tables",
        plant=add("lm_head.weight", VOCAB, HIDDEN),
        contract=f"{SILENT}, {LOADER}",
    ),
    Fault(
        what="a selector scale not folded",
        check="selector-scale",
        plant=config(dflash_config__selector_scale=0.5),
        contract=SILENT,
    ),
    Fault(
        what="taps with the 1 added, a list known from elsewhere",
        check="taps-shifted",
        plant=config(dflash_config__target_layer_ids=[6, 15, 25, 34, 43]),
        contract=SILENT,
    ),
    Fault(
        what="taps with the 1 added, beside the record of training",
        check="record-config",
        plant=both(config(dflash_config__target_layer_ids=[2, 10, 18, 26, 34]), reseal),
        contract=SILENT,
        family="qwen3_8b",
        keep_record=True,
        also=("provenance-hash",),
    ),
    Fault(
        what="taps with the 1 added, beyond the last layer",
        check="taps-range",
        plant=config(dflash_config__target_layer_ids=[6, 15, 25, 34, 45]),
        contract=SILENT,
    ),
)

TENSOR_FAULTS = (
    Fault(what="an unknown tensor", check="tensors-unknown", plant=add("layers.0.gate.weight", 4, 4), contract=LOADER),
    Fault(
        what="model. in front of every name",
        check="tensor-prefix",
        plant=tensors(lambda stored: [stored.update({f"model.{name}": stored.pop(name)}) for name in list(stored)]),
        contract=LOADER,
    ),
    Fault(
        what="a codebook named as an embedding",
        check="codebook-name",
        plant=rename(SUCCESSOR, f"{SUCCESSOR}.weight"),
        contract=LOADER,
    ),
    Fault(
        what="a base kernel with taps last",
        check="tensor-shapes",
        plant=put(KERNEL, lambda kernel: kernel.transpose(1, 2)),
        contract=LOADER,
    ),
    Fault(
        what="a flat base kernel",
        check="tensor-shapes",
        plant=put(KERNEL, lambda kernel: kernel.flatten(0, 1)),
        contract=LOADER,
    ),
    Fault(
        what="fc for one tap fewer",
        check="tensor-shapes",
        plant=put("fc.weight", lambda w: w[:, :-HIDDEN]),
        contract=LOADER,
    ),
    Fault(
        what="weights in float32",
        check="float32",
        plant=tensors(lambda stored: stored.update({name: tensor.float() for name, tensor in stored.items()})),
        contract=LOADER,
        also=("stated-type",),
    ),
    Fault(
        what="one tensor in float32",
        check="tensor-types",
        plant=put("norm.weight", lambda weight: weight.float()),
        contract=LOADER,
    ),
    Fault(
        what="a quantised tensor",
        check="tensor-types",
        plant=put("layers.1.mlp.up_proj.weight", lambda weight: weight.to(torch.int8)),
    ),
    Fault(what="another dtype stated", check="stated-type", plant=config(dtype="float16")),
    Fault(what="a mask_hidden tensor", check="mask-tensor", plant=add("mask_hidden", HIDDEN), contract=LOADER),
    Fault(
        what="the mask vector among the tensors",
        check="mask-tensor",
        plant=add("mask_embedding", HIDDEN),
        contract=LOADER,
    ),
    Fault(what="a map of vocabularies", check="vocabulary-map", plant=add("d2t", VOCAB), contract=LOADER),
    Fault(what="its reverse", check="vocabulary-map", plant=add("t2d", VOCAB), contract=LOADER),
    Fault(
        what="one value that is no number",
        check="tensor-finite",
        plant=put("fc.weight", lambda weight: weight.index_fill(1, torch.tensor([3]), float("nan"))),
    ),
    Fault(
        what="an infinite value in a head of its own",
        check="tensor-finite",
        plant=tensors(
            lambda stored: stored.update({"lm_head.weight": torch.full((VOCAB, HIDDEN), float("inf")).bfloat16()})
        ),
        also=("own-tables",),
    ),
    Fault(what="a norm of zeros", check="tensor-zero", plant=put("layers.2.self_attn.q_norm.weight", torch.zeros_like)),
    Fault(
        what="a projection next to zero",
        check="tensor-zero",
        plant=put("layers.4.mlp.down_proj.weight", lambda weight: weight * 1e-12),
    ),
    Fault(
        what="a matrix of ones", check="tensor-constant", plant=put("layers.0.self_attn.v_proj.weight", torch.ones_like)
    ),
    Fault(what="a convolution that was never trained", check="conv-untrained", plant=tensors(_identity)),
    Fault(what="a selector that was never trained", check="selector-untrained", plant=put(SUCCESSOR, torch.zeros_like)),
)

FILE_FAULTS = (
    Fault(what="an empty weights file", check="weights-file", plant=file("model.safetensors", b"")),
    Fault(what="a cut weights file", check="weights-file", plant=cut("model.safetensors", -100)),
    Fault(what="no weights file", check="weights-file", plant=file("model.safetensors", None)),
    Fault(
        what="a shard that was not copied",
        check="weights-file",
        plant=both(shard, file("model-00002-of-00002.safetensors", None)),
    ),
    Fault(
        what="an index of another export",
        check="weights-index",
        plant=sharded(lambda listed, _: listed.update({"fc.weight": "model-00001-of-00002.safetensors"})),
    ),
    Fault(
        what="a tensor that the index does not list",
        check="weights-index",
        plant=sharded(lambda listed, _: listed.pop("fc.weight")),
    ),
    Fault(
        what="an index that names a file outside of the folder",
        check="weights-index",
        plant=sharded(lambda listed, _: listed.update({"fc.weight": "../other.safetensors"})),
        also=("weights-file", "second-weights"),
    ),
    Fault(
        what="one file beside the shards",
        check="second-weights",
        plant=_beside_shards,
    ),
    Fault(what="old weights beside the new", check="second-weights", plant=file("pytorch_model.bin", b"old")),
    Fault(what="a program in the folder", check="code-files", plant=file("modeling.py", b"pass")),
    Fault(what="no config.json", check="config-json", plant=file("config.json", None)),
    Fault(what="a cut config.json", check="config-json", plant=cut("config.json", 40)),
    Fault(
        what="the folder of a language model",
        check="not-a-drafter",
        plant=config(architectures=["LlamaForCausalLM"], dflash_config=...),
    ),
    Fault(
        what="a checkpoint of the speculators package",
        check="speculators-format",
        plant=config(speculators_model_type="dflash2", dflash_config=...),
    ),
)

KEY_FAULTS = (
    Fault(what="the first version's class", check="architecture", plant=config(architectures=["DFlashDraftModel"])),
    Fault(what="an unknown model type", check="model-type", plant=config(model_type="dflash")),
    Fault(what="dflash_config null", check="dflash-config", plant=config(dflash_config=None)),
    Fault(what="no head size", check="required-keys", plant=config(head_dim=...)),
    Fault(
        what="a block size in quotes",
        check="required-keys",
        plant=config(dflash_config__block_size="8", block_size=...),
    ),
    Fault(what="no layer count of the target", check="required-keys", plant=config(num_target_layers=...)),
    Fault(what="no mask token", check="required-keys", plant=config(dflash_config__mask_token_id=...)),
    Fault(
        what="conv keys at the top",
        check="nesting",
        plant=config(dflash_config__conv_group_size=..., conv_group_size=8),
    ),
    Fault(what="an output scale at the top", check="nesting", plant=config(output_multiplier=0.2)),
    Fault(
        what="is_causal inside dflash_config",
        check="nesting",
        plant=config(is_causal=..., dflash_config__is_causal=False),
        also=("is-causal",),
    ),
    Fault(what="two block sizes", check="two-values", plant=config(block_size=16)),
    Fault(what="a block size that old converters miss", check="block-size-top", plant=config(block_size=...)),
    Fault(
        what="the mask token at the top alone",
        check="not-nested",
        plant=config(mask_token_id=MASK_ID, dflash_config__mask_token_id=...),
    ),
    Fault(what="a misspelt key", check="unknown-key", plant=config(use_slidding_window=True)),
    Fault(what="a program asked for", check="remote-code", plant=config(auto_map={"AutoModel": "modeling.Model"})),
    Fault(what="a tied embedding", check="tie-word-embeddings", plant=config(tie_word_embeddings=True)),
    Fault(
        what="taps under another server's key",
        check="aux-layer-ids",
        plant=config(eagle_aux_hidden_state_layer_ids=[5, 14, 24, 33, 42]),
    ),
    Fault(what="taps as layer_ids", check="layer-ids", plant=config(dflash_config__layer_ids=[5, 14, 24, 33, 42])),
    Fault(what="sliding forced on", check="use-swa", plant=config(dflash_config__use_swa=True)),
    Fault(what="a second window", check="swa-window", plant=config(dflash_config__swa_window_size=64)),
    Fault(what="attention sinks", check="attention-sinks", plant=config(dflash_config__attention_sink_bias=True)),
    Fault(what="scaled values", check="value-scale", plant=config(dflash_config__attention_value_scale=0.7)),
    Fault(what="causal inside dflash_config", check="nested-causal", plant=config(dflash_config__causal=True)),
    Fault(
        what="another kind of drafter", check="sample-from-anchor", plant=config(dflash_config__sample_from_anchor=True)
    ),
    Fault(what="taps switched off", check="no-taps", plant=config(dflash_config__use_aux_hidden_state=False)),
    Fault(what="an own head announced", check="own-head-flag", plant=config(has_own_lm_head=True)),
    Fault(what="an embedding denied", check="own-embedding-flag", plant=config(has_embed_tokens=False)),
    Fault(what="attention biases", check="attention-bias", plant=config(attention_bias=True)),
    Fault(what="another activation", check="activation", plant=config(hidden_act="gelu")),
    Fault(what="a quantised drafter", check="quantised", plant=config(quantization_config={"quant_method": "fp8"})),
)

SHAPE_FAULTS = (
    Fault(what="query heads that do not share", check="head-sizes", plant=config(num_key_value_heads=3)),
    Fault(what="conv groups that do not fit", check="conv-group", plant=config(dflash_config__conv_group_size=7)),
    Fault(what="one candidate", check="selector-width", plant=config(dflash_config__selector_top_k=1)),
    Fault(
        what="more candidates than llama.cpp takes",
        check="selector-lattice",
        plant=config(dflash_config__selector_top_k=8),
    ),
    Fault(what="no epsilon", check="norm-eps", plant=config(rms_norm_eps=...)),
    Fault(what="an output scale of 0", check="output-scale", plant=config(dflash_config__output_multiplier=0)),
    Fault(what="a negative soft cap", check="output-scale", plant=config(dflash_config__final_logit_softcapping=-20.0)),
    Fault(
        what="another hidden size of the target", check="same-size-keys", plant=config(target_hidden_size=2 * HIDDEN)
    ),
    Fault(what="a smaller draft vocabulary", check="same-size-keys", plant=config(draft_vocab_size=32)),
    Fault(
        what="a block of the anchor alone",
        check="block-size",
        plant=config(block_size=1, dflash_config__block_size=1),
    ),
    Fault(what="causal blocks", check="is-causal", plant=config(is_causal=True)),
    Fault(
        what="is_causal left out of a full-attention drafter",
        check="is-causal-absent",
        plant=config(is_causal=...),
        family="glm53_flash",
    ),
    Fault(what="a layer type too few", check="layer-types", plant=config(layer_types=["sliding_attention"] * 4)),
    Fault(
        what="an unknown layer type",
        check="layer-types",
        plant=config(layer_types=["sliding_attention"] * 4 + ["chunked_attention"]),
    ),
    Fault(what="no layer types", check="layer-types", plant=config(layer_types=...), family="glm53_flash"),
    Fault(what="sliding layers without a window", check="sliding-window", plant=config(sliding_window=...)),
    Fault(what="a window below the block", check="sliding-window", plant=config(sliding_window=7)),
    Fault(
        what="a window that no layer uses",
        check="window-unused",
        plant=config(use_sliding_window=True, sliding_window=16),
        family="glm53_flash",
    ),
    Fault(
        what="scaled positions",
        check="rope-scaling",
        plant=config(rope_parameters={"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}),
    ),
    Fault(what="no taps", check="taps", plant=config(dflash_config__target_layer_ids=[])),
    Fault(what="a mask token beyond the table", check="mask-id", plant=config(dflash_config__mask_token_id=VOCAB)),
    Fault(what="the mask token ends text", check="mask-id-special", plant=config(eos_token_id=[1, MASK_ID])),
    Fault(what="the mask token pads", check="mask-id-special", plant=config(pad_token_id=MASK_ID)),
)

MASK_FAULTS = (
    Fault(what="a mask file that runs code", check="mask-code", plant=mask(Code())),
    Fault(what="a mask file of no known form", check="mask-payload", plant=mask([0.1] * HIDDEN)),
    Fault(what="a damaged mask file", check="mask-payload", plant=file("mask_embedding.pt", b"damaged")),
    Fault(what="an empty mask file", check="mask-payload", plant=file("mask_embedding.pt", b"")),
    Fault(what="a mask vector of another size", check="mask-payload", plant=mask(torch.randn(HIDDEN + 1))),
    Fault(what="a mask vector of whole numbers", check="mask-payload", plant=mask(torch.arange(HIDDEN))),
    Fault(what="a mask vector without its id", check="mask-form", plant=mask({"embedding": torch.randn(HIDDEN)})),
    Fault(what="a mask vector as a column", check="mask-form", plant=mask(torch.randn(HIDDEN, 1))),
    Fault(
        what="the mask vector of another drafter",
        check="mask-owner",
        plant=mask({"embedding": torch.randn(HIDDEN), "mask_token_id": 3}),
    ),
    Fault(what="a mask vector that is no number", check="mask-finite", plant=mask(torch.full((HIDDEN,), float("nan")))),
    Fault(what="a mask vector of zeros", check="mask-untrained", plant=mask(torch.zeros(HIDDEN))),
    Fault(what="a mask vector of one value", check="mask-untrained", plant=mask(torch.full((HIDDEN,), 0.3))),
)

TARGET_FAULTS = (
    Fault(what="another target", check="target-sizes", plant=config(), target=TinyTarget(sizes={"num_layers": 48})),
    Fault(
        what="another vocabulary",
        check="target-sizes",
        plant=config(),
        target=TinyTarget(sizes={"vocab_size": 2 * VOCAB}),
    ),
    Fault(
        what="a target with fewer layers than taps",
        check="target-taps",
        plant=config(),
        target=TinyTarget(sizes={"num_layers": 40}),
        also=("target-sizes",),
    ),
    Fault(
        what="positions that end before the target's",
        check="positions",
        plant=config(),
        target=TinyTarget(sizes={"max_position_embeddings": 512}),
    ),
    Fault(
        what="a mask token that ends replies", check="mask-id-ends", plant=config(), target=TinyTarget(eos=(1, MASK_ID))
    ),
    Fault(
        what="a mask token that text is made of",
        check="mask-id-text",
        plant=config(),
        target=TinyTarget(ordinary=VOCAB, special={}),
    ),
    Fault(
        what="a mask token that the chat template writes",
        check="mask-id-text",
        plant=config(),
        target=TinyTarget(template="<|reserved|>{{ text }}"),
    ),
    Fault(
        what="another mask token in the tokenizer",
        check="mask-token-clash",
        plant=config(),
        target=TinyTarget(tokenizer_config={"mask_token": "<|end|>"}),
    ),
    Fault(
        what="a mask vector far longer than any row",
        check="mask-norm",
        plant=mask(torch.randn(HIDDEN) * 100),
        target=TinyTarget(),
    ),
    Fault(
        what="no mask vector, and a row that was never trained",
        check="mask-row",
        plant=mask(None),
        target=TinyTarget(edit_rows=lambda table: table[MASK_ID].mul_(1e-5)),
        also=("mask-absent",),
    ),
    Fault(
        what="the target's own embedding shipped again",
        check="own-tables-same",
        plant=config(),
        target=TinyTarget(copy_own=True),
        also=("own-tables",),
    ),
)

RECORD_FAULTS = (
    Fault(
        what="a file edited after export",
        check="record-hash",
        plant=file("README.md", b"edited"),
        keep_record=True,
    ),
    Fault(
        what="weights of another export",
        check="record-hash",
        plant=put("norm.weight", lambda weight: weight + 1),
        keep_record=True,
        also=("provenance-hash",),
    ),
    Fault(
        what="a paper that was not copied",
        check="record-file-missing",
        plant=file("PROVENANCE.txt", None),
        keep_record=True,
    ),
    Fault(
        what="a file that no export wrote",
        check="record-file-unlisted",
        plant=file("notes.txt", b"mine"),
        keep_record=True,
    ),
    Fault(
        what="a record edited after export",
        check="record-self",
        plant=record(time_utc="2020-01-01"),
        keep_record=True,
    ),
    Fault(
        what="drafts that changed the target's output when measured",
        check="evaluation-lossless",
        plant=measured(equal=False),
        keep_record=True,
    ),
    Fault(
        what="a measured count edited, and every hash made to fit",
        check="evaluation-numbers",
        plant=measured(committed=999),
        keep_record=True,
    ),
    Fault(what="a damaged record", check="record-damaged", plant=file("run.json", b"{"), keep_record=True),
    Fault(what="no record", check="record-missing", plant=file("run.json", None), keep_record=True),
)

FAULTS: tuple[Fault, ...] = (
    *SILENT_FAULTS,
    *TENSOR_FAULTS,
    *FILE_FAULTS,
    *KEY_FAULTS,
    *SHAPE_FAULTS,
    *MASK_FAULTS,
    *TARGET_FAULTS,
    *RECORD_FAULTS,
)


def found_in(clean: Path, work: Path, fault: Fault) -> tuple[list[Finding], Path]:
    """Plant ``fault`` in a copy of ``clean`` under ``work``; the findings that the clean copy does not have."""
    folder = work / "drafter"
    ignored = None if fault.keep_record else shutil.ignore_patterns(*RECORDS)
    shutil.copytree(clean, folder, ignore=ignored)
    before = {finding.check for finding in examine(folder).findings}
    fault.plant(folder)
    target = fault.target(folder) if fault.target else None
    examination = examine(folder, target=target)
    if examination.subject is not None:
        examination = examination.adding(proposals_finding(examination.subject.block_size, fault.proposals))
    return [finding for finding in examination.findings if finding.check not in before], folder


def _row(number: int, fault: Fault | GgufFault, what: str, findings: list[Finding], folder: Path) -> bool:
    """Print one line of the table; whether the fault was found by its check."""
    finding = next((finding for finding in findings if finding.check == fault.check), None)
    message = "**missed**" if finding is None else finding.message.replace(f"{folder}/", "").replace("|", "\\|")
    told = ("", "") if finding is None else (finding.severity, ", ".join(finding.servers))
    sys.stdout.write(f"| {' | '.join((str(number), what, f'`{fault.check}`', *told, message))} |\n")
    return finding is not None


def main() -> int:
    """Plant every fault and print the table as markdown; 1 if one was missed."""
    sys.stdout.write("| | fault | check | severity | touches | what the doctor says |\n|---|---|---|---|---|---|\n")
    found = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        clean = {experiment: export_family(experiment, root / experiment) for experiment in EXPERIMENTS}
        for number, fault in enumerate(FAULTS, 1):
            findings, folder = found_in(clean[fault.family], root / f"fault{number}", fault)
            what = f"{fault.what} ({fault.contract})" if fault.contract else fault.what
            found += _row(number, fault, what, findings, folder)
        for number, planted in enumerate(GGUF_FAULTS, len(FAULTS) + 1):
            findings = found_in_gguf(clean[SWA], root / f"fault{number}.gguf", planted)
            found += _row(number, planted, f"GGUF: {planted.what}", findings, root)
    total = len(FAULTS) + len(GGUF_FAULTS)
    sys.stdout.write(f"\n{total} faults, {total - found} missed\n")
    return int(found < total)


if __name__ == "__main__":
    sys.exit(main())

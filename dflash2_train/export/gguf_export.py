"""``export.format=gguf``: from a checkpoint or a published folder to GGUF files, their record and their table.

    NAME-TYPE.gguf    one a type, written and checked by :mod:`dflash2_train.export.gguf_write`
    gguf.json         where they come from: run record, sha256 of source and files, comparison
    README.md         the same for readers: sizes, errors, how to serve

A file that the record shows to be the one asked for is not written again.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from data_gen.cache.format import MANIFEST_FILE, CaptureManifest
from dflash2_train.config import RunConfig, absolute, to_plain
from dflash2_train.export.doctor import check_config
from dflash2_train.export.gguf_compare import captured_rows, compare, random_rows
from dflash2_train.export.gguf_layout import ARCHITECTURE, OWN_PREFIX, STORAGE_TYPES, Entry, drafter_entries
from dflash2_train.export.gguf_read import GgufFile, read_gguf_drafter
from dflash2_train.export.gguf_source import DrafterFolder, PlannedTensor
from dflash2_train.export.gguf_text import readme_text, table_lines
from dflash2_train.export.gguf_tokenizer import add_tokenizer
from dflash2_train.export.gguf_types import GgufError, gguf_package
from dflash2_train.export.gguf_write import file_bits_per_value, write_gguf
from dflash2_train.export.payload import CONFIG, GGUF_RECORD, MASK, TOOL, read_json
from dflash2_train.export.record import read_record
from dflash2_train.export.run import export_checkpoint
from dflash2_train.provenance import (
    atomic_write_json,
    atomic_write_text,
    hash_chat_template,
    hash_model_folder,
    hash_tokenizer_files,
    public_value,
    run_record,
    sha256_file,
)
from dflash2_train.target import FrozenHead, TargetInfo, metadata_folder, open_target_config

logger = logging.getLogger(__name__)
SIZES = "target-sizes"  # the doctor's check
README = "README.md"
SOURCE_KEY = f"{OWN_PREFIX}.source_sha256"  # of the weights that a file was made from; marks it as ours


def export_gguf(config: RunConfig) -> Path:
    """Write the GGUF files that ``config.export.gguf`` asks for.

    Returns:
        The folder that holds them.

    Raises:
        UserError: no source, one that cannot be converted, a file of somebody else's in the way, or a written file
            that is not what was meant. Files that were there stay.
    """
    gguf_package()  # its absence is told before anything is exported
    out_dir = gguf_folder(config)
    folder = opened_source(config)
    check_target(folder, open_target_config(config.target))
    source = source_record(folder, config)
    previous = previous_record(out_dir)
    inputs = comparison_inputs(config, folder)  # what would be missing after the writing is missing now
    files = write_files(config, folder, out_dir, previous, source)
    comparison = None if inputs is None else compare_files(config, folder, out_dir, files, inputs, previous)
    record = {
        "tool": TOOL,
        **public_value(run_record(to_plain(config))),
        "source": source,
        "mask_slots": mask_slots(folder, config),
        "files": files,
        "comparison": comparison,
    }
    atomic_write_json(out_dir / GGUF_RECORD, record)
    atomic_write_text(out_dir / README, readme_text(config, folder.shape, record))
    for line in table_lines(files, comparison):
        logger.info("%s", line)
    return out_dir


def opened_source(config: RunConfig) -> DrafterFolder:
    """The drafter to convert: a named folder, else the export of the checkpoint, which was read and hashed just now."""
    named = config.export.gguf.source
    if named is not None:
        return DrafterFolder(absolute(named))
    exported = export_checkpoint(config)
    return DrafterFolder(exported, hashes=read_record(exported)["files"])


def gguf_folder(config: RunConfig) -> Path:
    """Where the files go."""
    settings = config.export.gguf
    if settings.output_dir is not None:
        return absolute(settings.output_dir)
    beside = absolute(config.export.output_dir)
    return beside.with_name(f"{beside.name}-gguf")


def check_target(folder: DrafterFolder, target: TargetInfo) -> None:
    """Refuse a drafter of another target: its token ids would mean something else.

    Raises:
        GgufError: lists what differs.
    """
    wrong = [str(finding) for finding in check_config(folder.config, target=target) if finding.check == SIZES]
    if wrong:
        listed = "\n  ".join(wrong)
        raise GgufError(f"{folder.folder}: made for another target than target.name says:\n  {listed}")


def mask_slots(folder: DrafterFolder, config: RunConfig) -> str:
    """What llama.cpp embeds where a mask token stands, in words."""
    if folder.embedding(config.target, config.export.gguf.embedding) is None:
        return "the target's own row of the mask token"
    if folder.mask is None:
        return "the mask token's row of the file's own token table"
    return "the learned mask vector, a row of the file's own token table"


def source_record(folder: DrafterFolder, config: RunConfig) -> dict[str, Any]:
    """What the files are made from, as far as it shapes their bytes."""
    settings = config.export.gguf
    target = metadata_folder(config.target)
    copied = None if settings.tokenizer_from is None else absolute(settings.tokenizer_from)
    if copied is not None and not copied.is_file():
        raise GgufError(f"export.gguf.tokenizer_from={copied}: no such file. Name a GGUF of the target.")
    papers = {name: sha256_file(folder.folder / name) for name in (CONFIG, MASK) if (folder.folder / name).exists()}
    return {
        "drafter": {**papers, **folder.weights_hashes},
        "target_hash": hash_model_folder(target),
        "tokenizer_hash": hash_tokenizer_files(target),
        "template_hash": hash_chat_template(target),
        "tokenizer_from_sha256": None if copied is None else sha256_file(copied),
        "settings": {key: getattr(settings, key) for key in ("codebook_type", "embedding", "pre_tokenizer")},
        "license": config.target.license,
        "gguf_package": gguf_version(),
    }


def gguf_version() -> str:
    """Version of the package that lays out and quantises."""
    return importlib.metadata.version("gguf")


def previous_record(out_dir: Path) -> dict[str, Any] | None:
    """The record that an earlier export left in the folder, or None.

    Raises:
        GgufError: a record that is damaged, or not one of this tool's.
    """
    if not (out_dir / GGUF_RECORD).exists():
        return None
    try:
        record = read_json(out_dir / GGUF_RECORD)
    except ValueError as error:
        raise GgufError(f"{error} Remove the file to write everything anew.") from error
    if record.get("tool") != TOOL:
        raise GgufError(f"{out_dir / GGUF_RECORD}: not this tool's. Choose another folder with export.gguf.output_dir.")
    return record


def write_files(
    config: RunConfig, folder: DrafterFolder, out_dir: Path, previous: dict[str, Any] | None, source: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Name -> entry of the record, each file written unless exactly it is there.

    Raises:
        GgufError: a file of that name that another program wrote.
    """
    embedding = folder.embedding(config.target, config.export.gguf.embedding)
    same_source = previous is not None and previous.get("source") == source
    files: dict[str, dict[str, Any]] = {}
    for kind in config.export.gguf.types:
        path = out_dir / f"{config.name}-{kind}.gguf"
        entry = None if previous is None else previous.get("files", {}).get(path.name)
        if path.exists() and entry is None and not written_here(path):
            raise GgufError(
                f"{path}: exists and was not written by this tool. Move it away or choose another folder with "
                "export.gguf.output_dir."
            )
        if entry is not None and same_source and path.exists() and sha256_file(path) == entry["sha256"]:
            logger.info("%s is written already", path.name)
        else:
            entry = write_file(path, kind, folder.plan(kind, config.export.gguf, embedding), config, folder)
        files[path.name] = entry
    return files


def written_here(path: Path) -> bool:
    """Whether a file carries our mark; a record may be missing where an export was cut short."""
    try:
        return GgufFile(path).value(SOURCE_KEY) is not None
    except GgufError:
        return False


def write_file(
    path: Path, kind: str, plan: list[PlannedTensor], config: RunConfig, folder: DrafterFolder
) -> dict[str, Any]:
    """Write one file and return its entry in the record."""
    tokenizer = partial(
        add_tokenizer,
        target=config.target,
        settings=config.export.gguf,
        num_tokens=folder.shape.vocab_size,
        mask_id=folder.shape.mask_token_id,
    )
    digest = write_gguf(path, file_entries(config, folder, kind), plan, tokenizer, sources=folder.weights_by_path)
    stored = Counter(tensor.kind for tensor in plan)
    listed = ", ".join(f"{count} {name}" for name, count in stored.items())
    logger.info("wrote %s: %.1f MiB, %d tensors (%s)", path, path.stat().st_size / 2**20, len(plan), listed)
    return {
        "sha256": digest,
        "bytes": path.stat().st_size,
        "type": kind,
        "tensors": len(plan),
        "bits_per_value": round(file_bits_per_value(plan), 3),
        "tensors_by_type": dict(stored),
    }


def file_entries(config: RunConfig, folder: DrafterFolder, kind: str) -> dict[str, Entry]:
    """Every key but architecture and tokenizer."""
    target = metadata_folder(config.target)
    entries = {
        "general.type": Entry("STRING", "model"),
        "general.name": Entry("STRING", f"{config.name} DFlash 2 drafter"),
        "general.license": Entry("STRING", config.target.license),
        "general.file_type": Entry("UINT32", STORAGE_TYPES[kind].file_type),
        "general.quantization_version": Entry("UINT32", gguf_package().GGML_QUANT_VERSION),
        f"{OWN_PREFIX}.num_target_layers": Entry("UINT32", folder.shape.num_target_layers),
        SOURCE_KEY: Entry("STRING", folder.weights_sha256),
    }
    own = drafter_entries(folder.shape, mrope=uses_mrope(read_json(target / "config.json")))
    return {**entries, **{f"{ARCHITECTURE}.{key}": entry for key, entry in own.items()}}


def uses_mrope(target_config: dict[str, Any]) -> bool:
    """Whether a target's ``config.json`` rotates by sections (M-RoPE)."""
    text = target_config.get("text_config") or target_config
    sections = (text.get("rope_parameters") or {}, text.get("rope_scaling") or {})
    return any("mrope_section" in section for section in sections)


def comparison_inputs(config: RunConfig, folder: DrafterFolder) -> str | None:
    """``captured data`` or ``random inputs``, whichever the files are compared on; None = they are not.

    Raises:
        GgufError: captured data is asked for and there is none, or it was captured for other taps.
    """
    settings, root = config.export.gguf, capture_root(config)
    if settings.compare_blocks == 0:
        return None
    captured = settings.compare_on != "random" and (root / MANIFEST_FILE).exists()
    if settings.compare_on == "capture" and not captured:
        raise GgufError(
            f"export.gguf.compare_on=capture: no captured data in {root}. Run dflash2-gen-data, name its folder with "
            "data.root, or use random."
        )
    if not captured:
        return "random inputs"
    content, shape = CaptureManifest.read(root / MANIFEST_FILE).content, folder.shape
    found = [content.get("target_layer_ids"), content.get("hidden_size")]
    if found != [list(shape.target_layer_ids), shape.hidden_size]:
        raise GgufError(
            f"{root}: captured for taps {found[0]} of size {found[1]}, the drafter reads "
            f"{list(shape.target_layer_ids)} of size {shape.hidden_size}. Name other data with data.root, or compare "
            "on noise with export.gguf.compare_on=random."
        )
    return "captured data"


def capture_root(config: RunConfig) -> Path:
    """Where the experiment's captured data lies."""
    return absolute(config.data.root) / "capture"


def compare_files(
    config: RunConfig,
    folder: DrafterFolder,
    out_dir: Path,
    files: dict[str, dict[str, Any]],
    inputs: str,
    previous: dict[str, Any] | None,
) -> dict[str, Any]:
    """Each file against the published drafter, or what ``previous`` has of these very files."""
    num_blocks = config.export.gguf.compare_blocks
    asked = {"asked_blocks": num_blocks, "inputs": inputs}
    if previous is not None and previous.get("files") == files:
        known = previous.get("comparison") or {}
        if asked.items() <= known.items():
            return dict(known)
    if inputs == "captured data":
        rows = captured_rows(capture_root(config), folder.shape, num_blocks=num_blocks)
    else:
        rows = random_rows(folder.shape, num_blocks=num_blocks)
    head = FrozenHead.load(config.target, dtype="float32")
    results = compare(folder, (read_gguf_drafter(out_dir / name) for name in files), rows, head)
    return {
        **asked,
        "blocks": sum(len(row.anchors) for row in rows),
        "files": {name: result.to_json() for name, result in zip(files, results, strict=True)},
    }

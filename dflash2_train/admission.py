"""Whether captured samples may be trained on: are they of this experiment, and do they pass the gates."""

from __future__ import annotations

from pathlib import Path

from data_gen.cache.format import MANIFEST_FILE, CacheIntegrityError, CaptureManifest, list_differences
from dflash2_train.app import open_console
from dflash2_train.attest import Attestation, attest
from dflash2_train.attest.samples import Samples
from dflash2_train.config import RunConfig, UserError, absolute
from dflash2_train.provenance import atomic_write_json
from dflash2_train.ranks import first_rank_says
from dflash2_train.target import open_target_config
from dflash2_train.training_data import TrainingData


def check_captures(data: TrainingData, config: RunConfig) -> None:
    """:func:`check_cache` for what is trained on and, if it lies elsewhere, for what is validated on."""
    check_cache(data.manifest, absolute(config.data.root), config)
    if config.train.validation.root is not None:
        root = absolute(config.train.validation.root)
        check_cache(CaptureManifest.read(root / "capture" / MANIFEST_FILE), root, config)


def check_cache(manifest: CaptureManifest, root: Path, config: RunConfig) -> None:
    """Refuse samples of another target, other taps or another teacher, listing what differs."""
    wanted = {
        "target_hash": open_target_config(config.target).target_hash,  # wherever the folder lies
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "hidden_size": config.target.hidden_size,
        "teacher_top_k": config.data.teacher_top_k,
        "enable_thinking": config.data.enable_thinking,
    }
    stored = {key: manifest.content[key] for key in wanted}
    lines = list_differences(stored, wanted)
    if lines:
        listed = "\n  ".join(lines)
        raise CacheIntegrityError(
            f"{root} was captured from {manifest.content['target']} and for something "
            f"else than this config of {config.target.name} (cache -> config):\n  {listed}\n"
            "Capture again with this config in another folder, or set the config back."
        )


def attest_cache(config: RunConfig, output: Path, samples: Samples, rank: int) -> Attestation | None:
    """Put the cache through its gates on the first rank; a refused cache ends the run on every rank.

    The verdicts are shown and written to ``attestation.json`` before anything is refused.

    Raises:
        CacheIntegrityError: a gate failed.
        UserError: on the other ranks, the first one refused the cache or could not read it.
    """
    attested, passed = None, False
    try:
        if rank == 0:
            attested = attest(samples, config)
            open_console(stderr=True).print(attested.table())
            atomic_write_json(output / "attestation.json", attested.to_dict())
            passed = attested.passed
    finally:
        passed = first_rank_says(passed)  # also when the first rank met an error: the others must not wait for it
    if attested is not None:
        attested.refuse()
    elif not passed:
        raise UserError("the first rank refused the cache; its output names the gates that failed.")
    return attested

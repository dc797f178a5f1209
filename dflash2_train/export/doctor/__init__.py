"""The doctor: is a drafter, ours or anyone's, fit to serve?

Two of the three common servers load a drafter with missing tensors, with taps in another order or with the attention
direction left out, and just draft badly. So every rule that some reader breaks silently is a check here, with its
severity, the readers that it touches, and the next step.

    findings.py        Finding, Check, and the registry that checks enter themselves into
    opened.py          a drafter folder opened without trust: config, tensors one at a time, mask vector, records
    key_checks.py      config.json: kind of drafter, placement of keys, keys that one reader alone honours
    shape_checks.py    config.json: sizes, attention, rotary embedding, taps, mask id
    file_checks.py     weight files and shards            tensor_checks.py   names, shapes, values
    mask_checks.py     mask_embedding.pt                  target_checks.py   what only the target can tell
    record_checks.py   run.json and PROVENANCE.txt        gguf_checks.py     a GGUF in the place of a folder
    examine.py         runs them                          report.py          table, JSON, exit code
    obtain.py          path or Hub id -> files            serve.py           what one server makes of the drafter
"""

from dflash2_train.export.doctor.examine import check_config, check_folder, examine
from dflash2_train.export.doctor.findings import ERROR, WARNING, Finding

__all__ = ["ERROR", "WARNING", "Finding", "check_config", "check_folder", "examine"]

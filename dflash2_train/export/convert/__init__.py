"""Drafters of other tools become drafters of this one, and back where the formats allow; what is lost is said.

Every style is read into the published layout (``config.json`` keys and tensor names) and written from it, so a rule
about what a drafter computes stands once, in ``DrafterShape.from_published``.

    style.py         what a style is: marks, names of tensors, configuration both ways, what it cannot say
    hf.py zlab.py specforge.py speculators.py angelspec.py    one style each
    source.py        recognises a folder and opens it
    target_rows.py   the target's tables: own ones compared with them, the row of the mask token
    conversion.py    one style to another: losses first, then a folder that is whole or not there
    papers.py        run.json and PROVENANCE.txt of a conversion
    command.py       dflash2-export convert
"""

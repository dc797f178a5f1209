"""Before a step is spent: does the cache hold what the target would compute, and did the target write its text?

:func:`attest` runs every gate, cheap ones and those that take a forward of the target, before anything is refused: who
mends a cache wants the whole list. The gates:

========================  ==============================================================================================
target, tokenizer,        the folder that the conversations, the states and this training read is one and the same:
template                  weights, tokenizer files, chat template byte for byte
thinking                  one mode in configuration, both manifests and every conversation
sampling                  every sampling field of the text is on record
mask token                the drafter's mask token never occurs in the text
supervised share          prompts are not trained on, answers are
labels (each source)      share of supervised tokens in the teacher's top-k: text of another model shows here
taps                      cached states are those of a plain forward, every tap by itself
tap layers                and no neighbouring layer fits better: off-by-one
teacher                   first choice and log probability of the cached teacher are the target's own
========================  ==============================================================================================
"""

from dflash2_train.attest.gate import FAIL, PASS, UNKNOWN, Attestation, Gate
from dflash2_train.attest.run import attest

__all__ = ["FAIL", "PASS", "UNKNOWN", "Attestation", "Gate", "attest"]

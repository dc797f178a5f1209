"""Validation in the loop: what a drafter would do when served, told from captures that it never trained on.

Every position of a held-back answer is taken as an anchor, so nothing is drawn and a block is never missed. Three paths
are read off each block:

    unary      the best unary logit of every slot
    selector   what the selector walks on its own choices, from the anchor on: the drafts as served
    oracle     right wherever the data token is among the candidates: the most that any selector could reach

Acceptance is counted as the runner and servers count it, accepted drafts and one token of the target's own. A server
does not start a block at every position but behind the last round, and rounds start more often where drafting is hard.
So the *forecast* follows the chain: from an answer's first token to where the first round would end, and on. A draft
that equals the text is accepted with the probability with which the target, sampling as it did when it wrote the text,
would accept it; so the forecast has the law of real decoding under that sampling with argmax proposals.

Real decoding of a few of the same prompts then tests all that the forecast takes for granted. Where the two disagree,
what is trained is not what is served.

Nothing here moves training by a bit: no gradient, generators and module modes put back, weights untouched.

Modules: ``captures`` (which answers, packed into rows), ``slots`` (what the drafter does in every block), ``chain``
(where a server would start its blocks), ``figures`` (additive sums), ``decode`` (the runner), ``outcome`` (values,
table, alarm), ``validator`` (all of it, on all ranks).

Letters: n blocks of a row, K drafted slots, N supervised slots, T teacher ids, C candidates.
"""

from dflash2_train.validation.outcome import Outcome
from dflash2_train.validation.validator import Validator

__all__ = ["Outcome", "Validator"]

"""Memory and time of a training step, from shapes alone: no weights, no data, no torch.

    dflash2-train +experiment=glm53_flash plan=true

``setting`` says what a step is made of; ``parameters``, ``state``, ``activations``, ``losses`` and ``buffers`` count
its tensors, ``libraries`` what is no tensor; ``timeline`` adds them up at the moments at which most is alive, ``fit``
holds that against the machine and searches settings that fit, ``speed`` estimates time, ``report`` and ``command``
show it.

Every function that counts bytes says which tensors it counts; ``tests/bench/bench_planner.py`` holds the sums against
real training steps.

Letters: P parameters, R ranks; B rows, S context tokens of a row, A blocks a row, W block size, K = W - 1, n = B A W
slots, N supervised slots, H hidden, I intermediate, L layers, D head size, Q query heads, M key heads, T taps, k
teacher entries, V vocabulary, C candidates, r selector rank, Kc kernel size, G convolution groups; e bytes of an
element in the training dtype.
"""

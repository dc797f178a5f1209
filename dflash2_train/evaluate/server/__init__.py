"""``eval.mode=server``: a running vLLM or SGLang server measured over HTTP, from its own counters."""

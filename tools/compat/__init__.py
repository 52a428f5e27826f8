"""docs/compat.md: what of vLLM's interface is here. `http.toml` and the package's `assets/vllm_flags.toml` hold vLLM's
names; `verdicts` looks each of them up in the code; `page` writes what it finds."""

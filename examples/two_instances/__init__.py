"""Two vLLM servers that share every prefix through one sidecar: `make demo`."""

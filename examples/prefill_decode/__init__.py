"""A prefiller and a decoder that meet in one sidecar, behind a small proxy: `make demo PD=1`."""

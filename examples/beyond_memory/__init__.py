"""A working set ten times the arena: what does not fit is found in a tier below it: `make demo
TIERS=disk`."""

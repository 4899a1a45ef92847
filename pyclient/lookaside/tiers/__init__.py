"""Tiers for the sidecar in engines that span hosts: programs on lookaside.tier.

``python -m lookaside.tiers.mooncake`` keeps values in Mooncake Store, and ``python -m
lookaside.tiers.nixl`` in whatever NIXL has a plug-in for. docs/tiers-elsewhere.md shows both.
"""

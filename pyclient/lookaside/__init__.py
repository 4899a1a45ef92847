"""Client of the Lookaside sidecar: vLLM's KV cache kept outside the engine.

Importing this package is cheap and reaches for nothing: vLLM imports the connector class also where
it is never used.
"""

__version__ = "0.1.0"

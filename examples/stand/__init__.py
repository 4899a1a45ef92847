"""Brings up what the demo, the TTFT bench and the end-to-end tests run against.

``model`` makes a small random model, ``processes`` starts and ends sidecars and vLLM servers,
``client`` sends a prompt and measures the time to its first token. Nothing here is needed to use
Lookaside with one's own vLLM.
"""

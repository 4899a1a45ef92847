"""Tests in real vLLM servers, on the CPU, in float32: what a user gets, against a run without the
connector."""

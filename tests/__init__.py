"""Tests: unit (mirrors xtok), parity (fast path against its reference), dist (real gloo ranks), flows (one harness), bench."""

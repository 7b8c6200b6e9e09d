"""Conformance: what the device and a backend promise, checked against CPU eager."""

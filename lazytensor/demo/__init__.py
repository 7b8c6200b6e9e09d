"""The demonstration: a small character-level GPT trained on ``ltc`` and on the CPU, and what was recorded."""

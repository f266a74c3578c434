"""Raw messages to what each model is shown: rendered text, ids, and the exact place of the final turn in them. Never imports torch."""

from __future__ import annotations

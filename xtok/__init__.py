"""xtok: distillation across tokenizers, and the speculative-decoding draft that ships with the student.

Import from the modules that hold the names (`xtok.align`, `xtok.collate`, `xtok.loader`, `xtok.losses`, …): this package itself
imports nothing, so that a preprocessing worker starts without torch.
"""

__version__ = "0.1.0"

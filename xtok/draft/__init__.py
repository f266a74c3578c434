"""Speculative-decoding drafts: anchored blocks, DFlash and DSpark models, training forward, evaluation loop, export.

Import from the modules that hold the names (`xtok.draft.common`, `xtok.draft.dflash`, `xtok.draft.dspark`, …).
"""

"""Losses: draft soft cross-entropy (`xtok.losses.draft`), the DSpark objective (`xtok.losses.dspark`) and cross-tokenizer
distillation (`xtok.losses.cross_tokenizer`).

Each fast path has a slow dense twin in `xtok.losses.reference`. All of them return unreduced numerators and counts: the caller sums
both over micro-batches and data-parallel ranks and divides once.
"""

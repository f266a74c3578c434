"""Which serving engine reads which field of a draft's config.json, as a table for people who deploy one.

From the engines' public loaders, read and not run here; engines change, so check the version in use.
"""

from __future__ import annotations

__all__ = ["engine_table"]

_ROWS = (
    ("`architectures`", "selects the model class", "selects the model class", "not used"),
    (
        "`dflash_config.target_layer_ids`",
        "adds 1 to each (`eagle_aux_hidden_state_layer_ids`, if present, wins and is taken as is)",
        "first choice",
        "own name: `aux_hidden_state_layer_ids` (ids + 1)",
    ),
    ("`target_layer_ids` (top level)", "last choice, adds 1", "second choice", "not used"),
    ("`dflash_config.mask_token_id`", "first choice", "first choice", "not used"),
    ("`mask_token_id` (top level)", "second choice", "second choice", "not used"),
    ("`block_size`", "not used: set `num_speculative_tokens` (K - 1 DFlash, K DSpark)", "`dflash_config`, then top level", "read"),
    ("`num_target_layers`", "not used", "`dflash_config`, then top level", "not used"),
    ("`markov_rank`, `markov_head_type`", "vanilla only", "top level, rank > 0 required for DSPARK; all three types", "read"),
    ("`sample_from_anchor`", "layout, newer versions", "not used", "layout: true is next-token"),
    ("`dspark_bonus_anchor`", "layout, older versions", "not used", "not used"),
    ("`layer_types`, `sliding_window`", "read", "read", "nested `transformer_layer_config`"),
    ("`rope_theta`, `rope_scaling`, head and width fields", "read", "read", "nested `transformer_layer_config`"),
    ("`embed_tokens`, `lm_head` tensors", "the target's are shared", "the target's are shared", "stored with the draft"),
)


def engine_table() -> str:
    """Markdown: what vLLM, SGLang and speculators do with each exported field."""
    header = ("field we write", "vLLM", "SGLang", "speculators")
    lines = [_line(header), _line(("---",) * len(header)), *(_line(row) for row in _ROWS)]
    notes = (
        "",
        "Read in public sources, not run there. vLLM: set `method` explicitly (a path that contains \"dflash\" decides otherwise). "
        "SGLang: `--speculative-num-draft-tokens` is K for DFLASH and K + 1 for DSPARK (K in older versions); it skips unknown body "
        "tensors in silence and checks the shape of `fc` alone.",
    )
    return "\n".join([*lines, *notes]) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"

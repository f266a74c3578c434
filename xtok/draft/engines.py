"""Which serving engine reads which field of a draft's config.json, as a table for people who deploy one.

From the engines' public loaders, read and not run here; engines change, so check the version in use.

    python -m xtok.draft.engines     writes the table to ENGINES.md beside this module
"""

from __future__ import annotations

from pathlib import Path

from xtok import storage

__all__ = ["TABLE_FILE", "engine_table", "write_table"]

TABLE_FILE = "ENGINES.md"
"""Beside this module; `python -m xtok.draft.engines` writes it anew."""

_NESTED = "nested `transformer_layer_config`"
_ROWS = (
    ("`architectures`", "selects the model class", "selects the model class", "not used (`speculators_model_type`)"),
    (
        "`dflash_config.target_layer_ids`",
        "adds 1 to each (`eagle_aux_hidden_state_layer_ids`, if present, wins and is taken as is)",
        "first choice",
        "own name: `aux_hidden_state_layer_ids` (ids + 1)",
    ),
    ("`target_layer_ids` (top level, DSpark)", "last choice, adds 1", "second choice", "not used"),
    ("`dflash_config.mask_token_id`", "first choice", "first choice", "not used"),
    ("`mask_token_id` (top level, DSpark)", "second choice", "second choice", "read"),
    (
        "`block_size`",
        "not used: set `num_speculative_tokens` (K - 1 DFlash, K DSpark)",
        "`dflash_config`, then top level",
        "read",
    ),
    ("`num_target_layers`", "not used", "`dflash_config`, then top level", "not used"),
    ("`markov_rank`, `markov_head_type`", "vanilla only", "top level, rank > 0 required for DSPARK; all three types", "read"),
    (
        "`enable_confidence_head`, `confidence_head_with_markov`",
        "read in some versions (absent: both true)",
        "the first is read",
        "read",
    ),
    ("`sample_from_anchor`", "layout, newer versions", "not used", "layout: true is next-token"),
    ("`dspark_bonus_anchor`", "layout, older versions", "not used", "not used"),
    ("`layer_types`", "read, with `sliding_window`", "read, with `sliding_window`", _NESTED),
    (
        "`model_type`, `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`, "
        "`head_dim`, `rms_norm_eps`, `rope_theta`, `rope_scaling`, `max_position_embeddings`, `vocab_size`, `hidden_act`, "
        "`attention_bias`",
        "read as a Qwen3 configuration",
        "read as a Qwen3 configuration",
        _NESTED,
    ),
    ("`torch_dtype`", "default of `--dtype`", "default of `--dtype`", "not used"),
    ("`tie_word_embeddings`, `attention_dropout`, `initializer_range`", "no effect", "no effect", "no effect"),
    (
        "tensors `embed_tokens`, `lm_head` (not written)",
        "the target's are shared",
        "the target's are shared",
        "stored with the draft",
    ),
)


def engine_table() -> str:
    """Markdown: what vLLM, SGLang and speculators do with each exported field."""
    header = ("field we write", "vLLM", "SGLang", "speculators")
    lines = [_line(header), _line(("---",) * len(header)), *(_line(row) for row in _ROWS)]
    notes = (
        "",
        'Read in public sources, not run there. vLLM: set `method` explicitly (a path that contains "dflash" decides otherwise). '
        "SGLang: `--speculative-num-draft-tokens` is K for DFLASH and K + 1 for DSPARK (K in older versions); it skips unknown body "
        "tensors in silence and checks the shape of `fc` alone.",
    )
    return "\n".join([*lines, *notes]) + "\n"


def write_table() -> None:
    """Write `TABLE_FILE`, the page that the documentation links."""
    page = "# Which engine reads which field of an exported draft\n\n" + engine_table()
    storage.write_atomic(str(Path(__file__).with_name(TABLE_FILE)), page.encode())


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    write_table()

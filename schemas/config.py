"""What a user may ask of preprocessing: one frozen, typed configuration.

Every field has the default a newcomer would choose, but `sources`, `student`, `teachers` and `output`. Units are in the names
(`_bytes`, `_rows`, `_length` in tokens). Relative paths are relative to the current directory of the run.
"""

from __future__ import annotations

import datetime
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from schemas.base import MAX_COUNT, Frozen
from schemas.train_config import TrainConfig

__all__ = ["KD_ALIGNMENT_REGIONS", "MAX_BYTES", "ModelSide", "PreprocessConfig", "TrainConfig"]

MAX_BYTES = 2**50
KD_ALIGNMENT_REGIONS = ("reasoning", "close", "answer", "eot")


class ModelSide(Frozen):
    """One model, seen from its tokenizer.

    tokenizer: a folder with tokenizer.json, or a hub id (then `revision` pins it). context_length: tokens, added specials
    counted. chat_template: path of a Jinja file that replaces the tokenizer's own template.
    """

    tokenizer: str = Field(min_length=1)
    revision: str | None = None
    context_length: int = Field(default=4096, ge=2, le=MAX_COUNT)
    add_special_tokens: bool = True
    trust_remote_code: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    allow_special_tokens_in_content: bool = False
    accept_dropped_reasoning: bool = False


class PreprocessConfig(Frozen):
    """Raw text or chats in, aligned Parquet shards out.

    sources: files or globs of jsonl, jsonl.gz, jsonl.zst or Parquet, local or any fsspec URL; read in this order, a glob's
      matches sorted.
    student, teachers: the models; a teacher with the student's own tokenizer gets an entry in the manifest and no files.
    output: folder or URL of the dataset.
    text_field, id_field, loss_multiplier_field: names of a row's fields; a row without an id is named by its content's digest.
    overlength: what happens to a text longer than a context: `truncate` each side to its own, `split` into windows that end at
      a cut which all sides share, or `reject`. A chat is never cut: in chat mode `reject` is the default and the only choice.
    max_document_bytes: a longer text (UTF-8) is a counted reject before tokenizing.
    part_bytes: target size of one unit of work, in bytes of decompressed input. row_group_rows: rows in one Parquet row group.
    engine: `local` (processes of this machine) or `ray`. workers: processes, None for one a core.
    max_reject_fraction: publication stops when a side refuses a larger share of its rows. min_coverage: publication stops when
      less of the supervised student tokens lies in chunks shared with a teacher.
    backend: `auto` takes the fast tokenizer where it is proven equal on a sample of this data. proof_every: one row in so many
      is tokenized with the reference as well, in every part.
    projection: also build each teacher's vocabulary projection, with at most projection_entries teacher tokens a student token.
    Chat mode only:
    render_date: the day that chat templates see; None for the plan's UTC date.
    messages_field, conversations_field, prompt_field and completion_field: a row is read from the first that is there, OpenAI's
      messages, ShareGPT's conversations (`from`, `value`), or a prompt with its completion (text or messages).
    system_field: a system prompt that stands beside the messages, which begin with it then; None: not read.
    tools_field, chat_template_kwargs_field: a row's own tools and template arguments (over the side's); None: not read.
    include_thinking_in_loss … drop_first_assistant_chunk_kl_by_teacher: see the collator's arguments of the same names.
    """

    mode: Literal["text", "chat"] = "text"
    sources: tuple[str, ...] = Field(min_length=1)
    student: ModelSide
    teachers: tuple[ModelSide, ...] = Field(min_length=1)
    output: str = Field(min_length=1)

    text_field: str = "text"
    id_field: str | None = "id"
    loss_multiplier_field: str | None = None

    overlength: Literal["truncate", "split", "reject"] = "truncate"
    max_document_bytes: int = Field(default=4_000_000, ge=1, le=MAX_BYTES)
    part_bytes: int = Field(default=16_000_000, ge=1, le=MAX_BYTES)
    row_group_rows: int = Field(default=512, ge=1, le=MAX_COUNT)

    engine: Literal["local", "ray"] = "local"
    workers: int | None = Field(default=None, ge=1)
    max_reject_fraction: float = Field(default=0.05, ge=0.0, le=1.0)
    min_coverage: float = Field(default=0.9, ge=0.0, le=1.0)

    backend: Literal["auto", "fastokens", "tokenizers"] = "auto"
    proof_every: int = Field(default=200, ge=1, le=MAX_COUNT)
    projection: bool = True
    projection_entries: int = Field(default=4, ge=1, le=MAX_COUNT)
    render_date: datetime.date | None = None

    messages_field: str = "messages"
    conversations_field: str = "conversations"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    system_field: str | None = "system"
    tools_field: str | None = "tools"
    chat_template_kwargs_field: str | None = "chat_template_kwargs"
    include_thinking_in_loss: bool = False
    native_thinking_alignment: bool = False
    kd_alignment_regions: tuple[Literal["reasoning", "close", "answer", "eot"], ...] | None = None
    drop_first_assistant_chunk_kl_by_teacher: tuple[bool, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _chats_are_never_cut(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("mode") == "chat":
            return {"overlength": "reject"} | data
        return data

    @field_validator("sources", mode="before")
    @classmethod
    def _one_source_may_stand_alone(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_chat_fields(self) -> Self:
        if self.mode == "chat" and self.overlength != "reject":
            raise ValueError(f"overlength: {self.overlength}: a chat is never cut; leave overlength out in mode: chat")
        if self.native_thinking_alignment and not (self.mode == "chat" and self.include_thinking_in_loss):
            raise ValueError("native_thinking_alignment needs mode: chat and include_thinking_in_loss: true")
        if self.kd_alignment_regions is not None:
            if not self.native_thinking_alignment:
                raise ValueError("kd_alignment_regions needs native_thinking_alignment: true")
            if not self.kd_alignment_regions:
                raise ValueError("kd_alignment_regions is empty: leave it out to keep all of " + ", ".join(KD_ALIGNMENT_REGIONS))
        drop = self.drop_first_assistant_chunk_kl_by_teacher
        if drop is not None and len(drop) != len(self.teachers):
            raise ValueError(
                f"drop_first_assistant_chunk_kl_by_teacher has {len(drop)} entries for {len(self.teachers)} teachers: "
                "give one each"
            )
        return self

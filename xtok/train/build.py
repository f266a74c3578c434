"""From a configuration to everything a run needs, with every mistake said before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from schemas.manifest import Manifest
from schemas.plan import PlannedSide
from schemas.train_config import TrainConfig
from xtok import storage
from xtok.draft.config import DFlashConfig, DSparkConfig
from xtok.draft.dflash import DFlashDraftModel
from xtok.draft.dspark import DSparkDraftModel
from xtok.draft.export import load_draft
from xtok.errors import ConfigError, DamagedPartError, FingerprintMismatchError, XtokError
from xtok.losses.cross_tokenizer import CrossTokenizerDistillationConfig, CrossTokenizerDistillationLoss
from xtok.projection import Projection, build_projection, read_projection
from xtok.shards.read import open_dataset
from xtok.tokenizers import TokenizerAdapter, load_tokenizer
from xtok.train.models import CausalBody, Teacher, check_head_size, load_model
from xtok.train.objective import Objective
from xtok.train.parallel import checkpoint_activations, shard_module
from xtok.train.runtime import Runtime

__all__ = ["Training", "build_models", "build_training", "check_dataset"]

DraftModel = DFlashDraftModel | DSparkDraftModel


@dataclass(frozen=True)
class Training:
    """Objective and models of one rank. draft: None without one."""

    objective: Objective
    student: CausalBody
    draft: nn.Module | None

    @property
    def modules(self) -> list[nn.Module]:
        """The sharded modules."""
        return [self.student] if self.draft is None else [self.student, self.draft]


def check_dataset(config: TrainConfig) -> tuple[Manifest, TokenizerAdapter, list[TokenizerAdapter]]:
    """The dataset's manifest and the models' tokenizers, compared, for the held-out dataset too. Needs no model.

    Raises UnpublishedDatasetError, DamagedPartError (a file that is missing or of another size), ConfigError (a teacher that the
    dataset lacks) and FingerprintMismatchError (both values).
    """
    manifest = _published(config, config.dataset)
    student = load_tokenizer(config.student.tokenizer or config.student.model, revision=config.student.revision)
    teachers = [load_tokenizer(teacher.tokenizer or teacher.model, revision=teacher.revision) for teacher in config.teachers]
    held_out = [] if config.evaluation is None else [config.evaluation.dataset]
    for dataset in (config.dataset, *held_out):
        checked = manifest if dataset == config.dataset else _published(config, dataset)
        _same("student", student, checked.student, dataset)
        for index, (teacher, side) in enumerate(zip(teachers, checked.teachers, strict=False)):
            _same(f"teacher {index}", teacher, side, dataset)
            if side.same_as_student != manifest.teachers[index].same_as_student:
                raise FingerprintMismatchError(
                    f"teacher {index} {'is' if side.same_as_student else 'is not'} shown the student's own tokens in {dataset}, other "
                    f"than in {config.dataset}: preprocess both with the same template settings"
                )
    return manifest, student, teachers


def _context_lengths(config: TrainConfig, manifest: Manifest) -> tuple[int, list[int]]:
    """The longest rows that the student and each teacher will be shown, held-out ones included."""
    manifests = [manifest] if config.evaluation is None else [manifest, open_dataset(config.evaluation.dataset).manifest]
    teachers = zip(*(each.teachers for each in manifests), strict=False)
    return max(each.student.context_length for each in manifests), [max(s.context_length for s in sides) for sides in teachers]


def _published(config: TrainConfig, url: str) -> Manifest:
    """The manifest of a dataset whose files are there and that has the configured teachers."""
    manifest = open_dataset(url).manifest
    if config.teachers and len(config.teachers) != len(manifest.teachers):
        names = [side.name for side in manifest.teachers]
        raise ConfigError(
            f"{url} has {len(manifest.teachers)} teachers ({', '.join(names)}), the configuration {len(config.teachers)}: "
            "list one model for each, in that order"
        )
    for part in manifest.parts:
        for file in (part.student_file, *part.teacher_files):
            if file is None:
                continue
            path = storage.join(url, file.path)
            found = storage.size(path) if storage.exists(path) else None
            if found != file.num_bytes:
                raise DamagedPartError(
                    f"{path} (part {part.index}) {'is missing' if found is None else f'has {found} bytes, not {file.num_bytes}'}: "
                    f"rebuild that part alone with `xtok repair {url} --part {part.index}`"
                )
    return manifest


def _same(who: str, adapter: TokenizerAdapter, side: PlannedSide, dataset: str) -> None:
    if adapter.content_fingerprint != side.content_fingerprint:
        raise FingerprintMismatchError(
            f"the {who}'s tokenizer {adapter.name} (fingerprint {adapter.content_fingerprint}) is not the one that made {dataset}: "
            f"{side.name} (fingerprint {side.content_fingerprint}). Train with that model, or preprocess again with this tokenizer."
        )


def _check_mask_token(mask_token_id: int, tokenizer: TokenizerAdapter) -> None:
    for role, token in (("padding", tokenizer.pad_token_id), ("end of text", tokenizer.eos_token_id)):
        if mask_token_id == token:
            raise ConfigError(f"draft.mask_token_id {mask_token_id} is the student's {role} token: choose a reserved id")


def build_training(config: TrainConfig, runtime: Runtime) -> Training:
    """Load, check and shard all that a run needs. Weights made fresh are the same on every rank (seeded by `config.seed`)."""
    manifest, student_tokenizer, teacher_tokenizers = check_dataset(config)
    loss_fn = _loss(config, manifest, student_tokenizer, teacher_tokenizers)
    context_length, teacher_context_lengths = _context_lengths(config, manifest)
    student, draft = build_models(config, runtime, student_tokenizer, context_length=context_length)
    teachers = [
        Teacher(settings, runtime, context_length=length, vocab_size=tokenizer.vocab_size)
        for settings, length, tokenizer in zip(config.teachers, teacher_context_lengths, teacher_tokenizers, strict=False)
        if loss_fn is not None
    ]
    objective = Objective(
        config,
        student=student,
        loss_fn=loss_fn,
        teachers=teachers,
        draft=draft,
        vocab_size=student_tokenizer.vocab_size,
        tp_group=runtime.tp_group,
    )
    return Training(objective, student, draft)


def build_models(
    config: TrainConfig, runtime: Runtime, tokenizer: TokenizerAdapter, *, context_length: int
) -> tuple[CausalBody, nn.Module | None]:
    """What trains: the student, sharded, and the draft or None."""
    torch.manual_seed(config.seed)
    model = load_model(config.student, dtype=torch.float32, context_length=context_length)
    draft = _draft(config, model) if config.trains_draft else None
    student = CausalBody(model, tp_group=runtime.tp_group, tap_layer_ids=() if draft is None else draft.config.target_layer_ids)
    _check_student(config, student, tokenizer, draft)
    student.requires_grad_(config.trains_student).train(config.trains_student)
    if config.activation_checkpointing and config.trains_student:
        checkpoint_activations(model)
    precision = None if config.precision == "float32" else torch.bfloat16
    shard_module(student.to(runtime.device), student.target.layers, runtime.dp_mesh, precision=precision)
    if draft is not None:
        shard_module(draft.to(runtime.device).train(), (), runtime.dp_mesh, precision=precision)
    return student, draft


def _check_student(config: TrainConfig, student: CausalBody, tokenizer: TokenizerAdapter, draft: DraftModel | None) -> None:
    target = student.target
    if config.trains_student and target.softcap is not None:
        raise ConfigError(
            f"{config.student.model} caps its logits: such students cannot be distilled tile by tile; train only its draft"
        )
    check_head_size(config.student, student, tokenizer.vocab_size)
    if draft is not None:
        try:
            target.check_draft(draft.config)
        except ValueError as error:
            raise ConfigError(f"draft: {error}") from error
        _check_mask_token(draft.config.mask_token_id, tokenizer)


def _loss(
    config: TrainConfig, manifest: Manifest, student: TokenizerAdapter, teachers: list[TokenizerAdapter]
) -> CrossTokenizerDistillationLoss | None:
    if not config.objectives.distill:
        return None
    try:
        settings = CrossTokenizerDistillationConfig(
            **config.distillation, kd_weight=config.objectives.distill, ce_weight=config.objectives.ce or 0.0
        )
        if settings.teacher_weights is not None and not any(settings.teacher_weights):
            raise ValueError(
                f"teacher_weights {settings.teacher_weights} leave nothing to learn from; to train without, make "
                "objectives.distill null"
            )
        projections = [
            None if side.same_as_student else _projection(config, manifest, index, student, teachers[index])
            for index, side in enumerate(manifest.teachers)
        ]
        return CrossTokenizerDistillationLoss(settings, projections, student_vocab_size=student.vocab_size)
    except XtokError:
        raise
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"distillation: {error}") from error


def _projection(
    config: TrainConfig, manifest: Manifest, index: int, student: TokenizerAdapter, teacher: TokenizerAdapter
) -> Projection:
    """The given file, else the dataset's own, else built now."""
    given = None if config.projections is None else config.projections[index]
    stored = manifest.projections[index] if manifest.projections else None
    path = given or (None if stored is None else storage.join(config.dataset, stored.path))
    if path is None:
        return Projection.from_table(build_projection(student, teacher))
    prints = {"student_fingerprint": student.content_fingerprint, "teacher_fingerprint": teacher.content_fingerprint}
    return Projection.from_table(read_projection(path, **prints))


def _draft(config: TrainConfig, model: Any) -> DraftModel:
    """A fresh draft for this target, or the one to go on from."""
    settings = config.draft
    try:
        if settings.load is not None:
            return load_draft(settings.load, dtype=torch.float32)
        kind = DFlashConfig if settings.kind == "dflash" else DSparkConfig
        assert settings.mask_token_id is not None
        draft_config = kind.from_target(
            model.config,
            mask_token_id=settings.mask_token_id,
            num_draft_layers=settings.num_draft_layers,
            block_size=settings.block_size,
            **settings.settings,
        )
    except Exception as error:  # a damaged folder raises whatever the libraries below happen to meet
        raise ConfigError(f"draft: {error if isinstance(error, ValueError | OSError) else repr(error)}") from error
    return DFlashDraftModel(draft_config) if isinstance(draft_config, DFlashConfig) else DSparkDraftModel(draft_config)

"""Preprocessing without an orchestrator: plan, freeze, build, publish. The Prefect flow strings the same pieces together.

    manifest = preprocess(PreprocessConfig(sources=["texts.jsonl"], student=..., teachers=[...], output="out/aligned"))

Run it again after any interruption: it plans again, comes to the same plan, and builds what is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pydantic import ValidationError

from schemas.config import PreprocessConfig
from schemas.manifest import Manifest, PartEntry
from schemas.plan import Plan
from xtok import storage
from xtok.errors import ConfigError, DatasetError
from xtok.shards.freeze import agree, freeze_plan, write_plan
from xtok.shards.part import run_part
from xtok.shards.plan import Progress, RunPlan, make_plan, plan_bytes, read_plan
from xtok.shards.pool import Runner, WorkerPool, default_workers
from xtok.shards.projections import build_projections
from xtok.shards.publish import publish
from xtok.shards.read import open_dataset
from xtok.shards.records import part_jobs, read_record, record_path

__all__ = [
    "absolute_config",
    "build_parts",
    "plan_dataset",
    "preprocess",
    "rebuild_part",
    "rebuild_parts",
    "restore_manifest",
    "restore_plan",
    "restore_projections",
]


def preprocess(config: PreprocessConfig, *, progress: Progress | None = None, runner: Runner | None = None) -> Manifest:
    """Builds and publishes a dataset, or finishes one that was interrupted.

    progress: called with (stage, done, total). runner: where to run the parts; default, a pool of `config.workers` processes
    that ends with this call. Raises ConfigError, StorageError, TokenizerError, DatasetMismatchError, PublicationRefusedError,
    WorkerDiedError.
    """
    config = absolute_config(config)
    if runner is None:
        if config.engine != "local":
            raise ConfigError(
                f"engine: {config.engine!r} needs a runner of its own; leave it out to use this machine's processes"
            )
        with WorkerPool(config.workers) as pool:
            return preprocess(config, progress=progress, runner=pool)
    run = plan_dataset(config, runner, progress)
    projections = build_projections(run, config, runner)
    return publish(run, build_parts(run, config, runner, progress), config, projections)


def absolute_config(config: PreprocessConfig) -> PreprocessConfig:
    """The configuration with local paths made absolute, so that it means the same in every worker."""
    sides = [
        side.model_copy(
            update={
                "tokenizer": storage.absolute(side.tokenizer) if storage.exists(side.tokenizer) else side.tokenizer,
                "chat_template": storage.absolute(side.chat_template) if side.chat_template is not None else None,
            }
        )
        for side in (config.student, *config.teachers)
    ]
    return config.model_copy(
        update={
            "sources": tuple(storage.absolute(source) for source in config.sources),
            "output": storage.absolute(config.output),
            "student": sides[0],
            "teachers": tuple(sides[1:]),
        }
    )


def plan_dataset(config: PreprocessConfig, runner: Runner, progress: Progress | None = None) -> RunPlan:
    """Plans and freezes the plan in the output. config: absolute (`absolute_config`)."""
    storage.clean_staging(storage.join(config.output, "runs", "staging"))
    run = make_plan(config, runner, progress)
    return freeze_plan(run, config.output, fixed_render_date=config.render_date is not None)


def build_parts(run: RunPlan, config: PreprocessConfig, runner: Runner, progress: Progress | None = None) -> list[PartEntry]:
    """Builds what is missing of every part; their entries in order."""
    jobs = part_jobs(run, config)
    entries = []
    for entry in runner.map(run_part, jobs, lambda job: job.label):
        entries.append(entry)
        if progress is not None:
            progress("build parts", len(entries), len(jobs))
    return entries


def rebuild_part(config: PreprocessConfig, index: int, *, runner: Runner | None = None) -> PartEntry:
    """`rebuild_parts` of one part."""
    (entry,) = rebuild_parts(config, [index], runner=runner)
    return entry


def rebuild_parts(config: PreprocessConfig, indices: Sequence[int], *, runner: Runner | None = None) -> list[PartEntry]:
    """Rebuilds what is damaged of these parts of a published dataset; everything else stays as it is. Their entries, in order.

    Raises ConfigError when the dataset has no such part, or when a rebuilt one is not the published one, DatasetMismatchError when
    the sources are no longer the same: nothing is written then.
    """
    config = absolute_config(config)
    if runner is None:
        with WorkerPool(min(config.workers or default_workers(), max(1, len(indices)))) as pool:
            return rebuild_parts(config, indices, runner=pool)
    dataset = open_dataset(config.output)
    num_parts = len(dataset.manifest.parts)
    for index in indices:
        if not 0 <= index < num_parts:
            raise ConfigError(f"{config.output} has parts 0 to {num_parts - 1}, not {index}")
    jobs = part_jobs(_published_plan(config, dataset.manifest, runner), config)
    for index in indices:
        _drop_other_record(config.output, dataset.manifest.parts[index])
    entries = list(runner.map(run_part, [jobs[index] for index in indices], lambda job: job.label))
    for index, entry in zip(indices, entries, strict=True):
        if entry != dataset.manifest.parts[index]:
            raise ConfigError(
                f"part {index} of {config.output} came out other than manifest.json says: run preprocess, which writes what differs "
                "anew"
            )
    return entries


def restore_plan(config: PreprocessConfig, *, runner: Runner | None = None) -> None:
    """Makes the plan of a published dataset again and writes plan.json where it is damaged or gone.

    Raises ConfigError or DatasetMismatchError when sources, tokenizers or libraries are no longer those it was made with.
    """
    config = absolute_config(config)
    if runner is None:
        with WorkerPool(1) as pool:
            return restore_plan(config, runner=pool)
    _published_plan(config, open_dataset(config.output).manifest, runner)


def restore_manifest(config: PreprocessConfig, *, runner: Runner | None = None) -> Manifest:
    """Writes the manifest of a published dataset anew, from plan.json and its parts. A part that does not hold, or of which manifest
    and record say different things, is rebuilt.

    Raises ConfigError or DatasetMismatchError when sources, tokenizers or libraries are no longer those that plan.json names.
    """
    config = absolute_config(config)
    if runner is None:
        with WorkerPool(config.workers) as pool:
            return restore_manifest(config, runner=pool)
    run = _published_plan(config, None, runner)
    try:
        readable = open_dataset(config.output).manifest.parts
    except DatasetError:
        readable = ()
    for entry in readable:
        _drop_other_record(config.output, entry)
    return publish(run, build_parts(run, config, runner), config, build_projections(run, config, runner))


def restore_projections(config: PreprocessConfig, *, runner: Runner | None = None) -> None:
    """Builds the projections of a published dataset again where they are damaged or gone. Raises as `restore_plan` does."""
    config = absolute_config(config)
    if runner is None:
        with WorkerPool(1) as pool:
            return restore_projections(config, runner=pool)
    build_projections(_published_plan(config, open_dataset(config.output).manifest, runner), config, runner)


def _drop_other_record(output: str, published: PartEntry) -> None:
    """Removes the record of a part that is not its entry in the manifest: one of them is damaged, so nothing may rest on it."""
    record = read_record(output, published.index)
    if record is not None and record != published and len(record.teacher_digests) == len(published.teacher_digests):
        storage.remove(storage.join(output, record_path(published.index)))


def _published_plan(config: PreprocessConfig, manifest: Manifest | None, runner: Runner) -> RunPlan:
    """The plan that a dataset was published with, made again, plan.json restored; nothing is written while it is another.

    manifest: None where it is damaged; plan.json then says alone which plan it was.
    """
    run = make_plan(config, runner)
    existing = _existing_plan(config.output)
    render_date = manifest.render_date if manifest is not None else existing.render_date if existing is not None else None
    if config.render_date is None:
        run = run.with_plan(run.plan.model_copy(update={"render_date": render_date}))
    if manifest is not None and hashlib.sha256(plan_bytes(run.plan)).hexdigest() == manifest.plan_sha256:
        url = storage.join(config.output, "plan.json")
        if not storage.exists(url) or storage.sha256(url) != manifest.plan_sha256:
            write_plan(run.plan, config.output)
        return run
    if manifest is None and existing == run.plan:
        return run
    if existing is not None:
        agree(existing, run.plan, config.output)
    raise ConfigError(
        f"{config.output} was built with other library versions or other teachers, and one part of it would come out other than the "
        "rest: run preprocess with its configuration to build and publish all anew"
    )


def _existing_plan(output: str) -> Plan | None:
    try:
        return read_plan(output)
    except ValidationError:  # damaged
        return None

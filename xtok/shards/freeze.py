"""Freezing the plan in the output folder: the first run writes plan.json, every later one must agree with it.

What may differ: library versions and the format version (parts are then built anew), and teachers added at the end of the list.
Everything else is refused with both values.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pydantic import ValidationError

from schemas.manifest import Manifest
from schemas.plan import Plan, PlannedSide, PlannedSource
from xtok import storage
from xtok.errors import DatasetMismatchError
from xtok.shards.plan import RunPlan, plan_bytes, read_plan

__all__ = ["agree", "freeze_plan", "write_plan"]

_SIDE_FIELDS = ("content_fingerprint", "context_length", "add_special_tokens", "chat")


def freeze_plan(run: RunPlan, output: str, *, fixed_render_date: bool) -> RunPlan:
    """Writes plan.json, or checks that the one which is there agrees; returns the plan to follow.

    fixed_render_date: the configuration names the date itself; else a plan that is there keeps its own. Raises
    DatasetMismatchError naming what differs, StorageError when the folder cannot be written.
    """
    try:
        existing = read_plan(output)
    except ValidationError as error:
        published = storage.exists(storage.join(output, "manifest.json"))
        way_out = f"`xtok repair {output}` writes it anew" if published else "choose another output or remove the folder"
        raise DatasetMismatchError(
            f"{output}/plan.json is no plan of this library ({error.error_count()} errors): {way_out}"
        ) from error
    plan = run.plan
    if existing is not None:
        if existing.render_date is not None and not fixed_render_date:
            plan = plan.model_copy(update={"render_date": existing.render_date})
        agree(existing, plan, output)
        _keep_published_teachers(plan, output)
    if plan != existing and not (existing is not None and _stays_published(existing, plan, output)):
        # Parts are about to change under the published manifest (other library versions): what is there is no dataset until then.
        storage.remove(storage.join(output, "manifest.json"))
        if existing is not None:
            write_plan(plan, output)
        elif not storage.write_new(storage.join(output, "plan.json"), plan_bytes(plan), _staging(output)):
            return freeze_plan(run, output, fixed_render_date=fixed_render_date)  # another run has frozen one since
    return run.with_plan(plan)


def write_plan(plan: Plan, output: str) -> None:
    """Writes plan.json in one step."""
    storage.write_atomic(storage.join(output, "plan.json"), plan_bytes(plan), _staging(output))


def _staging(output: str) -> str:
    return storage.join(output, "runs", "staging")


def _stays_published(existing: Plan, plan: Plan, output: str) -> bool:
    """True where teachers are added to a published dataset: it stays as it is, plan included, until the new manifest is due."""
    without_added = plan.model_copy(update={"teachers": plan.teachers[: len(existing.teachers)]})
    return without_added == existing and storage.exists(storage.join(output, "manifest.json"))


def agree(existing: Plan, plan: Plan, output: str) -> None:
    """Raises DatasetMismatchError unless both plans are of the same dataset, teachers added at the end aside."""
    _compare(output, "mode", existing.mode, plan.mode)
    _compare(output, "render_date", existing.render_date, plan.render_date)
    for name in sorted(existing.config.keys() | plan.config.keys()):
        _compare(output, name, existing.config.get(name), plan.config.get(name))
    _agree_on_sources(existing.sources, plan.sources, output)
    _agree_on_side("student", existing.student, plan.student, output)
    for index, (old, new) in enumerate(zip(existing.teachers, plan.teachers, strict=False)):
        _agree_on_side(f"teachers[{index}]", old, new, output)


def _agree_on_sources(existing: tuple[PlannedSource, ...], now: tuple[PlannedSource, ...], output: str) -> None:
    for old, new in zip(existing, now, strict=False):
        if (old.name, old.sha256) != (new.name, new.sha256):
            what = f"source {new.name} changed" if old.name == new.name else f"source {old.name} is now {new.name}"
            _refuse(output, f"{what}: {old.num_bytes} bytes, sha256 {old.sha256[:12]}…, now {new.num_bytes}, {new.sha256[:12]}…")
    if len(existing) != len(now):
        longer = existing if len(existing) > len(now) else now
        change = "is gone" if longer is existing else "is new"
        _refuse(output, f"source {longer[min(len(existing), len(now))].name} {change}: {len(existing)} sources, now {len(now)}")


def _agree_on_side(label: str, old: PlannedSide, new: PlannedSide, output: str) -> None:
    for name in _SIDE_FIELDS:
        field = f"{label} ({old.name}, now {new.name}): {name}"
        _compare(output, field, getattr(old, name), getattr(new, name))


def _keep_published_teachers(plan: Plan, output: str) -> None:
    url = storage.join(output, "manifest.json")
    if not storage.exists(url):
        return
    try:
        published = Manifest.model_validate_json(storage.read_bytes(url))
    except ValidationError:
        return  # written by another version: it is replaced
    if len(published.teachers) > len(plan.teachers):
        _refuse(output, f"it was published with {len(published.teachers)} teachers, the configuration names {len(plan.teachers)}")


def _compare(output: str, field: str, old: Any, new: Any) -> None:
    if old != new:
        _refuse(output, f"{field} was {old!r}, is now {new!r}")


def _refuse(output: str, difference: str) -> NoReturn:
    raise DatasetMismatchError(
        f"{output} holds a dataset of another configuration: {difference}. "
        "Choose another output, or remove that folder to build anew."
    )

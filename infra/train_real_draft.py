"""Train a two-layer DFlash draft of a small real model for a few hundred steps on a CPU, and show what it is worth.

    python infra/train_real_draft.py MODEL_FOLDER --mask-token '<gh_stars>' [--chats FILE ...] [--steps 300] [--out FOLDER]

The target answers the prompts of the chats itself (greedy), the draft learns these answers, and held-out prompts are decoded with
the untrained draft, with a guess of the most frequent token, and with the trained draft. Prints accepted length, acceptance by slot
and time as a table. Data: the bundled chats, and those of $XTOK_SHARED when it is set.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from xtok.draft.baselines import UnigramDrafter, most_frequent_token
from xtok.draft.dflash import DFlashConfig, DFlashDraftModel
from xtok.draft.drafter import ModelDrafter
from xtok.draft.export import export_draft
from xtok.draft.prompts import chat_prompt_ids
from xtok.draft.speculate import SpeculationReport, evaluate_drafter, load_target, stop_token_ids
from xtok.draft.target import FrozenTarget, TargetFeatures
from xtok.draft.training import DraftBatch, DraftStepSettings, draft_step
from xtok.errors import ConfigError
from xtok.tokenizers import load_tokenizer

BUNDLED = Path(__file__).resolve().parent / "bundled" / "chats.jsonl"


def chat_prompts(files: Sequence[str], tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Distinct prompts of at most `max_tokens` tokens, in file order; rows that are no plain chat are passed over."""
    prompts: dict[tuple[int, ...], None] = {}
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            messages = row.get("messages") or []
            if row.get("tools") or not messages or any(not isinstance(m.get("content"), str) for m in messages):
                continue
            try:
                ids = chat_prompt_ids([{"role": m["role"], "content": m["content"]} for m in messages], tokenizer)
            except ConfigError:
                continue
            if len(ids) <= max_tokens:
                prompts.setdefault(tuple(ids))
    return [list(prompt) for prompt in prompts]


@torch.no_grad()
def own_answers(model: Any, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int = 16) -> list[list[int]]:
    """The target's greedy answers, stop token kept; prompts of similar length share a batch."""
    stops = sorted(stop_token_ids(model))
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.tensor([[stops[0]] * (width - len(prompts[i])) + prompts[i] for i in chosen])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=stops[0])
        for i, row in zip(chosen, out[:, width:].tolist(), strict=True):
            end = next((k + 1 for k, token in enumerate(row) if token in stops), len(row))
            answers[i] = row[:end]
        print(f"  answered {min(start + batch_size, len(order))} of {len(order)} prompts", flush=True)
    return answers


def training_rows(target: FrozenTarget, rows: Sequence[tuple[list[int], list[int]]], layers: Sequence[int]) -> list[Any]:
    """(ids [S], loss mask [S], context features [S, T * H], final hidden [S, H]) of each row, made once."""
    made = []
    for prompt, answer in rows:
        ids = torch.tensor([prompt + answer])
        features = target.features(ids, layers)
        mask = (torch.arange(ids.shape[1]) >= len(prompt)).float()
        made.append((ids[0], mask, features.context[0], features.final_hidden[0]))
    return made


def batches(rows: Sequence[Any], batch_size: int, num_steps: int) -> Iterator[tuple[int, DraftBatch, TargetFeatures]]:
    """Epochs of shuffled rows, padded on the right: (epoch, batch, its features)."""
    epoch, queue = -1, []
    for _ in range(num_steps):
        if len(queue) < batch_size:
            epoch += 1
            queue += torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch)).tolist()
        chosen, queue = queue[:batch_size], queue[batch_size:]
        ids, mask, context, hidden = (
            torch.nn.utils.rnn.pad_sequence([rows[i][k] for i in chosen], batch_first=True) for k in range(4)
        )
        yield epoch, DraftBatch(ids, mask, torch.tensor(chosen)), TargetFeatures(context, hidden)


def train(model: DFlashDraftModel, target: FrozenTarget, rows: Sequence[Any], options: argparse.Namespace) -> None:
    """AdamW with warm-up and cosine; prints loss and acceptance of the training batches as it goes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    warm_up = max(1, options.steps // 25)
    began = time.perf_counter()
    for step, (epoch, batch, features) in enumerate(batches(rows, options.batch_size, options.steps)):
        progress = max(0.0, (step - warm_up) / max(1, options.steps - warm_up))
        scale = min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * scale
        report = step % 25 == 0 or step == options.steps - 1
        settings = DraftStepSettings(num_anchors=options.anchors, epoch=epoch, token_chunk_size=256, with_metrics=report)
        result = draft_step(model, target, batch, settings, features=features)
        loss = result.loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if report:
            slots = " ".join(f"{value:.2f}" for value in result.metrics["greedy_acceptance_by_slot"].value().tolist())
            tau = float(result.metrics["tau_greedy"].value())
            seconds = time.perf_counter() - began
            print(f"  step {step:4d} loss {float(loss.detach()):.3f} tau {tau:.2f} slots {slots} {seconds:.0f} s", flush=True)


def describe(name: str, report: SpeculationReport) -> str:
    """One row of the printed table."""
    rounds = sum(len(result.round_lengths) for result in report.results)
    equal = f"{report.num_equal} of {len(report.results)}" if report.num_equal is not None else "-"
    return f"| {name} | {report.tau:.3f} | {rounds} | {max(report.length_counts)} | {equal} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder of the target, with its tokenizer")
    parser.add_argument(
        "--mask-token", required=True, help="a reserved token of the target's vocabulary, no padding or end of text"
    )
    parser.add_argument(
        "--chats", nargs="*", default=None, help="JSONL files with messages; default the bundled ones and $XTOK_SHARED"
    )
    parser.add_argument("--out", default=None, help="export the trained draft here")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--anchors", type=int, default=16, help="anchors a row")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=120, help="training prompts")
    parser.add_argument("--held-out", type=int, default=8, help="prompts kept for evaluation")
    parser.add_argument("--max-prompt-tokens", type=int, default=80)
    parser.add_argument("--answer-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    files = options.chats
    if files is None:
        shared = os.environ.get("XTOK_SHARED")
        files = [str(BUNDLED), *([f"{shared}/data/chats.jsonl"] if shared else [])]

    tokenizer = load_tokenizer(options.model).transformers_tokenizer
    mask_token_id = tokenizer.get_vocab().get(options.mask_token)
    if mask_token_id is None:
        parser.error(f"{options.model} has no token {options.mask_token!r}: name a reserved one of its vocabulary")
    model = load_target(options.model)
    target = FrozenTarget(model)
    target.check_head()
    config = DFlashConfig.from_target(
        model.config,
        mask_token_id=mask_token_id,
        num_draft_layers=2,
        block_size=options.block_size,
    )
    draft = DFlashDraftModel(config)
    size = sum(parameter.numel() for parameter in draft.parameters())
    print(
        f"draft: {size / 1e6:.1f} M parameters, taps {config.target_layer_ids}, mask {config.mask_token_id}, block {config.block_size}"
    )

    prompts = chat_prompts(files, tokenizer, options.max_prompt_tokens)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [prompts[i] for i in order[: options.prompts + options.held_out]]
    held_out, prompts = prompts[: options.held_out], prompts[options.held_out :]
    print(f"{len(prompts)} training prompts, {len(held_out)} held out")
    answers = own_answers(model, prompts, options.answer_tokens)
    rows = training_rows(target, list(zip(prompts, answers, strict=True)), config.target_layer_ids)
    print(f"{sum(map(len, answers))} answer tokens to learn from")

    def evaluate(name: str, drafter: Any, *, check: bool = False) -> str:
        report = evaluate_drafter(
            target, drafter, held_out, max_new_tokens=options.answer_tokens, stop_ids=stop_token_ids(model), check=check
        )
        line = describe(name, report)
        print(line, flush=True)
        return line

    table = [evaluate("untrained draft", ModelDrafter(draft, target))]
    table.append(evaluate("most frequent token", UnigramDrafter(most_frequent_token(answers), config.num_draft_slots)))
    train(draft, target, rows, options)
    table.append(evaluate(f"draft after {options.steps} steps", ModelDrafter(draft, target), check=True))
    print("| drafter | tau | rounds | longest | equal to plain greedy |", "|---|---|---|---|---|", *table, sep="\n")
    if options.out:
        export_draft(draft, options.out)
        print(f"exported to {options.out}")


if __name__ == "__main__":
    main()

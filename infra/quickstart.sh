#!/usr/bin/env bash
# From a fresh checkout to a distilled student with its draft: installs into .venv, runs the preprocess flow on bundled texts, then on
# bundled chats, trains on these, and shows the results. Needs Python >= 3.11 and a package index; no hub, no GPU. Safe to run again.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. infra/environment.sh
ensure_environment train

echo
echo "== 1. python -m flows.preprocess                    (texts in, aligned Parquet shards out)"
python -m flows.preprocess --config infra/configs/preprocess.yaml

echo
echo "== 2. the published table, through polars"
python - <<'EOF'
import polars as pl

with pl.Config(tbl_rows=6, fmt_str_lengths=40):
    print(
        pl.scan_parquet("out/bundled/teacher=*/*.parquet", hive_partitioning=True)
        .select("sample_id", "teacher", "coverage", pl.col("input_ids").list.len().alias("tokens"))
        .sort("sample_id", "teacher")
        .collect()
    )
EOF

echo
echo "== 3. xtok inspect out/bundled --row udhr-eng-0     (student over teacher, chunk by chunk)"
xtok inspect out/bundled --row udhr-eng-0 --teacher 0 --lines 3

echo
echo "== 4. one batch for training"
python - <<'EOF'
from xtok.loader import AlignedShardLoader

batch = next(iter(AlignedShardLoader("out/bundled", batch_size=8)))
for name, value in batch.items():
    print(f"{name:<42}", f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else f"list of {len(value)}")
EOF

echo
echo "== 5. chats: xtok preprocess infra/configs/preprocess_chat.yaml   (each model's own template, the final turn supervised)"
xtok preprocess infra/configs/preprocess_chat.yaml
xtok inspect out/bundled_chat --row bundled-39 --teacher 0 --lines 4

echo
echo "== 6. two tiny teachers learn the chats             (models of random weights have nothing to teach)"
python infra/train_bundled_teachers.py

echo
echo "== 7. python -m flows.train                         (they teach a student of another tokenizer; then its draft learns)"
python -m flows.train --config infra/configs/train_distill.yaml
python -m flows.train --config infra/configs/train_draft.yaml
python - <<'EOF'
import json

for run, names in (("out/distilled", ("kd_loss", "perplexity")), ("out/draft", ("draft_loss", "tau"))):
    lines = [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
    first, *_, last = (line for line in lines if line["kind"] == "evaluation")
    figures = "   ".join(f"{name} {first[name]:.4g} -> {last[name]:.4g}" for name in names)
    print(f"{run:<14} step 0 -> {last['step']}:   {figures}   plot {run}/training.png")
EOF

echo
echo "== 8. xtok speculate                                (accepted length of a round, against what the draft has to beat)"
xtok speculate out/distilled/export/student out/draft/export/draft --prompts infra/bundled/chats.jsonl --limit 12 \
    --max-new-tokens 32 --baselines 2>out/speculate.log | grep -E "^tau|^greedy" || { cat out/speculate.log >&2; exit 1; }

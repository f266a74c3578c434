#!/usr/bin/env bash
# From a fresh checkout to aligned batches: installs into .venv, runs the preprocess flow on bundled texts, then on bundled chats, and
# shows the results. Needs Python >= 3.11 and a package index; no hub, no GPU. Safe to run again.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. infra/environment.sh
ensure_environment base

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

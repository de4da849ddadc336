#!/usr/bin/env bash
# What needs a GPU, in parts that each have a time limit: the tests, the runs behind BENCHMARKS.md, a model that learns.
#   tests/scripts/on_gpus.sh FOLDER PART...        parts run in order; `all` are those of one GPU, in an order that pays
# FOLDER/summary.txt says how each part ended and how long it took; beside it lie its log and its results, written as it
# goes, so that what a broken-off part has found stays. smollm2 needs MODEL=<folder of SmolLM2-135M-Instruct> (docs/models.md)
# and `pip install trl`. `two` and `four` need that many GPUs.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd); shift
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
bench="platform=cuda model=bench_1b launch.threads_per_worker=8"
step="python -m trainer.bench.training $bench model.vocab_size=32768 rollout.max_new_tokens=256 algo.prompts_per_step=32"
memory="cycles or path or host_bytes or storage or wrong or tag_takes or micro_batches"

limited() { # NAME SECONDS COMMAND...: run it, log it, sum it up
  local name=$1 limit=$2 start=$SECONDS; shift 2
  timeout --signal=INT --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1
  echo "$name: exit code $? after $((SECONDS - start)) of at most $limit s" | tee -a "$out/summary.txt"
}
tests() { limited "$1" "$2" python -m pytest -q -p no:cacheprovider --durations=5 "${@:3}"; }

bits() { tests bits 260 tests/gpu/test_sleep.py -k every_policy; }
kernels() { tests kernels 280 tests/gpu -k "not every_policy and not ($memory)"; }
memory() { tests memory 320 tests/gpu/test_sleep.py -k "$memory"; }
step() {
  limited step 330 $step algo.micro_batch_tokens=18432 'bench.cases=[resident,auto,lean,plain,plain_liger]' bench.steps=4 \
    hydra.run.dir="$out/step"
}
rooms() {
  limited rooms 150 $step algo.micro_batch_tokens=4096 'bench.cases=[lean,resident,auto]' 'bench.rooms_gib=[36,48]' \
    bench.steps=4 hydra.run.dir="$out/rooms"
}
ragged() {
  limited ragged 180 python -m trainer.bench.training $bench model.max_length=2048 rollout.max_new_tokens=1280 \
    algo.prompts_per_step=16 algo.micro_batch_tokens=16384 algo.micro_batch_size=16 \
    'bench.cases=[padded,resident,packed]' bench.steps=4 hydra.run.dir="$out/ragged"
}
long() {
  limited long 120 python -m trainer.bench.passes $bench model.max_length=65536 training.recompute=full \
    'bench.cases=[liger]' 'bench.shapes=[1x65536]' hydra.run.dir="$out/long"
}
swap() { limited swap 100 python -m trainer.bench $bench 'bench.cases=[swap,swap_rebuild]' hydra.run.dir="$out/swap"; }
keepers() {
  limited keepers 160 python -m trainer.bench $bench 'bench.cases=[rebuild,packed,disk]' memory.disk.path="$out" \
    hydra.run.dir="$out/keepers"
}
rollout() { limited rollout 240 python -m trainer.bench.rollout $bench hydra.run.dir="$out/rollout"; }
smollm2() { # alone for the seconds of a step; then three seeds of each side by side for the curves
  local given="experiment=smollm2 model.path=$MODEL" few="algo.num_steps=12 algo.evaluate_every=null seed=1" seed
  limited smollm2_alone 90 python -m trainer $given algo=grpo $few hydra.run.dir="$out/alone_grpo"
  limited trl_alone 90 python -m tests.scripts.beside_trl train "$out/alone_trl" $given algo=grpo $few
  for seed in 1 2 3; do
    limited "trl_$seed" 560 python -m tests.scripts.beside_trl train "$out/trl_$seed" $given algo=grpo seed=$seed &
    (limited "grpo_$seed" 280 python -m trainer $given algo=grpo seed=$seed hydra.run.dir="$out/grpo_$seed"
      limited "ppo_$seed" 280 python -m trainer $given seed=$seed hydra.run.dir="$out/ppo_$seed") &
  done
  wait
  local runs="$out/NAME_1,$out/NAME_2,$out/NAME_3"
  limited curves 60 python -m tests.scripts.beside_trl draw "$out/smollm2.png" \
    "Torpor, GRPO=${runs//NAME/grpo}:$out/alone_grpo" "TRL, GRPO=${runs//NAME/trl}:$out/alone_trl"
}
two() { tests two 560 tests/gpu; }
four() { # two models of 20e9 parameters, which no single GPU holds: two steps, planned beside measured
  limited four 560 python -m trainer platform=cuda model=bench_1b model.layers=44 model.hidden_size=6144 model.ffn_size=20480 \
    model.heads=48 model.kv_heads=8 parallel.tp=4 launch.nproc=4 memory=rebuild offload=auto algo.warmup_steps=0 \
    algo.num_steps=2 algo.evaluate_every=null training.recompute=full hydra.run.dir="$out/four"
}

[ "$*" = all ] && set -- bits kernels step swap smollm2 keepers rooms ragged long rollout memory
for part in "$@"; do "$part"; done

"""The real torch_memory_saver on a real GPU: run with ``python -m pytest tests/gpu`` (about eight minutes)."""

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
import torch

from tests.helpers.composing import SMALL, config_of, footprint_of
from tests.helpers.gpu_worker import run_scenarios
from tests.helpers.invariance import CASES, numbers, scheduled_cases
from tests.helpers.invariance_worker import run_matrix
from tests.helpers.recording import lasting
from trainer.command.launch import launch
from trainer.command.launch_environment import worker_environment

POLICIES = ("full", "no_grads", "lean", "rebuild")
# 30M parameters a role: large enough that bytes per parameter mean something.
MEDIUM = ("model.layers=4", "model.hidden_size=768", "model.ffn_size=2048", "model.heads=12", "model.kv_heads=4")
# Experts of 3 MiB and more, so that one left out would be seen.
MIXTURE = ("model=tiny_moe", "model.hidden_size=512", "model.ffn_size=1024")
SHORT = ("algo.warmup_steps=2", "algo.prompts_per_step=8", "algo.responses_per_prompt=2", "algo.minibatches=2")
SHORT = (*SHORT, "algo.micro_batch_size=8", "algo.num_steps=3", "algo.heldout_prompts=8")
# How the saver keeps what it keeps: page-locked buffers made anew in every sleep, and pageable ones.
KEPT_BY_SAVER = ("memory=lean", "memory.actor.optim_keeper=saver", "memory.critic.optim_keeper=saver")
OTHER_SAVERS = {
    "unretained": (*KEPT_BY_SAVER, "memory.retain_cpu_backup=false"),
    "mmap": (*KEPT_BY_SAVER, "memory.cpu_backup_backend=mmap"),
}
SCENARIOS = dict.fromkeys(POLICIES, ("paths", "cycles"))
SCENARIOS |= {"mixture": ("cycles", "storages"), "unretained": ("cycles",), "mmap": ("cycles",)}
SCENARIOS["lean"] = ("paths", "cycles", "wrong_calls", "storages", "backup_overhead", "forward_peaks")
NODE = ("memory.tags=node",)
MIB = 2**20


def on_gpu(worker, payload, log_dir, *, nproc=1):
    environment = worker_environment(platform="cuda", sleeps=True, threads_per_worker=4)
    return launch(worker, payload, nproc=nproc, log_dir=log_dir, environment=environment)


def has_nvcomp():
    return find_spec("nvidia") is not None and find_spec("nvidia.nvcomp") is not None


def bits_of(name, log_dir, *overrides, nproc=1):
    small = [override for override in SMALL if not override.startswith("platform")]
    strict = ("platform=cuda", "platform.deterministic=true", "memory.poison=true")
    case = CASES[name] if name in CASES else scheduled_cases(nproc=nproc)[name]
    case = case if any(override.startswith("offload=") for override in case) else (*case, "offload=train")
    config = config_of(*small, *strict, *case, f"launch.nproc={nproc}", *overrides)
    return numbers(on_gpu(run_matrix, ({name: config}, None), log_dir / name, nproc=nproc)[name])


def config_of_policy(policy):
    """The config of a memory policy, of another way of the saver's, or of a mixture of experts."""
    model = (*MIXTURE, "memory=lean") if policy == "mixture" else MEDIUM
    memory = OTHER_SAVERS.get(policy, (f"memory={policy}",) if policy in POLICIES else ())
    on_gpu = ("platform=cuda", "offload=train", "memory.poison=true", "checkpoint.every_steps=1")
    return config_of(*model, *memory, *SHORT, *on_gpu)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """policy -> what its scenarios found; each policy is played when first asked for."""
    found = {}

    def of_policy(policy):
        if policy not in found:
            directory = tmp_path_factory.mktemp(policy)
            payload = (SCENARIOS[policy], config_of_policy(policy), directory)
            found[policy] = on_gpu(run_scenarios, payload, directory / "logs")
        return found[policy]

    return of_policy


def test_every_policy_computes_the_bits_of_offload_none(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(4, mp_context=spawn) as pool:  # fresh workers each: a process keeps its saver
        names = [name for name in (*CASES, *scheduled_cases(nproc=1)) if "packed" not in name or has_nvcomp()]
        bits = {name: pool.submit(bits_of, name, tmp_path) for name in names}
        for name in names:
            assert bits[name].result() == bits["none"].result(), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_communicators_that_are_destroyed_while_models_sleep_change_no_bit(tmp_path):
    kept = bits_of("none", tmp_path, nproc=2)
    assert bits_of("rebuild", tmp_path, "offload.destroy_process_groups=true", nproc=2) == kept


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", ["lean", "none"])
def test_one_page_locked_copy_of_two_ranks_keeps_every_bit(case, tmp_path):
    none, node = (bits_of(name, tmp_path, *tags, nproc=2) for name, tags in (("none", ()), (case, NODE)))
    assert node == none


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_ranks_that_share_sequences_keep_every_bit(packs, tmp_path):
    packed = ("training.packing=true", "algo.micro_batch_tokens=64", "training.recompute=full") if packs else ()
    none, rebuild = (bits_of(name, tmp_path, "parallel.cp=2", *packed, nproc=2) for name in ("none", "rebuild"))
    assert rebuild == none


@pytest.mark.parametrize("policy", SCENARIOS)
def test_ten_cycles_keep_every_bit_and_memory_stays_flat(policy, measured):
    result = measured(policy)["cycles"]
    assert all(result["kept"])
    assert max(result["asleep_gpu"][2:]) - min(result["asleep_gpu"][2:]) <= 4 * MIB
    assert max(result["asleep_rss"][2:]) - min(result["asleep_rss"][2:]) <= 32 * MIB


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gpu_is_as_empty_after_every_path(policy, measured):
    result = measured(policy)["paths"]
    used = result["used"]
    assert result["updated"] is False
    assert {path.partition(", ")[2] for path in used} >= {"rollout", "train_actor", "checkpoint", "evaluate"}
    assert max(used.values()) - min(used.values()) <= 4 * MIB, used
    # Kernels and workspaces; one communicator of a group of one rank would be 390 MiB.
    assert max(used.values()) - measured(policy)["baseline"]["gpu_used_bytes"] <= 360 * MIB


def kept_on_host(result):
    """Bytes that the regions' owners say they keep on the host while everything sleeps."""
    slept = {(r["role"], r["kind"]): r for r in result["paths"]["records"] if r.get("state") == "asleep"}
    return sum(record["backup_bytes"] for record in slept.values())


def pss_growth(result):
    """Growth of the process's proportional set since before the build; CUDA's libraries and kernels are in it."""
    return result["paths"]["asleep"]["pss_bytes"] - result["baseline"]["pss_bytes"]


@pytest.mark.parametrize("policy", POLICIES)
def test_host_bytes_are_those_of_the_plan_and_of_the_operating_system(policy, measured):
    result = measured(policy)
    counted, rebuilt = kept_on_host(result), kept_on_host(measured("rebuild"))
    predicted = footprint_of(config_of_policy(policy), vocab_size=320)
    planned = sum(predicted.host_asleep_bytes(role) for role in ("actor", "critic"))
    assert counted == pytest.approx(planned, rel=0.02)
    assert pss_growth(result) == pytest.approx(pss_growth(measured("rebuild")) + counted - rebuilt, abs=96 * MIB)


def test_wrong_calls_are_python_errors_and_lose_nothing(measured):
    result = measured("lean")["wrong_calls"]
    assert result["kept"]
    assert result["other"] == 2**20
    assert len(result["errors"]) == 3
    assert "are missing" in result["errors"][-1]


@pytest.mark.parametrize("model", ["lean", "mixture"])
def test_no_large_storage_is_left_out_of_the_regions(model, measured):
    result = measured(model)["storages"]
    assert result["segments"] > 0
    assert result["uncovered"] == {}
    assert result["pinned"]


def test_a_weights_tag_takes_the_bytes_of_its_tensors(measured):
    result = measured("lean")["backup_overhead"]
    assert result["counted_bytes"] <= 1.02 * result["tensor_bytes"]
    assert result["pss_bytes"] <= 1.02 * result["tensor_bytes"] + 4 * MIB


def test_forward_passes_keep_no_logits_of_earlier_micro_batches(measured):
    few, many = measured("lean")["forward_peaks"]
    per_row = 64 * 2 * 4 * 8  # log-prob and entropy of 64 tokens, fp32, and as much again for joining them, rounded up
    assert many - few <= (256 - 16) * per_row


@pytest.mark.skipif(
    find_spec("liger_kernel") is None and find_spec("transformer_engine") is None, reason="needs Liger's kernels or TE"
)
@pytest.mark.parametrize("model", [(), ("model.qk_norm=true",), ("model=tiny_moe",), ("model.qkv_bias=true",)])
def test_other_kernels_compute_what_torch_does(model, tmp_path):
    config = config_of(*(model if "model=tiny_moe" in model else (*MEDIUM, *model)), *SHORT, "platform=cuda")
    found = on_gpu(run_scenarios, (("layer_parts",), config, tmp_path), tmp_path / "layer_parts")["layer_parts"]
    cores = {"kernels=liger": "FusedSelfAttention, CausalAttention", "kernels=te": "SelfAttention, CausalAttention"}
    cores["attention_backend=te"] = "SelfAttention, TEDotProductAttention"
    for name, (logits, gradients, names) in found.items():
        assert logits < 0.02, name
        assert gradients < 0.05, name
        assert names == cores[name]


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize("setting", ["model.attention_backend=te", "model.kernels=te"])
def test_with_transformer_engine_too_sleeping_changes_no_bit(setting, tmp_path):
    bits = {name: bits_of(name, tmp_path, setting) for name in ("none", "lean", "rebuild")}
    assert bits["lean"] == bits["rebuild"] == bits["none"]


@pytest.mark.parametrize("kernels", ["torch", "liger"])
def test_with_either_kernels_sleeping_changes_no_bit(kernels, tmp_path):
    if kernels == "liger":
        pytest.importorskip("liger_kernel")
    bits = {name: bits_of(name, tmp_path, f"model.kernels={kernels}") for name in ("none", "rebuild")}
    assert bits["rebuild"] == bits["none"]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_before_anything_starts(variable, tmp_path):
    command = [sys.executable, "-m", "trainer", "platform=cuda", f"hydra.run.dir={tmp_path}/run"]
    environment = {**os.environ, variable: "expandable_segments:True"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert variable in done.stderr
    assert "expandable_segments" in done.stderr


def test_a_resumed_run_equals_the_unbroken_one(tmp_path):
    """Every number, and the bits of weights and moments: saved in the background while the models sleep, under one
    policy, and resumed under another."""
    small = [override for override in SMALL if not override.startswith("platform")]
    common = (*small, "platform=cuda", "offload=train", "platform.deterministic=true", "checkpoint.every_steps=1")

    def last_record(name, *overrides):
        command = [sys.executable, "-m", "trainer", *common, f"hydra.run.dir={tmp_path / name}", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return lasting(map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()))[-1]

    unbroken = last_record("unbroken", "memory=rebuild", "checkpoint.async_save=true")
    checkpoint = tmp_path / "unbroken" / "checkpoints" / "step_1"
    assert last_record("resumed", "memory=lean", f"resume={checkpoint}") == unbroken
    assert {"weights_sha256/actor", "weights_sha256/critic"} <= unbroken.keys()

"""Scenarios that need the real torch_memory_saver. One fresh worker builds a run and plays several; each returns plain
numbers, which the tests judge. (They also run on a CPU, where the GPU's figures are the process's.)"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.helpers.megatron_world import logits_of
from trainer.config.schema import Config
from trainer.measure.phases import Phases
from trainer.megatron import platform
from trainer.memory.ledger import sample_memory

GIB = 2**30


def run_scenarios(payload: tuple[tuple[str, ...], Config, Path]) -> dict[str, Any]:
    """Name -> result of each scenario, played in this order on one run."""
    names, config, directory = payload
    platform.set_up(config)
    platform.set_up_process_groups(config)
    from trainer import worker

    phases = AsleepPhases(config)
    before = sample_memory()
    run = worker.build(config, phases)
    results: dict[str, Any] = {"baseline": before}
    for name in names:
        results[name] = SCENARIOS[name](run, directory)
    return results


class AsleepPhases(Phases):
    """Takes down what the GPU holds at the end of every phase that leaves all models asleep, caches given back."""

    def __init__(self, config: Config) -> None:
        self.records: list[dict[str, Any]] = []
        super().__init__(self.records.append, gpu=config.platform.name == "cuda")
        self.used_bytes: dict[tuple[int, str], int] = {}

    @contextmanager
    def phase(self, name: str, *, step: int) -> Iterator[None]:
        with super().phase(name, step=step):
            yield
        if name != "sync":  # it ends with the engine awake
            self.used_bytes[step, name] = _used_bytes()


def _used_bytes() -> int:
    sample = sample_memory()
    used = sample["gpu_used_bytes"]
    return sample["rss_bytes"] or 0 if used is None else used


def _checksums(role: Any) -> list[int]:
    from trainer.bench.measure import state_checksums

    return state_checksums(role)


def _train_once(role: Any, *, factor: float = 1.0) -> bool:
    """An optimizer step on noise times ``factor`` -> whether it was taken."""
    device = torch.cuda.current_device()
    tokens = torch.randint(0, 64, (2, 16), device=device)
    positions = torch.arange(16, device=device).expand_as(tokens)
    with role.training():
        (role.model.chunks[0](tokens, positions, None).float().square().mean() * factor).backward()
        role.model.chunks[0].finish_grad_sync()
    return role.step()[0]


def paths(run: Any, directory: Path) -> dict[str, Any]:
    """What the GPU holds after every phase of three steps with checkpoints, and after steps that go wrong."""
    from trainer.checkpoint.state import Checkpoints
    from trainer.loop import Outputs, train

    of_prompts = {"tokenizer": run.prompts.tokenizer, "questions": run.prompts.digest}
    checkpoints = Checkpoints(run.config, directory, resume_from=None, **of_prompts, note=print)
    train(run, Outputs(None, None, None), checkpoints=checkpoints)
    used = {f"step {step}, {name}": size for (step, name), size in run.phases.used_bytes.items() if step >= 2}
    with run.critic.awake():
        updated = _train_once(run.critic, factor=float("inf"))
    used["a step without an update"] = _used_bytes()
    try:
        with run.actor.awake():
            raise KeyError("a failing step")
    except KeyError:
        used["an exception"] = _used_bytes()
    return {"used": used, "updated": updated, "asleep": sample_memory(), "records": list(run.phases.records)}


def cycles(run: Any, directory: Path) -> dict[str, Any]:
    """Ten cycles of sleep and wake-up of both roles, each with an optimizer step in between."""
    roles = (run.actor, run.critic)
    for role in roles:
        role.wake_up()
    asleep_gpu, asleep_rss, kept = [], [], []
    for _ in range(10):
        for role in roles:
            before = _checksums(role)
            role.sleep()
            role.wake_up()
            kept.append(_checksums(role) == before)
            _train_once(role)
        for role in roles:
            role.sleep()
        asleep_gpu.append(_used_bytes())
        asleep_rss.append(psutil.Process().memory_info().rss)
        for role in roles:
            role.wake_up()
    for role in roles:
        role.sleep()
    return {"kept": kept, "asleep_gpu": asleep_gpu, "asleep_rss": asleep_rss}


def wrong_calls(run: Any, directory: Path) -> dict[str, Any]:
    """Sleep twice, wake twice, work asleep, allocate while asleep, no room: errors or no-ops, never a dead process."""
    actor, critic = run.actor, run.critic
    actor.wake_up()
    critic.wake_up()
    actor_before, critic_before = _checksums(actor), _checksums(critic)
    actor.sleep()
    actor.sleep()
    errors = []
    for action in (lambda: actor.switch_to("ref"), lambda: actor.require(("param",))):
        try:
            action()
        except RuntimeError as error:
            errors.append(str(error))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free - GIB // 16, dtype=torch.uint8, device="cuda")
        try:
            actor.wake_up()
        except MemoryError as error:
            errors.append(str(error))
        del hog
        torch.cuda.empty_cache()
    made_while_asleep = torch.ones(1 << 20, device=torch.cuda.current_device())
    actor.wake_up()
    actor.wake_up()
    kept = _checksums(actor) == actor_before and _checksums(critic) == critic_before
    actor.sleep()
    critic.sleep()
    return {"errors": errors, "kept": kept, "other": float(made_while_asleep.sum())}


def storages(run: Any, directory: Path) -> dict[str, Any]:
    """Bytes of every CUDA storage over 1 MiB that lies in no region, with all models awake; whether the optimizer
    state's host copy is page-locked."""
    import torch_memory_saver

    run.actor.wake_up()
    run.critic.wake_up()
    pools = torch_memory_saver.torch_memory_saver._impl._mem_pools.values()
    segments = [(s["address"], s["address"] + s["total_size"]) for pool in pools for s in pool.snapshot()]
    uncovered = {}
    gc.collect()
    for tensor in (item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.is_cuda):
        storage = tensor.untyped_storage()
        covered = any(start <= storage.data_ptr() < end for start, end in segments)
        if storage.nbytes() > 2**20 and not covered:
            uncovered[str(storage.data_ptr())] = storage.nbytes()
    run.actor.sleep()
    run.critic.sleep()
    pinned = run.actor.regions._keeper.host_tensors()[0].is_pinned()
    return {"uncovered": uncovered, "segments": len(segments), "pinned": pinned}


def backup_overhead(run: Any, directory: Path) -> dict[str, float]:
    """Host memory that one more weights tag takes, over the bytes of its tensors: by its own count and by PSS."""
    from trainer.megatron.build import named_tensors

    with run.actor.awake():
        tensor_bytes = sum(tensor.nbytes for _, tensor in named_tensors(run.actor.model.chunks))
        before = sample_memory()["pss_bytes"]
        run.actor.copy_to_tag("another")
        after = sample_memory()["pss_bytes"]
    assert before is not None
    assert after is not None
    counted = run.actor._weights.backuper.bytes_of("another")
    return {"tensor_bytes": tensor_bytes, "counted_bytes": counted, "pss_bytes": after - before}


def forward_peaks(run: Any, directory: Path) -> list[int]:
    """Peak bytes allocated by forward-only passes over 2 and over 32 micro-batches of the same shape."""
    from trainer.data.batch import Sequences
    from trainer.training import step
    from trainer.training.micro_batches import Split

    peaks = []
    with run.actor.awake(kinds=("param",)):
        for rows in (16, 256):
            tokens = torch.randint(0, 64, (rows, 64), device=torch.cuda.current_device())
            batch = Sequences(tokens, torch.ones_like(tokens[:, 1:], dtype=torch.bool))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            step.log_probs(run.actor, batch, temperature=1.0, vocab_size=run.vocab_size, split=Split(8))
            peaks.append(torch.cuda.max_memory_allocated() - start)
    return peaks


def layer_parts(run: Any, directory: Path) -> dict[str, Any]:
    """How far logits and gradients with other kernels, or with another core attention, are from those with torch's, as
    the norm of the difference over the norm; of the gradients the farthest. Of whatever is installed."""
    from dataclasses import replace

    from trainer.megatron.build import build_gpt

    tokens = torch.randint(0, 64, (4, 200), device=torch.cuda.current_device())

    def numbers(**changes: str) -> tuple[list[torch.Tensor], str]:
        model = replace(run.config.model, **{"kernels": "torch", "attention_backend": "sdpa", **changes})
        gpt = build_gpt(model, vocab_size=64, parallel=run.config.parallel, seed=1, value_head=False)
        logits = logits_of(gpt, tokens).float()
        logits.log_softmax(-1)[..., 0].sum().backward()
        attention = gpt.decoder.layers[0].self_attention
        names = f"{type(attention).__name__}, {type(attention.core_attention).__name__}"
        return [logits.detach(), *(weight.grad.float() for weight in gpt.parameters())], names

    expected, _ = numbers()
    found = {}
    for module, changes in (
        ("liger_kernel", {"kernels": "liger"}),
        ("transformer_engine", {"kernels": "te"}),
        ("transformer_engine", {"attention_backend": "te"}),
    ):
        if find_spec(module) is not None:
            actual, names = numbers(**changes)
            gap = [
                ((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(actual, expected, strict=True)
            ]
            found[" ".join(f"{key}={value}" for key, value in changes.items())] = (gap[0], max(gap[1:]), names)
    return found


SCENARIOS: dict[str, Callable[[Any, Path], Any]] = {
    scenario.__name__: scenario
    for scenario in (paths, cycles, wrong_calls, storages, backup_overhead, forward_peaks, layer_parts)
}

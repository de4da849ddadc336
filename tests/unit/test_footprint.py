"""The planner's arithmetic against numbers worked out by hand; tests/dist/test_footprint.py has the real buffers."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from tests.helpers.composing import config_of, footprint_of
from trainer.plan.fit import check_fits, fits
from trainer.plan.layout import Buffer, Parameter, buffer_layout, buffers_of, optimizer_elements, parameters, tag_bytes
from trainer.rollout.engines import planned_bytes

# Llama-3-70B (arXiv:2407.21783, table 3): 128256 * 8192 * 2 + 80 * layer + 8192, layer = 8192 * (8192 + 10240 + 3 *
# 28672 + 2)
LLAMA_70B = (
    *("model.layers=80", "model.hidden_size=8192", "model.ffn_size=28672", "model.heads=64", "model.kv_heads=8"),
    *("algo.prompts_per_step=64", "algo.micro_batch_size=1"),
)
LLAMA_VOCABULARY = 128256
BENCH = ("model=bench_1b", "platform=cuda", "offload=train")
VOCABULARY = 32768
FOUR = ("launch.nproc=4", "algo.micro_batch_size=1")


def plan_of(*overrides, vocab_size=VOCABULARY):
    return footprint_of(config_of(*overrides), vocab_size=vocab_size)


def test_llama_3_70b_has_70_55e9_parameters():
    found = plan_of(*LLAMA_70B, vocab_size=LLAMA_VOCABULARY)
    body = 128256 * 8192 + 80 * 8192 * (8192 + 10240 + 3 * 28672 + 2) + 8192
    assert found.parameter_counts["actor"] == body + 128256 * 8192 == 70_553_706_496
    assert found.parameter_counts["critic"] == body + 8192


@pytest.mark.parametrize(
    ("policy", "actor", "critic"), [("full", 20, 18), ("no_grads", 16, 14), ("lean", 14, 14), ("rebuild", 12, 12)]
)
def test_host_bytes_per_parameter_of_the_policies(policy, actor, critic):
    """Without ref, which is 2 more. A model large enough for the padding not to matter."""
    found = plan_of(*BENCH, f"memory={policy}")
    counts = found.parameter_counts
    own = sum(holding.host_asleep_bytes for holding in found.of_role("actor") if holding.kind != "weights/ref")
    assert own / counts["actor"] == pytest.approx(actor, rel=1e-3)
    assert found.host_asleep_bytes("actor") / counts["actor"] == pytest.approx(actor + 2, rel=1e-3)
    assert found.host_asleep_bytes("critic") / counts["critic"] == pytest.approx(critic, rel=1e-3)


def test_data_parallel_ranks_share_the_optimizer_state_alone():
    one, eight = (plan_of(*LLAMA_70B, f"launch.nproc={ranks}", vocab_size=LLAMA_VOCABULARY) for ranks in (1, 8))
    for whole, share in zip(one.of_role("actor"), eight.of_role("actor"), strict=True):
        factor = 8 if whole.kind == "optim" else 1
        assert share.train_bytes * factor == pytest.approx(whole.train_bytes, rel=1e-6)
    assert eight.node_host_peak_bytes == 8 * max(m.host_bytes + m.device_bytes for m in eight.moments)  # on the CPU


def test_buckets_and_padding_of_megatrons_buffers():
    # From the last: 70 -> [0, 70), 100 from 128 -> 228; the bucket holds 228 >= 200 and ends at lcm(3, 128) = 384.
    # Then 130 -> [384, 514), ending at 2 * 384.
    layout = buffer_layout([130, 100, 70], data_parallel=3, distributed_optimizer=True, bucket_size=200)
    assert layout.spans == ((0, 70), (128, 228), (384, 514))
    assert layout.buckets == ((0, 384), (384, 768))
    # Shares of 128 elements: [0, 70) is rank 0's, [128, 228) rank 1's, of [384, 514) 128 are rank 0's and 2 rank 1's.
    assert layout.shards(3) == [[70, 128], [100, 2], []]
    whole = buffer_layout([130, 100, 70], data_parallel=3, distributed_optimizer=False, bucket_size=None)
    assert (whole.spans, whole.size) == (((0, 70), (70, 170), (170, 300)), 300)


@pytest.mark.parametrize(
    ("distributed", "dtype", "expected"),
    [
        (True, "bf16", (3 * (80 + 128), 80 + 128)),  # rank 0's 70 and 128, each view aligned to 16 elements
        (True, "fp32", (3 * (80 + 128), 80 + 128)),
        (False, "bf16", (3 * (144 + 112 + 80), 144 + 112 + 80)),
        (False, "fp32", (2 * (144 + 112 + 80), 0)),  # an fp32 parameter is its own main param
    ],
)
def test_elements_of_the_flat_optimizer_state(distributed, dtype, expected):
    layout = buffer_layout([130, 100, 70], data_parallel=3, distributed_optimizer=distributed, bucket_size=200)
    found = optimizer_elements([Buffer(dtype, layout)], distributed_optimizer=distributed, stage_ranks=3)
    assert found == expected


def test_neighbouring_ranks_cut_their_different_experts_alike():
    """Of six ranks, ranks 0 and 1 have other experts: ranks 0, 2, 4 share a buffer, and 1, 3, 5 another."""
    layout = buffer_layout([130, 100, 70], data_parallel=3, distributed_optimizer=True, bucket_size=200)
    buffer = Buffer("bf16", layout, spread=2)
    assert buffer.shards(6) == [[70, 128], [70, 128], [100, 2], [100, 2], [], []]
    assert optimizer_elements([buffer], distributed_optimizer=True, stage_ranks=6) == (3 * (80 + 128), 80 + 128)


def test_a_shared_tag_takes_each_rank_its_pieces_of_every_bucket():
    """Of the first layout, in bf16: rank 0's pieces of 70 and 128 elements take 192 and 256 bytes of an arena."""
    layout = buffer_layout([130, 100, 70], data_parallel=3, distributed_optimizer=True, bucket_size=200)
    found = [Parameter(str(size), size, "bf16") for size in (130, 100, 70)]
    sizes = {"found": found, "buffers": [Buffer("bf16", layout)], "table_bytes": 64}
    assert tag_bytes(**sizes, stage_ranks=3) == 64 + 192 + 256
    assert tag_bytes(**sizes, stage_ranks=1) == tag_bytes(**sizes, stage_ranks=None) == 64 + 320 + 256 + 192


def test_shared_tags_divide_the_host_bytes_of_every_tag_by_the_ranks():
    for policy in ("full", "lean", "rebuild"):
        whole, shared = (
            {h.kind: h for h in plan_of(*BENCH, *FOUR, f"memory={policy}", f"memory.tags={tags}").of_role("actor")}
            for tags in ("full", "sharded")
        )
        count = plan_of(*BENCH).parameter_counts["actor"]
        tags = [kind for kind in whole if kind.startswith("weights/")] + ["param"] * (policy == "lean")
        assert "weights/ref" in tags
        for kind in whole:
            saved = (whole[kind].host_asleep_bytes - shared[kind].host_asleep_bytes) / count
            assert saved == pytest.approx(2 * 3 / 4 if kind in tags else 0, rel=1e-3), (policy, kind)
            assert shared[kind].train_bytes == whole[kind].train_bytes
            assert ("each rank keeps 1/4" in shared[kind].note) == (kind in tags)
    (ref,) = (h for h in plan_of(*BENCH, "memory.tags=sharded").of_role("actor") if h.kind == "weights/ref")
    assert "one rank alone keeps all of it" in ref.note
    assert ref.host_asleep_bytes / count == pytest.approx(2, rel=1e-3)


def test_a_copy_of_a_node_is_counted_once_on_every_node():
    """Ranks of which all, two or none hold the same."""
    plain = tuple(f"roles.{role}.ddp.use_distributed_optimizer=false" for role in ("actor", "critic"))
    for size, tp, ranks in ((4, 1, 4), (4, 2, 2), (2, 2, 1)):
        layout = (f"launch.nproc={size}", f"parallel.tp={tp}", "algo.micro_batch_size=1")
        for extra in ((), plain):
            whole, one = (plan_of(*BENCH, *layout, *extra, f"memory.tags={tags}") for tags in ("full", "node"))
            tag, ref = (next(h for h in found.of_role("actor") if h.kind == "weights/ref") for found in (whole, one))
            assert ref.host_asleep_bytes == tag.host_asleep_bytes // ranks
            assert (f"one copy of {ranks} ranks of a node, 1/{ranks} counted for each" in ref.note) == (ranks > 1)
            saved = whole.node_host_asleep["actor"] - one.node_host_asleep["actor"]
            assert saved == 2 * (size - size // ranks) * tag.host_asleep_bytes  # the actor's own tag and the reference
            assert one.node_host_asleep["critic"] == whole.node_host_asleep["critic"]
    nodes = ("launch.nproc=2", "launch.nnodes=2", "launch.node_rank=0", "launch.rdzv_endpoint=a:1")
    found = plan_of(*BENCH, *nodes, "algo.micro_batch_size=1", "memory.tags=node").of_role("actor")
    assert "one copy of 2 ranks of a node" in next(h for h in found if h.kind == "weights/ref").note


def test_the_value_head_has_a_buffer_of_its_own():
    config = config_of()
    found = parameters(config.roles["critic"].model, vocab_size=320, value_head=True, parallel=config.parallel)
    settings = {"ddp": config.roles["critic"].ddp, "parallel": config.parallel}
    buffers = buffers_of(found, **settings, stage_ranks=1, bucket_size=None)
    assert [(buffer.dtype, buffer.layout.size) for buffer in buffers if buffer.dtype == "fp32"] == [("fp32", 128)]
    assert [parameter.name for parameter in found if parameter.dtype == "fp32"] == ["output_layer.weight"]


def moments_of(*overrides):
    return {moment.name: moment for moment in plan_of(*BENCH, *overrides).moments}


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        (("memory=lean",), 0, 2),  # from the backuper and the arena; the critic's weights are copied to be written
        (("memory=rebuild",), 2, 2),
        (("memory=full",), 12, 14),  # the saver's copy of the optimizer state cannot be read: it wakes up
        (("memory=lean", "checkpoint.async_save=true"), 0, 0),  # counted on the node
    ],
)
def test_saving_takes_host_memory_for_what_lies_on_the_device_only(overrides, actor, critic):
    found = plan_of(*BENCH, *overrides, "checkpoint.every_steps=1")
    moments = {moment.name: moment for moment in found.moments}
    for role, bytes_per_parameter in (("actor", actor), ("critic", critic)):
        more = moments[f"save {role}"].host_bytes - moments["all asleep"].host_bytes
        assert more / found.parameter_counts[role] == pytest.approx(bytes_per_parameter, abs=0.01)
    assert "save actor" not in {moment.name for moment in plan_of(*BENCH, *overrides).moments}


def test_what_is_awake_at_each_moment():
    count = plan_of(*BENCH).parameter_counts["actor"]
    lean = moments_of("memory=lean")
    for name, per_parameter in {
        "build actor": 2 + 4 + 12 + 4,  # main params are there twice until they have moved
        "train actor": 2 + 4 + 12,
        "actor forward": 2,
        "all asleep": 0,
    }.items():
        assert lean[name].device_bytes / count == pytest.approx(per_parameter, rel=1e-3), name
    with_hf = moments_of("memory=lean", "rollout=hf")
    for name, per_parameter in {"rollout": 2, "sync engine": 2 + 2}.items():
        assert with_hf[name].device_bytes / count == pytest.approx(per_parameter, rel=1e-3), name
    assert moments_of("memory=rebuild")["rebuild actor"].device_bytes / count == pytest.approx(2 + 4, rel=1e-3)
    kept_by_saver = moments_of("memory=rebuild", "memory.actor.optim_keeper=saver")
    assert kept_by_saver["actor forward"].device_bytes / count == pytest.approx(2 + 12, rel=1e-3)
    assert "rebuild actor" not in kept_by_saver


def test_the_savers_copies_stay_on_the_host_only_where_they_are_retained():
    everything = moments_of("memory=full")["all asleep"].host_bytes
    assert moments_of("memory=full")["train actor"].host_bytes == everything
    count = plan_of(*BENCH).parameter_counts["actor"]
    freed = everything - moments_of("memory=full", "memory.retain_cpu_backup=false")["train actor"].host_bytes
    assert freed / count == pytest.approx(2 + 4 + 12, rel=1e-3)


def test_without_offload_everything_is_always_there():
    found = plan_of(*BENCH[:2], "offload=none")
    moments = {moment.name: moment for moment in found.moments}
    assert moments["all asleep"].device_bytes == moments["train actor"].device_bytes
    own, ref = (holding for holding in found.of_role("actor") if holding.kind.startswith("weights/"))
    assert (own.kind, ref.kind) == ("weights/actor", "weights/ref")
    assert found.host_asleep_bytes("critic") == 0


def check(config, **options):
    check_fits(config, vocab_size=VOCABULARY, engine=planned_bytes(config, vocab_size=VOCABULARY), **options)


def limited(*overrides, **limits):
    config = config_of(*BENCH, *overrides)
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, **limits))


def test_a_plan_that_does_not_fit_is_refused_with_the_policies_that_do():
    # 1.22e9 * (16, 14) + 1.17e9 * (14, 12) B = 33.4, 28.6 GiB for lean and rebuild
    config = limited("memory=full", host_memory_gib=35.0)
    with pytest.raises(ValueError, match=r"4\d\.\d+ GiB of host memory.*host_memory_gib=35\. ") as error:
        check(config)
    assert str(error.value).endswith("These policies fit: memory=packed, memory=rebuild, memory=lean")
    check(limited("memory=lean", host_memory_gib=35.0))
    with pytest.raises(ValueError, match=r"These policies fit: memory=packed, memory=rebuild$"):
        check(limited("memory=lean", host_memory_gib=30.0))


def test_a_checkpoint_written_in_the_background_is_a_copy_in_host_memory():
    async_save = ("checkpoint.async_save=true", "checkpoint.every_steps=1")
    for ranks in (1, 4):  # which share the optimizer state; weights come once
        common = (*BENCH, f"launch.nproc={ranks}", "algo.micro_batch_size=1")
        without, found = plan_of(*common), plan_of(*common, *async_save)
        assert found.holdings == without.holdings
        assert tuple(m for m in found.moments if not m.name.startswith("save ")) == without.moments
        added = found.node_host_peak_bytes - without.node_host_peak_bytes
        assert added == found.node_checkpoint_bytes
        actor, critic = found.parameter_counts["actor"], found.parameter_counts["critic"]
        assert added == pytest.approx((12 + 2 + 2) * actor + (12 + 2) * critic, rel=1e-3), ranks
    assert plan_of(*BENCH, async_save[0]).node_checkpoint_bytes == 0  # no checkpoints
    plain = tuple(f"roles.{role}.ddp.use_distributed_optimizer=false" for role in ("actor", "critic"))
    found = plan_of(*BENCH, *async_save, *plain, "model.dtype=fp32")
    expected = 20 * found.parameter_counts["actor"] + 16 * found.parameter_counts["critic"]
    assert found.node_checkpoint_bytes == pytest.approx(expected, rel=1e-3)
    two = plan_of(*BENCH, *async_save, *plain, "model.dtype=fp32", "launch.nproc=2", "algo.micro_batch_size=1")
    assert two.node_checkpoint_bytes == found.node_checkpoint_bytes  # each copies half of what both hold


def test_shared_tags_are_among_what_would_fit():
    # Per rank and actor parameter: 12/2 of optimizer state and 2 or 2/2 each for the actor's tag and the reference.
    two = ("launch.nproc=2", "algo.micro_batch_size=1")
    limit = plan_of(*BENCH, *two, "memory.tags=sharded").node_host_peak_bytes / 2**30 + 0.1
    config = limited("memory=full", *two, host_memory_gib=limit)
    with pytest.raises(ValueError, match=r"(?s)These policies fit: .*memory=lean memory\.tags=sharded$"):
        check(config)
    check(limited("memory.tags=sharded", *two, host_memory_gib=limit))


def test_gpu_memory_is_checked_on_a_gpu_only():
    config = limited(gpu_memory_gib=10.0)
    message = r"more than launch.gpu_memory_gib=10 \(train actor: 7\..* activations.*\)\. No memory"
    with pytest.raises(ValueError, match=message):
        check(config)
    assert fits(limited(), footprint_of(config, vocab_size=VOCABULARY))
    check(limited("platform=cpu", gpu_memory_gib=10.0))


def test_a_keepers_bytes_are_counted_where_it_has_them():
    for overrides, host, disk in (
        (("memory=lean",), 14, 0),
        (("memory=lean", "memory.optim_format=bf16"), 10, 0),
        (("memory=packed",), 12, 0),  # at most
        (("memory=disk",), 0, 12),
        (("memory=disk", "memory.optim_format=bf16"), 0, 8),
    ):
        found = plan_of(*BENCH, *overrides, f"memory.disk.path={Path(__file__).parent}")
        critic = found.parameter_counts["critic"]
        on_disk = sum(holding.disk_bytes for holding in found.of_role("critic"))
        buffers = 64 * 2**20 if disk else 0
        assert (found.host_asleep_bytes("critic") - buffers) / critic == pytest.approx(host, abs=0.01), overrides
        assert on_disk / critic == pytest.approx(disk, rel=1e-3), overrides
        assert found.node_disk_bytes == pytest.approx(disk * sum(found.parameter_counts.values()), rel=1e-3)


def test_a_full_disk_is_refused_before_anything_starts(monkeypatch):
    config = limited("memory=disk", f"memory.disk.path={Path(__file__).parent}")
    usage = shutil.disk_usage("/")._replace(free=20 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ValueError, match=r"26\.\d+ GiB of the disk of memory\.disk\.path=.*, which has 20\.00 free.*memory="
    ):
        check(config)


def test_what_the_machine_allows_counts_where_nothing_is_given():
    with pytest.raises(ValueError, match=r"more than the 30\.00 that this machine or its control group allows\. These"):
        check(limited("memory=lean"), host_bytes=30 * 2**30)
    check(limited("memory=rebuild"), host_bytes=30 * 2**30)
    check(limited("memory=lean", host_memory_gib=40.0), host_bytes=30 * 2**30)


AUTO = (*BENCH[:2], "offload=auto", "model.kernels=torch", "algo.micro_batch_size=16", "rollout.max_new_tokens=256")


def test_what_never_sleeps_needs_no_host_memory():
    """With room for everything on the card a scheduled run keeps nothing on the host; without, what it lets sleep."""
    config = config_of(*AUTO)
    check(config, host_bytes=2**30, gpu_bytes=139 * 2**30)
    with pytest.raises(
        ValueError, match=r"3\d\.\d+ GiB of host memory on the node, more than the 1\.00 that this machine"
    ):
        check(config, host_bytes=2**30, gpu_bytes=40 * 2**30)
    check(config, host_bytes=64 * 2**30, gpu_bytes=40 * 2**30)


def test_a_schedule_that_cannot_fit_is_refused_with_what_is_missing():
    with pytest.raises(
        ValueError, match=r"plan does not fit: the phase train_actor needs 3\d\.\d+ GiB .* 10\.00: .* missing"
    ):
        check(dataclasses.replace(config_of(*AUTO, "launch.gpu_memory_gib=10")))
    check(config_of(*AUTO, "launch.gpu_memory_gib=40"), gpu_bytes=10 * 2**30)  # what is given counts


def test_tags_that_stay_on_the_gpu_are_counted_there():
    whole, tight = (plan_of(*AUTO, f"launch.gpu_memory_gib={gib}") for gib in (139, 36))
    for found, on_gpu in ((whole, True), (tight, False)):
        (ref,) = (h for h in found.of_role("actor") if h.kind == "weights/ref")
        assert (ref.train_bytes > 0, ref.host_asleep_bytes > 0) == (on_gpu, not on_gpu)
    peak = max(whole.schedule.awake_bytes(phase.name) for phase in whole.schedule.phases)
    assert whole.device_peak_bytes >= peak  # more, while the critic is built
    assert whole.refusal is None

"""Roles asleep and awake: whatever is called in whatever order, no weight is lost, no garbage is computed with."""

import gc
import itertools

import psutil
import pytest
import torch
from torch_memory_saver import torch_memory_saver

from tests.helpers.roles import (
    POLICIES,
    VOCAB_SIZE,
    ddp_buffers,
    fresh_saver,
    loss_of,
    make_batch,
    make_role,
    same_weights,
    small_config,
    train,
    weights_of,
)
from trainer.megatron.build import named_tensors
from trainer.megatron.optimizer import inner_optimizers
from trainer.memory.arena import HostArenas
from trainer.plan import KINDS
from trainer.plan.holdings import arena_bytes
from trainer.roles.backuper import TensorBackuper
from trainer.roles.role import FORWARD
from trainer.roles.weights import RoleWeights
from trainer.training import step
from trainer.training.micro_batches import Split
from trainer.training.warm_up import start_critic_from

MIB = 1 << 20
MEDIUM = ("model.layers=2", "model.hidden_size=512", "model.ffn_size=1536")  # 6M parameters, 100 MB awake
EXPERTS = ("model.num_experts=4", "model.num_experts_per_tok=2")
NO_DISTRIBUTED_OPTIMIZER = "roles.actor.ddp.use_distributed_optimizer=false"


pytestmark = pytest.mark.usefixtures("saver")


def log_probs(role):
    batch = make_batch([3, 5])
    return step.log_probs(role, batch, temperature=1.0, vocab_size=VOCAB_SIZE, split=Split(2))[0]


# ---- any order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_subset_of_kinds_sleeps_and_comes_back_with_the_same_bits(name, policy):
    role = make_role(name, f"memory={policy}")
    train(role)
    expected = role.weights_sha256()
    for size in range(len(KINDS) + 1):
        for kinds in itertools.combinations(KINDS, size):
            role.sleep(kinds=kinds)
            asleep = set(kinds) | ({"param", "rest"} if {"param", "rest"} & set(kinds) else set())
            assert {kind for kind in KINDS if role.is_asleep(kind)} == asleep
            role.sleep(kinds=kinds)
            role.wake_up(kinds=kinds)
            role.wake_up()
            assert role.weights_sha256() == expected, kinds


def test_waking_first_sleeping_twice_and_waking_twice_are_no_ops():
    events = []
    role = make_role("actor", events=events)
    expected = role.weights_sha256()
    role.wake_up()
    assert events == []
    role.sleep()
    asleep = [event["kind"] for event in events]
    assert asleep == ["param", "grad", "rest", "optim"]  # what is copied in the background goes last
    role.sleep()
    assert len(events) == len(asleep)
    role.wake_up()
    role.wake_up()
    assert [event["state"] for event in events] == ["asleep"] * 4 + ["awake"] * 4 + ["restored"]
    assert events[4]["kind"] == "optim"  # and comes first
    assert role.weights_sha256() == expected


@pytest.mark.parametrize("asleep", [True, False])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda role: role.wake_up(kinds={"params"}), "unknown buffer kinds params.*param, grad, optim, rest"),
        (lambda role: role.sleep(kinds={"param", "weights"}), "unknown buffer kinds weights"),
        (lambda role: role.wake_up(tag="old_actor"), "'old_actor'.*backed-up tags: actor"),
    ],
)
def test_unknown_kinds_and_tags_are_refused_before_anything_moves(asleep, call, message):
    role = make_role("actor")
    expected = role.weights_sha256()
    if asleep:
        role.sleep()
    with pytest.raises(ValueError, match=message):
        call(role)
    assert {role.is_asleep(kind) for kind in KINDS} == {asleep}
    role.wake_up()
    assert role.weights_sha256() == expected


def test_a_critic_has_no_tags_but_its_own():
    critic = make_role("critic")
    with pytest.raises(ValueError, match=r"critic has no weights backuper.*'ref'"):
        critic.wake_up(tag="ref")
    critic.wake_up(tag="critic")
    assert critic.active_tag == "critic"


# ---- nothing computes with what was not restored -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "lean", "rebuild"])
def test_forward_passes_need_parameters_and_training_needs_everything(policy):
    role = make_role("actor", f"memory={policy}")
    expected = log_probs(role)
    role.sleep()
    assert role.active_tag is None
    with pytest.raises(RuntimeError, match="actor's param, rest buffers are asleep"):
        log_probs(role)
    role.wake_up(kinds={"grad"})
    with pytest.raises(RuntimeError, match="asleep"):
        log_probs(role)
    role.wake_up(kinds=FORWARD)
    assert torch.equal(log_probs(role), expected)
    role.sleep(kinds={"grad", "optim"})
    for call in (lambda: train(role), role.step, role.weights_sha256, lambda: role.load_weights({})):
        with pytest.raises(RuntimeError, match="actor's grad, optim buffers are asleep"):
            call()
    role.wake_up()
    train(role)


def test_the_reference_cannot_be_trained_by_mistake():
    role = make_role("actor")
    role.copy_to_tag("ref")
    train(role)
    expected = role.weights_sha256()
    role.wake_up(tag="ref")
    for call in (lambda: train(role), role.step, lambda: role.load_weights({}), lambda: role.copy_to_tag("other")):
        with pytest.raises(RuntimeError, match="holds the weights of 'ref', not 'actor'"):
            call()
    role.wake_up()
    assert role.weights_sha256() == expected


def test_a_failed_sleep_or_wake_up_leaves_no_garbage_behind(monkeypatch):
    """The saver fails at the last of the regions; the next call mends it."""
    role = make_role("actor")
    train(role)
    expected = role.weights_sha256()

    saver = role.regions._saver
    for method, last in (("sleep", "optim"), ("wake_up", "rest")):
        original = getattr(saver, method)

        def fail(tag, original=original, last=last, **options):
            if last in tag:
                raise MemoryError(tag)
            return original(tag, **options)

        with monkeypatch.context() as patch:
            patch.setattr(saver, method, fail)
            with pytest.raises(MemoryError):
                getattr(role, method)()
        with pytest.raises(RuntimeError):
            log_probs(role)
        if method == "sleep":
            role.wake_up()
            assert role.weights_sha256() == expected
            role.sleep()
    role.wake_up()
    assert role.weights_sha256() == expected


def test_gradients_are_garbage_after_a_wake_up_and_zero_before_every_use():
    """Padding included: the gradient norm covers it."""
    for name in ("actor", "critic"):
        role = make_role(name, "model.hidden_size=40", "model.heads=2", "model.kv_heads=2")
        assert sum(buffer.grad_data.numel() for buffer in ddp_buffers(role)) > role.model.parameter_count()
        train(role)
        role.sleep()
        role.wake_up()
        assert all(buffer.grad_data.isnan().all() for buffer in ddp_buffers(role))
        with role.training():
            assert not any(buffer.grad_data.any() for buffer in ddp_buffers(role))
        role.sleep()
        role.wake_up()
        train(role)
        assert all(tensor.isfinite().all() for tensor in weights_of(role).values())


@pytest.mark.parametrize(
    "call",
    [
        lambda role: role.sleep(),
        lambda role: role.sleep(kinds={"grad"}),
        lambda role: role.wake_up(),
        lambda role: role.wake_up(tag="ref"),
        lambda role: role.switch_to("ref"),
        lambda role: role.backup(),
        lambda role: role.copy_to_tag("ref"),
        lambda role: role.load_weights({}),
        lambda role: role.awake().__enter__(),
        lambda role: role.readable().__enter__(),
        lambda role: role.overwriting(tags=[]).__enter__(),
        lambda role: role.training().__enter__(),
    ],
)
def test_nothing_makes_a_role_sleep_or_changes_its_weights_between_two_micro_batches(call):
    """What gradients have come together would be lost, in silence where nothing poisons them."""
    role, undisturbed = make_role("actor"), make_role("actor")
    role.copy_to_tag("ref")
    train(role)
    train(undisturbed)
    refusals = []

    def hooked(module, inputs):
        with pytest.raises(RuntimeError, match=r"^\w+\(\) of the actor inside training\(\)") as caught:
            call(role)
        refusals.append(str(caught.value))

    handle = role.model.chunks[0].register_forward_pre_hook(hooked)
    train(role)
    handle.remove()
    train(undisturbed)
    assert len(refusals) > 1
    assert role.weights_sha256() == undisturbed.weights_sha256()
    role.sleep()


# ---- tags ----------------------------------------------------------------------------------------------------------


class RestoreLog:
    """Names of the tags that backupers restore and of the model switches, in order."""

    def __init__(self, monkeypatch):
        self.calls: list[str] = []
        for owner, name in ((TensorBackuper, "restore"), (RoleWeights, "switch_to")):
            original = getattr(owner, name)

            def spy(self_, tag, original=original, name=name):
                self.calls.append(f"{name} {tag}")
                return original(self_, tag)

            monkeypatch.setattr(owner, name, spy)


@pytest.mark.parametrize("policy", POLICIES)
def test_waking_straight_to_the_reference_restores_nothing_else(policy, monkeypatch):
    role = make_role("actor", f"memory={policy}")
    role.copy_to_tag("ref")
    reference = weights_of(role)
    train(role)
    log = RestoreLog(monkeypatch)
    with role.awake(kinds=FORWARD, tag="ref"):
        pass  # it was awake, with other weights
    log.calls.clear()
    with role.awake(kinds=FORWARD, tag="ref"):
        assert log.calls == ["switch_to ref", "restore ref"]
        assert role.active_tag == "ref"
        assert same_weights(weights_of(role), reference)
        assert role.is_asleep("optim")


@pytest.mark.parametrize("policy", POLICIES)
def test_waking_parameters_ends_in_a_restore_even_of_the_active_tag(policy, monkeypatch):
    role = make_role("actor", f"memory={policy}")
    expected = role.weights_sha256()
    log = RestoreLog(monkeypatch)
    role.sleep(kinds=FORWARD)
    role.wake_up(kinds=FORWARD)
    assert log.calls == ["switch_to actor", *(["restore actor"] if policy != "rebuild" else [])]
    assert role.weights_sha256() == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_actor_reference_actor_is_bit_equal(policy):
    role = make_role("actor", f"memory={policy}")
    role.copy_to_tag("ref")
    reference = log_probs(role)
    train(role)
    trained, expected = log_probs(role), role.weights_sha256()
    assert not torch.equal(trained, reference)
    role.switch_to("ref")
    assert torch.equal(log_probs(role), reference)
    role.switch_to("actor")
    assert torch.equal(log_probs(role), trained)
    with role.awake(kinds=FORWARD, tag="ref"):
        assert torch.equal(log_probs(role), reference)
    with role.awake(kinds=FORWARD):
        assert torch.equal(log_probs(role), trained)
    role.wake_up()
    assert role.weights_sha256() == expected


LEAVING = {
    "sleep": lambda role: role.sleep(),
    "sleep_param": lambda role: role.sleep(kinds={"param"}),
    "switch_to": lambda role: role.switch_to("ref"),
    "wake_up_to_ref": lambda role: role.wake_up(tag="ref"),
    "wake_up_to_ref_forward": lambda role: role.wake_up(kinds=FORWARD, tag="ref"),
}


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("overrides", [("memory=full",), ("memory=lean",), ("memory=rebuild",), ("offload=none",)])
def test_training_that_nobody_backed_up_is_kept(overrides, leave):
    role = make_role("actor", *overrides)
    role.copy_to_tag("ref")
    train(role)
    expected = role.weights_sha256()
    LEAVING[leave](role)
    role.sleep()
    role.wake_up()
    assert role.weights_sha256() == expected


def test_main_params_that_sleep_are_read_from_their_host_copy_or_woken():
    """Under memory=rebuild the actor's weights come from the optimizer state."""
    for keeper in ("arena", "saver"):
        fresh_saver()
        role = make_role("actor", "memory=rebuild", f"memory.actor.optim_keeper={keeper}")
        role.copy_to_tag("ref")
        train(role)
        trained, expected = weights_of(role), role.weights_sha256()
        role.sleep()
        role.wake_up(kinds=FORWARD, tag="ref")
        role.switch_to("actor")  # the saver's copy of the optimizer state can only be read awake
        assert role.is_asleep("optim") == (keeper == "arena")
        assert same_weights(weights_of(role), trained)
        role.wake_up()
        assert role.weights_sha256() == expected


def test_arenas_reserved_before_a_role_is_built_have_the_size_that_it_needs():
    config = small_config("memory=lean")
    arenas = HostArenas(pinned=False)
    arenas.reserve(arena_bytes(config, vocab_size=VOCAB_SIZE, stage=0))
    addresses = {owner: arena._flat.data_ptr() for owner, arena in arenas._reserved.items()}
    assert addresses.keys() == {"actor/optim", "critic/optim", "weights/actor", "weights/ref"}
    for name in ("actor", "critic"):
        fresh_saver()
        role = make_role(name, "memory=lean", arenas=arenas)
        if role._weights.backuper is not None:
            role.copy_to_tag("ref")
            for tag in ("actor", "ref"):
                first = next(iter(role._weights.backuper.get(tag).values()))
                assert first.data_ptr() == addresses[f"weights/{tag}"]
        role.sleep()
        keeper = role.regions.keeper_of_sleeping_state
        pieces = keeper.host_tensors() if keeper else None
        assert pieces
        assert pieces[0].data_ptr() == addresses[f"{name}/optim"]
    assert not arenas._reserved


CHANGES = {"none": lambda role: None, "train": train, "load": lambda role: role.load_weights(weights_of(role))}


@pytest.mark.parametrize("change", CHANGES)
def test_the_copy_that_backup_begins_is_made_again_only_after_a_change(change):
    """Of the optimizer state, whose host copy overlaps with what comes between training and sleep."""
    role = make_role("actor", "memory=lean")
    train(role)
    role.backup()
    host_copies = role.regions._keeper.host_tensors()
    begun_early = [copy.clone() for copy in host_copies]
    CHANGES[change](role)
    expected = role.weights_sha256()
    for copy in host_copies:
        copy.fill_(torch.nan)
    role.sleep()
    assert [copy.isnan().any() == (change == "none") for copy in host_copies] == [True, True]
    if change == "none":
        for copy, early in zip(host_copies, begun_early, strict=True):
            copy.copy_(early)
    role.wake_up()
    assert role.weights_sha256() == expected


# ---- main params follow the weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.dtype=fp32",),
        ("memory=rebuild",),
        (NO_DISTRIBUTED_OPTIMIZER, NO_DISTRIBUTED_OPTIMIZER.replace("actor", "critic")),
        ("optimizer.weight_decay=0.1",),
    ],
    ids=["bf16", "fp32", "rebuild", "plain-optimizer", "weight-decay"],
)
def test_a_step_with_learning_rate_zero_changes_nothing(name, overrides):
    role = make_role(name, *overrides)
    train(role, steps=2)  # moments are not zero
    loaded = {key: tensor * 1.5 for key, tensor in weights_of(role).items()}
    role.load_weights(loaded)
    train(role, lr=0.0)
    assert same_weights(weights_of(role), loaded)
    role.sleep()
    role.wake_up()
    train(role, lr=0.0)
    assert same_weights(weights_of(role), loaded)


def test_a_critic_started_from_the_actor_has_its_body_and_its_own_head():
    actor, critic = make_role("actor"), make_role("critic", seed=2)
    train(actor)
    actor.backup()
    body = {name: tensor for name, tensor in weights_of(actor).items() if "output_layer" not in name}
    head = weights_of(critic)["output_layer.weight"]
    assert head.shape == (1, 64)
    assert not same_weights({name: weights_of(critic)[name] for name in body}, body)
    start_critic_from(actor._weights.backuper.get("actor"), critic)
    expected = body | {"output_layer.weight": head}
    assert same_weights(weights_of(critic), expected)
    train(critic, lr=0.0)
    assert same_weights(weights_of(critic), expected)


def test_unknown_weights_are_refused():
    role = make_role("actor")
    expected = role.weights_sha256()
    with pytest.raises(ValueError, match=r"the actor has no tensors called lm_head"):
        role.load_weights({"lm_head": torch.ones(1), **weights_of(role)})
    assert role.weights_sha256() == expected


# ---- memory --------------------------------------------------------------------------------------------------------


def rss_bytes():
    return psutil.Process().memory_info().rss


def region_bytes(role, *, backup=None):
    tags = [tag for of_kind in role.regions._tags.values() for tag in of_kind]
    return sum(torch_memory_saver._impl.resident_bytes(tag, backup=backup) for tag in tags)


@pytest.mark.parametrize("policy", POLICIES)
def test_rss_falls_by_what_is_released_and_stays_flat(policy):
    events = []
    role = make_role("actor", f"memory={policy}", *MEDIUM, events=events)
    gc.collect()
    awake, asleep = [], []
    for _ in range(10):
        role.sleep()
        asleep.append(rss_bytes())
        role.wake_up()
        awake.append(rss_bytes())
    falls = region_bytes(role) - region_bytes(role, backup=True)
    assert awake[-1] - asleep[-1] == pytest.approx(falls, rel=0.05, abs=MIB)
    assert max(asleep[2:]) - min(asleep[2:]) < MIB
    assert max(awake[2:]) - min(awake[2:]) < MIB
    kinds = (*KINDS, *(["weights/actor"] if policy in ("full", "no_grads") else []))
    first_sleep = [event for event in events if event["state"] == "asleep"][: len(kinds)]
    assert {event["kind"] for event in first_sleep} == set(kinds)
    per_parameter = {"full": 20, "no_grads": 16, "lean": 14, "rebuild": 12}[policy]
    host_bytes = sum(event["backup_bytes"] for event in first_sleep)
    assert host_bytes == pytest.approx(per_parameter * role.model.parameter_count(), rel=0.02)
    assert sum(event["released_bytes"] for event in first_sleep) == region_bytes(role)


def tensors_alive():
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("overrides", [(), ("model.dtype=fp32",), EXPERTS], ids=["bf16", "fp32", "experts"])
def test_every_tensor_of_a_sleeping_role_is_in_a_region_or_a_backup(name, overrides):
    """With a 64 KiB bound, as befits the size of the model; most weights, moments and the rotary cache are above."""
    before = {tensor.untyped_storage().data_ptr() for tensor in tensors_alive()}
    role = make_role(name, "model.hidden_size=128", "model.ffn_size=256", *overrides)
    train(role, lengths=(90, 5))
    role.sleep()
    arenas = [arena for arena, _ in role._weights.backuper._tags.values()] if role._weights.backuper else []
    arenas = {arena._flat.data_ptr() for arena in [*arenas, role.regions._keeper._store._arena]}
    regions = set()
    for tensor in tensors_alive():
        storage = tensor.untyped_storage()
        if storage.nbytes() < 1 << 16 or storage.data_ptr() in before | arenas:
            continue
        region = torch_memory_saver._impl.region_of(tensor)
        assert region is not None, (tuple(tensor.shape), tensor.dtype)
        regions.add(region[0])
    assert regions == {f"{name}/{kind}" for kind in ("param", "grad", "optim", "optim/1")}


def test_both_buffers_of_a_critic_sleep():
    """The bf16 body's and the fp32 value head's; the rotary table is neither's."""
    critic = make_role("critic")
    assert sorted(str(buffer.param_dtype) for buffer in ddp_buffers(critic)) == ["torch.bfloat16", "torch.float32"]
    region_of = torch_memory_saver._impl.region_of
    for buffer in ddp_buffers(critic):
        assert region_of(buffer.param_data) == ("critic/param", True)
        assert region_of(buffer.grad_data) == ("critic/grad", False)
    in_buffers = {id(parameter) for buffer in ddp_buffers(critic) for parameter in buffer.params}
    rest = {name: region_of(t) for name, t in named_tensors(critic.model.chunks) if id(t) not in in_buffers}
    assert rest == {"rotary_pos_emb.inv_freq": ("critic/rest", True)}
    assert [region_of(piece) for piece in critic.model.state.pieces] == [
        ("critic/optim", False),
        ("critic/optim/1", False),
    ]
    moments = [
        inner.optimizer.state[p] for inner in inner_optimizers(critic.model.optimizer) for p in inner.optimizer.state
    ]
    assert len(moments) == len(in_buffers)
    assert {region_of(tensor)[0] for both in moments for tensor in both.values()} == {"critic/optim/1"}


def test_the_optimizer_state_sleeps_in_pieces_of_the_size_asked_for():
    """32 KiB hold 8192 elements. Each larger parameter has pieces of its own."""
    whole, cut = (make_role("critic", *options) for options in ((), ("memory.piece_mib=0.03125",)))
    large = {param.numel() for param in cut.model.chunks[0].parameters() if param.numel() > 8192}
    sizes = [piece.numel() for piece in cut.model.state.pieces]
    assert large == {size for size in sizes if size > 8192}
    assert sum(sizes[: cut.model.state.main_pieces]) == whole.model.state.pieces[0].numel()
    assert sum(sizes) == sum(piece.numel() for piece in whole.model.state.pieces)
    tags = [torch_memory_saver._impl.region_of(piece)[0] for piece in cut.model.state.pieces]
    assert tags == ["critic/optim", *(f"critic/optim/{number}" for number in range(1, len(sizes)))]


def test_asleep_bytes_are_the_same_after_every_path():
    role = make_role("actor")
    role.copy_to_tag("ref")

    def asleep():
        assert all(role.is_asleep(kind) for kind in KINDS)
        return (
            torch_memory_saver._impl.resident_bytes("actor/param"),
            region_bytes(role),
            role._weights.backuper.host_bytes,
        )

    role.sleep()
    expected = asleep()
    poisoned = make_batch([3, 2], advantages=torch.full((2, 6), torch.inf))

    def forward():
        log_probs(role)

    def failed_step():
        assert step.train_minibatch(role, poisoned, loss_of(role), split=Split(2))["skipped"] == 1.0

    def interrupted():
        with role.training():
            raise KeyboardInterrupt

    for path in (lambda: train(role), failed_step, forward):
        with role.awake():
            path()
        assert asleep() == expected
    with pytest.raises(KeyboardInterrupt), role.awake():
        interrupted()
    assert asleep() == expected
    with role.awake(kinds=FORWARD, tag="ref"):
        forward()
    assert asleep() == expected
    with pytest.raises(ValueError, match="'old_actor'"), role.awake(tag="old_actor"):
        pass
    assert asleep() == expected
    with role.readable():
        pass
    assert asleep() == expected
    with pytest.raises(KeyboardInterrupt), role.readable():
        raise KeyboardInterrupt
    assert asleep() == expected


def test_offload_none_pins_nothing_sleeps_nothing_and_keeps_only_what_switching_needs():
    events = []
    actor, critic = (make_role(name, "offload=none", events=events) for name in ("actor", "critic"))
    addresses = [buffer.param_data.data_ptr() for buffer in ddp_buffers(actor)]
    for role in (actor, critic):
        train(role)
        expected = role.weights_sha256()
        role.sleep()
        assert not any(role.is_asleep(kind) for kind in KINDS)
        assert role.active_tag == role.name
        assert role.weights_sha256() == expected
    assert events == []
    assert torch_memory_saver._impl._regions == {}
    assert [buffer.param_data.data_ptr() for buffer in ddp_buffers(actor)] == addresses
    assert critic._weights.backuper is None
    assert actor._weights.backuper.backup_tags == ("actor",)
    assert not any(arena.is_on_device or arena._pinning for arena, _ in actor._weights.backuper._tags.values())
    assert actor.regions._keeper is None

"""A third role that the loop does not train: a reward model from a folder, which pays in a phase of its own."""

import pytest
import torch
from torch_memory_saver import torch_memory_saver
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.helpers.composing import footprint_of
from tests.helpers.invariance_worker import run_one
from tests.helpers.recording import recorded
from tests.helpers.roles import fresh_saver, small_config, weights_of
from trainer import loop, worker
from trainer.measure.phases import Phases
from trainer.roles.role import FORWARD
from trainer.training.finite import NotFinite

pytestmark = pytest.mark.usefixtures("saver")

POLICIES = {
    "none": ("offload=none",),
    "backuper": (),
    "saver": ("memory.reward.restore_params_from=saver",),
    "rebuild": ("memory=rebuild", "memory.tags=sharded"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(path)
    return path


def config_with(folder, *overrides):
    return small_config("experiment=reward_model", "reward=null", f"roles.reward.model.path={folder}", *overrides)


def build(config, events):
    fresh_saver()
    return worker.build(config, Phases(events.append, gpu=False))


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_its_values_of_whole_responses_are_what_they_are_paid(folder, algo):
    run = build(config_with(folder, f"algo={algo}", "algo.kl.coef=0"), [])
    loop.warm_up(run, loop.Outputs(None, None, None))
    _, experience = loop.collect(run, 1, kl_coef=0.0)
    judge = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    for row, length in enumerate(experience.lengths().tolist()):
        expected = judge(experience.tokens[row : row + 1, :length]).logits.item()
        assert experience.scores[row].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert experience.scores.std() > 0.1


def test_scores_that_are_not_finite_end_the_run(folder, tmp_path):
    """Its weights are finite, and overflow."""
    judge = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    judge.score.weight.data.fill_(3e38)
    judge.save_pretrained(tmp_path)
    run = build(config_with(tmp_path, "algo=grpo", "algo.kl.coef=0"), [])
    with pytest.raises(NotFinite, match=r"step 1, reward_scores: the reward gave \d+ numbers that are NaN or infinite"):
        loop.collect(run, 1, kl_coef=0.0)


def test_it_sleeps_but_for_its_phase_and_never_changes(folder):
    events = []
    run = build(config_with(folder), events)
    reward = run.roles["reward"]
    assert reward.is_asleep("rest")
    with reward.awake(kinds=FORWARD):
        before = weights_of(reward)
    outputs, _ = recorded()
    loop.train(run, outputs)
    states = [(e["phase"], e["kind"], e["state"]) for e in events if e.get("role") == "reward" and e["step"] == 1]
    of_phase = [("reward_scores", kind, state) for kind, state in (("rest", "awake"), ("rest", "restored"))]
    assert states[:2] == of_phase
    assert {phase for phase, _, _ in states} == {"reward_scores"}
    assert reward.is_asleep("rest")
    assert torch_memory_saver._impl.resident_bytes("reward/rest", backup=True) == 0
    with reward.awake(kinds=FORWARD):
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(reward).items())


def test_every_policy_computes_the_bits_of_offload_none(folder):
    results = {}
    for name, overrides in POLICIES.items():
        fresh_saver()
        results[name] = run_one(config_with(folder, *overrides))
    metrics = results["none"]["metrics"]
    assert {"weights_sha256/reward", "parameters/reward"} <= metrics[-1].keys() | metrics[0].keys()
    assert "reward/lr" not in metrics[-1]
    for name in POLICIES:
        assert results[name]["metrics"] == metrics, name


def test_the_plan_counts_its_weights_and_nothing_else(folder):
    config = config_with(folder)
    run = build(config, [])
    found = footprint_of(config, vocab_size=run.vocab_size)
    (holding,) = found.of_role("reward")
    with run.roles["reward"].awake(kinds=FORWARD):
        sizes = [tensor.nbytes for tensor in weights_of(run.roles["reward"]).values()]
    assert (holding.kind, holding.keeper) == ("rest", "backuper")
    assert holding.train_bytes == holding.forward_bytes == sum(sizes)
    assert holding.host_asleep_bytes == sum(-(-size // 64) * 64 for size in sizes)
    assert found.parameter_counts["reward"] == run.roles["reward"].model.parameter_count()
    assert not {"train reward", "save reward"} & {moment.name for moment in found.moments}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward=tests.unit.test_tasks.pay",
            "with roles.reward, which judges responses: one of them pays",
        ),
        ("roles.reward.trained=true", "roles are actor, critic, reward: .* Every other one judges responses"),
        ("roles.reward.head=vocabulary", "roles are actor, critic, reward: .* Every other one judges responses"),
        ("roles.reward.tags=[ref]", "there is one version of its weights"),
        ("roles.critic.trained=false", r"the loop trains the critic with head=value, trained=true and tags=null"),
        ("roles.actor.tags=[]", r"the loop trains the actor with head=vocabulary, trained=true and tags=\['ref'\]"),
        ("memory.reward.restore_params_from=main_params", "must be one of saver, backuper"),
        ("memory.reward.optim_keeper=arena", "memory.reward.optim_keeper=arena: must be one of none"),
        ("~memory.reward", r"roles.reward has no memory policy: give \+memory.reward="),
    ],
)
def test_what_the_roles_cannot_be_is_refused(folder, override, message):
    with pytest.raises(ValueError, match=message):
        config_with(folder, override)


def test_a_folder_without_a_value_head_cannot_judge(folder, tmp_path):
    body = LlamaForSequenceClassification.from_pretrained(folder).model
    body.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no value head \(score.weight"):
        build(config_with(tmp_path), [])

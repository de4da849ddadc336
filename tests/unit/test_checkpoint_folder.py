"""Checkpoint folders: whole at every moment, found, kept, refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.helpers.checkpoints import save
from tests.helpers.composing import SMALL, config_of
from trainer.checkpoint import folder
from trainer.checkpoint.manifest import Manifest
from trainer.command import jobs
from trainer.config.identity import config_hash
from trainer.models.hf_files import write_folder
from trainer.tasks.arithmetic import ArithmeticTask
from trainer.tasks.tokenizer import load_tokenizer


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_was_saved_is_read(tmp_path):
    checkpoint = save(tmp_path, 3)
    assert folder.latest(tmp_path) == checkpoint
    manifest = folder.read(checkpoint)
    assert (manifest.step, manifest.kl_coef, manifest.record["reward"]) == (3, 0.1, 0.1 + 0.2)


def test_the_last_few_are_kept_in_the_order_of_their_steps(tmp_path):
    for step in (2, 4, 6, 8, 10):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["latest", "step_10", "step_8"]


def accuracy(step: int, value: float) -> dict[str, float]:
    return {"step": step, "heldout_accuracy": value}


def test_the_best_is_kept_beside_the_last_few(tmp_path):
    for step, value in enumerate((0.1, 0.5, 0.3, 0.5, 0.4)):
        save(tmp_path, step, keep_last=1, keep_best=True, record=accuracy(step, value))
    assert names(tmp_path) == ["best", "latest", "step_1", "step_4"]  # of equals the earlier
    assert folder.best(tmp_path) == tmp_path / "checkpoints" / "step_1"
    save(tmp_path, 5, keep_last=1, keep_best=True)  # a step that was not evaluated
    save(tmp_path, 6, keep_last=1, record=accuracy(6, 0.9))  # kept_best=false: named no more, but kept
    assert names(tmp_path) == ["best", "latest", "step_1", "step_6"]
    save(tmp_path, 7, keep_last=1, keep_best=True, record=accuracy(7, 0.6))
    assert names(tmp_path) == ["best", "latest", "step_7"]
    config = config_of(*SMALL, "algo.num_steps=9", f"resume={tmp_path}/checkpoints/best")
    with pytest.raises(ValueError, match="does not fit"):  # found, and saved without a config
        folder.starting_point(config, tmp_path / "new")


def test_a_best_that_is_gone_or_damaged_is_none(tmp_path):
    save(tmp_path, 1, keep_best=True, record=accuracy(1, 0.9))
    shutil.rmtree(tmp_path / "checkpoints" / "step_1")
    assert folder.best(tmp_path) is None
    second = save(tmp_path, 2, keep_best=True, record=accuracy(2, 0.1))
    assert folder.best(tmp_path) == second
    (second / "actor/__0_0.distcp").write_bytes(b"")
    third = save(tmp_path, 3, keep_best=True, record=accuracy(3, 0.0))
    assert folder.best(tmp_path) == third


def test_a_save_killed_before_any_of_its_file_operations_leaves_a_whole_latest(tmp_path):
    """A child dies right before its n-th rename, removal, fsync or write, for every n until it lives."""
    operations = ((os, "replace"), (shutil, "rmtree"), (os, "fsync"), (Path, "write_text"), (Path, "mkdir"))
    outcomes = []
    for n in range(1, 100):
        run = tmp_path / str(n)
        save(run, 1, keep_best=True, record=accuracy(1, 0.2))
        save(run, 2)
        child = os.fork()
        if child == 0:
            left = [n]

            def dying(original, left=left):
                def call(*arguments, **keywords):
                    left[0] -= 1
                    if left[0] == 0:
                        os._exit(9)
                    return original(*arguments, **keywords)

                return call

            for owner, name in operations:
                setattr(owner, name, dying(getattr(owner, name)))
            save(run, 3, keep_last=2, keep_best=True, record=accuracy(3, 0.3))
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        latest = folder.latest(run)
        assert latest is not None
        outcomes.append(folder.read(latest).step)
        assert folder.read(run / "checkpoints" / "step_2").step == 2
        best = folder.best(run)
        assert best is not None
        assert folder.read(best).step in (1, 3)
        save(run, 4, keep_last=2)  # the next life of the run is not in the way of the last
        assert folder.read(run / "checkpoints" / "step_4").step == 4
        assert not list((run / "checkpoints").glob("*.tmp"))
        if survived:
            break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) > 8


def test_a_damaged_checkpoint_is_refused_with_the_file_and_the_one_before_it(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_4" / "actor/__0_0.distcp").write_bytes(b"01234")
    (checkpoints / "step_3" / "actor/__0_0.distcp").unlink()
    with pytest.raises(
        ValueError, match=r"step_4 cannot be used: actor/__0_0.distcp has 5 bytes instead of 10; .*step_2$"
    ):
        folder.starting_point(config_of(*SMALL), tmp_path)
    with pytest.raises(ValueError, match=r"actor/__0_0.distcp is missing; .*step_2$"):
        folder.read(checkpoints / "step_3")
    (checkpoints / "step_1" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"used: manifest.json is not JSON, but cut off \(.*\); no whole one is older"):
        folder.read(checkpoints / "step_1")


def test_resume_finds(tmp_path):
    config = config_of(*SMALL)
    auto, new = config_of(*SMALL, "resume=auto"), config_of(*SMALL, "resume=null")
    run, other = tmp_path / "run", tmp_path / "other"
    assert folder.starting_point(auto, run) is None
    assert folder.starting_point(new, run) is None
    first, second = (
        save(run, 1, config=config),
        save(run, 2, config=config, record={"step": 2, "heldout_accuracy": 1.0}),
    )
    assert folder.starting_point(auto, run) == second
    with pytest.raises(ValueError, match="resume=null starts over"):
        folder.starting_point(new, run)
    assert folder.starting_point(config_of(*SMALL, f"resume={run}"), other) == second
    assert folder.starting_point(config_of(*SMALL, f"resume={first}"), other) == first
    assert folder.starting_point(config_of(*SMALL, f"resume={first}"), run) == first
    own = save(other, 1, config=config)  # the same command, repeated
    assert folder.starting_point(config_of(*SMALL, f"resume={run}"), other) == own
    with pytest.raises(ValueError, match=r"no checkpoint there\. Give a run directory"):
        folder.starting_point(config_of(*SMALL, f"resume={tmp_path}"), tmp_path / "new")


@pytest.mark.parametrize("name", ["step_2", "kept"])
def test_a_copied_checkpoint_resumes_wherever_it_lies(name, tmp_path, monkeypatch):
    long = (*SMALL, "algo.num_steps=9")
    config = config_of(*long)
    run = tmp_path / "run"
    save(run, 1, config=config)
    copy = tmp_path / "elsewhere" / "copies" / name
    shutil.copytree(save(run, 2, config=config), copy)
    shutil.rmtree(run)
    (tmp_path / "elsewhere" / "metrics.jsonl").write_text('{"step": 2}\n')  # somebody else's
    resumed = config_of(*long, f"resume={copy}")
    assert folder.starting_point(resumed, tmp_path / "new") == copy
    jobs.claim(tmp_path / "new", resumed, copy)
    assert not (tmp_path / "new" / "metrics.jsonl").exists()
    monkeypatch.chdir(copy.parent)
    assert folder.starting_point(config_of(*long, f"resume={name}"), tmp_path / "new") == Path(name)
    (copy / "actor/__0_0.distcp").unlink()
    with pytest.raises(
        ValueError, match=rf"{name} cannot be used: actor/__0_0.distcp is missing; no whole one is older"
    ):
        folder.starting_point(resumed, tmp_path / "new")


@pytest.mark.parametrize("pointer", ["latest", "best"])
@pytest.mark.parametrize("text", ["", "step_", "../../elsewhere/step_1", "\x00\xff"])
def test_a_damaged_pointer_is_named_with_the_checkpoints_that_there_are(pointer, text, tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / pointer).write_bytes(text.encode("latin-1"))
    find = folder.latest if pointer == "latest" else folder.best
    with pytest.raises(ValueError, match=rf"checkpoints/{pointer} holds '.*', must hold .*there are: step_1, step_2"):
        find(tmp_path)
    config = config_of(*SMALL, f"resume={tmp_path}/checkpoints/{pointer}")
    with pytest.raises(ValueError, match=rf"checkpoints/{pointer} holds '"):
        folder.starting_point(config, tmp_path / "new")


def test_bytes_that_changed_are_found_before_a_run_goes_on(tmp_path):
    config = config_of(*SMALL, "algo.num_steps=9")
    for step in (1, 2, 3):
        save(tmp_path, step, config=config)
    for step, name in ((3, "critic/__0_0.distcp"), (2, "actor/__0_0.distcp")):
        (tmp_path / "checkpoints" / f"step_{step}" / name).write_bytes(b"0123546789")
    with pytest.raises(
        ValueError, match=r"step_3 cannot be used: critic/__0_0.distcp was changed or damaged after .*resume=.*/step_1$"
    ):
        folder.starting_point(config, tmp_path)
    with pytest.raises(ValueError, match=r"step_2 cannot be used: actor/__0_0.distcp was changed"):
        folder.read(tmp_path / "checkpoints" / "step_2", checksums=True)
    unchecked = config_of(*SMALL, "algo.num_steps=9", "checkpoint.checksums=false")
    assert folder.starting_point(unchecked, tmp_path) == tmp_path / "checkpoints" / "step_3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {}}, r"has no actor/\.metadata among its files"),
        ({"files": {"actor/.metadata": 10}}, r"has files\.actor/\.metadata=10, must be an object"),
        (
            {"files": {"actor/.metadata": {"size_bytes": -1}}},
            r"has files\.actor/\.metadata\.size_bytes=-1, must",
        ),
        (
            {"files": {"../x": {"size_bytes": 0, "sha256": None}}},
            r"has files\.\.\./x, which is no file of a",
        ),
        ({"files": None}, "has files=null, must be an object"),
        ({"step": -3}, "has step=-3, must be a whole number of at least 0"),
        ({"step": 2.5}, "has step=2.5, must be a whole number"),
        ({"step": 7}, "has step=7, but the record is of step 2"),
        ({"kl_coef": float("nan")}, "has kl_coef=NaN, must be a finite number"),
        ({"kl_coef": float("inf")}, "has kl_coef=Infinity, must be a finite number"),
        ({"kl_coef": -0.1}, "has kl_coef=-0.1, must be a finite number of at least 0"),
        ({"kl_coef": "0.1"}, "has kl_coef='0.1', must be a finite number"),
        ({"optimizer_steps": {"actor": -1}}, r"has optimizer_steps\.actor=-1, must be"),
        ({"schedule_steps": {"actor": 1.5}}, r"has schedule_steps\.actor=1\.5, must be"),
        ({"tags": {"actor": "ref"}}, r"has tags\.actor='ref', must be a list"),
        ({"tags": {}}, r"has no tags\.actor, though it has optimizer_steps of the actor"),
        ({"record": {"step": 2, "reward": float("nan")}}, r"has record\.reward=NaN, must be a finite number"),
        ({"config": []}, r"has config=\[\], must be an object"),
        ({"questions": None}, "has questions=null, must be text"),
        ({"more": 1}, "has the field more, which is of another version"),
    ],
)
def test_a_manifest_is_judged_field_by_field(changes, message, tmp_path):
    checkpoint = save(tmp_path, 2)
    file = checkpoint / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"step_2 cannot be used: manifest.json {message}"):
        folder.read(checkpoint)


def test_a_field_of_the_manifest_that_is_absent_is_named(tmp_path):
    checkpoint = save(tmp_path, 2)
    file = checkpoint / "manifest.json"
    content = json.loads(file.read_text())
    del content["optimizer_steps"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest.json has no field optimizer_steps, which must be an object; "):
        folder.read(checkpoint)


def test_a_plausible_change_of_the_manifest_is_found_by_its_checksum(tmp_path):
    checkpoint = save(tmp_path, 2)
    file = checkpoint / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content))  # laid out otherwise
    assert folder.read(checkpoint, checksums=True).kl_coef == 0.1
    file.write_text(json.dumps(content | {"kl_coef": 0.7}))
    with pytest.raises(ValueError, match=r"manifest.json was changed after it was saved: its SHA-256 is another"):
        folder.read(checkpoint, checksums=True)
    assert folder.read(checkpoint).kl_coef == 0.7


def test_what_a_record_cannot_say_is_null_in_the_manifest(tmp_path):
    checkpoint = save(tmp_path, 2, record={"step": 2, "kl": float("nan"), "reward": 0.5})
    assert folder.read(checkpoint, checksums=True).record == {"step": 2, "kl": None, "reward": 0.5}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.layers=1", r"roles.actor.model.layers=1 where 2 was saved; roles.critic.model.layers=1 where"),
        ("tokenizer.vocab_size=300", "tokenizer.vocab_size=300 where 320 was saved"),
        ("task.forms=digits", r"task.forms=digits where .* \(the tokenizer is trained on the task"),
        ("seed=2", "task.seed=2 where 1 was saved"),
        ("algo.num_steps=1", "already after step 2: use algo.num_steps=3 or more"),
    ],
)
def test_a_config_that_the_weights_do_not_fit_is_refused(override, named, tmp_path):
    checkpoint = save(tmp_path, 2, config=config_of(*SMALL, "algo.num_steps=4"))
    with pytest.raises(ValueError, match=named):
        folder.starting_point(config_of(*SMALL, override, f"resume={checkpoint}"), tmp_path / "new")


def test_what_weights_do_not_depend_on_may_change(tmp_path):
    checkpoint = save(tmp_path, 1, config=config_of(*SMALL))
    overrides = ("memory=rebuild", "launch.nproc=2", "algo.num_steps=9", "roles.actor.optimizer.lr=1e-3")
    config = config_of(*SMALL, *overrides, f"resume={checkpoint}")
    assert folder.starting_point(config, tmp_path / "new") == checkpoint


def test_other_questions_under_the_same_settings_are_refused(tmp_path):
    """A tokenizer of its own does not depend on them: with other settings of the task a run may go on."""
    model = model_folder(tmp_path / "model")
    for file in ("sums.jsonl", "more.jsonl"):
        (tmp_path / file).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    task = ("task=jsonl", f"task.path={tmp_path}/sums.jsonl")
    trained, given = config_of(*SMALL, *task), of_model(model, *task)
    for name, config in (("trained", trained), ("given", given)):
        save(tmp_path / name, 1, config=config, questions="abc")
        assert folder.starting_point(config, tmp_path / name, questions="abc") is not None
        with pytest.raises(ValueError, match="was saved with other questions than this task has now"):
            folder.starting_point(config, tmp_path / name, questions="def")
    other = of_model(model, "task=jsonl", f"task.path={tmp_path}/more.jsonl", f"resume={tmp_path}/given")
    assert folder.starting_point(other, tmp_path / "new", questions="def") is not None


def test_a_directory_belongs_to_one_job_however_it_goes_on(tmp_path):
    run, config = tmp_path / "run", config_of(*SMALL)
    jobs.claim(run, config, None)
    jobs.write_result(run, {"heldout_accuracy": 0.5})
    for override in ("resume=auto", "resume=null", f"resume={run}/checkpoints/step_1"):
        assert jobs.finished(run, config_of(*SMALL, override)) == {"heldout_accuracy": 0.5}
    for override in (f"resume={tmp_path}/another", "seed=2"):
        with pytest.raises(ValueError, match="holds a run of another config"):
            jobs.finished(run, config_of(*SMALL, override))


def test_records_begin_with_those_of_the_run_that_goes_on(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    checkpoint = save(run, 1)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    config = config_of(*SMALL)
    jobs.claim(other, config, checkpoint)
    assert (other / "metrics.jsonl").read_text() == '{"step": 1}\n'
    (other / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    jobs.claim(other, config, checkpoint)
    assert len((other / "metrics.jsonl").read_text().splitlines()) == 2
    jobs.claim(other, config, None)
    assert not (other / "metrics.jsonl").exists()


def test_the_manifest_is_plain_json(tmp_path):
    checkpoint = save(tmp_path, 1, config=config_of(*SMALL))
    content = json.loads((checkpoint / "manifest.json").read_text())
    assert set(content) == {field.name for field in dataclasses.fields(Manifest)} | {"sha256"}
    assert content["config"]["checkpoint"] == {
        "every_steps": None,
        "keep_last": 2,
        "keep_best": False,
        "async_save": False,
        "checksums": True,
    }


def model_folder(folder: Path) -> Path:
    """A Hugging Face model with a tokenizer."""
    task = ArithmeticTask(max_operand=9, operations=["plus"], forms="digits", heldout_fraction=0.1, seed=1)
    tokenizer = load_tokenizer(None, task=task, vocab_size=280)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, num_key_value_heads=2, **sizes)
    torch.manual_seed(1)
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    write_folder(weights.items(), config=config, tokenizer=tokenizer, folder=folder, shard_bytes=4000)
    return folder


def of_model(path, *overrides):
    return config_of("platform=cpu", "launch.threads_per_worker=1", "model=hf", f"model.path={path}", *overrides)


def test_a_model_is_known_by_its_content_wherever_it_lies(tmp_path, monkeypatch):
    """Moved, and by a relative path: the checkpoint fits, and the directory is still the same job's."""
    model = model_folder(tmp_path / "model")
    config = of_model(model)
    checkpoint = save(tmp_path / "run", 1, config=config)
    jobs.claim(tmp_path / "run", config, None)
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(model, moved)
    shutil.rmtree(model)
    monkeypatch.chdir(moved.parent)
    for path in (moved, "moved", "../elsewhere/moved/"):
        assert folder.starting_point(of_model(path, f"resume={checkpoint}"), tmp_path / "new") == checkpoint
        assert folder.starting_point(of_model(path), tmp_path / "run") == checkpoint
        assert jobs.finished(tmp_path / "run", of_model(path)) is None
        assert config_hash(of_model(path)) == config_hash(config)
    (moved / "generation_config.json").write_text("{}")
    (moved / "README.md").write_text("a model")
    assert folder.starting_point(of_model(moved), tmp_path / "run") == checkpoint


@pytest.mark.parametrize("change", ["weights", "config", "ends", "tokenizer", "template"])
def test_another_model_of_the_same_sizes_in_the_same_place_is_refused(change, tmp_path):
    model = model_folder(tmp_path / "model")
    checkpoint = save(tmp_path / "run", 1, config=of_model(model))
    jobs.claim(tmp_path / "run", of_model(model), None)
    if change == "weights":
        file = next(path for path in model.glob("model-*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-len(content) // 4 :] = bytes(len(content) // 4)
        file.write_bytes(content)
    elif change == "template":
        (model / "chat_template.jinja").write_text("{{ messages }}")
    else:
        name = {"config": "config.json", "ends": "generation_config.json", "tokenizer": "tokenizer_config.json"}[change]
        added = {"eos_token_id": [2, 19]} if change == "ends" else {"more": 1}
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | added))
    section = "tokenizer" if change in ("tokenizer", "template") else "roles.actor.model"
    with pytest.raises(
        ValueError, match=rf"does not fit this config: .*{section}\.path has other content than what was"
    ):
        folder.starting_point(of_model(model, f"resume={checkpoint}"), tmp_path / "new")
    with pytest.raises(ValueError, match="holds a run of another config"):
        jobs.finished(tmp_path / "run", of_model(model))


def test_a_digest_that_is_not_the_folders_is_refused(tmp_path):
    model = model_folder(tmp_path / "model")
    with pytest.raises(ValueError, match=r"tokenizer\.digest=abc is not that of tokenizer\.path="):
        of_model(model, "tokenizer.digest=abc")
    with pytest.raises(ValueError, match=r"roles\.actor\.model\.digest=abc, but the checkpoint in"):
        of_model(model, "model.digest=abc")


def test_another_run_that_a_job_goes_on_from_may_be_spelled_otherwise(tmp_path, monkeypatch):
    run, other = tmp_path / "run", tmp_path / "other"
    save(other, 1, config=config_of(*SMALL))
    jobs.claim(run, config_of(*SMALL, f"resume={other}"), None)
    monkeypatch.chdir(tmp_path)
    assert jobs.finished(run, config_of(*SMALL, "resume=other")) is None
    with pytest.raises(ValueError, match="holds a run of another config"):
        jobs.finished(run, config_of(*SMALL, "resume=third"))

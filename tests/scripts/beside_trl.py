"""GRPO of a real model here and by TRL's GRPOTrainer: the same questions in the same order, reward, batch and settings.

    python -m tests.scripts.beside_trl train DIRECTORY experiment=smollm2 algo=grpo model.path=FOLDER [setting=value]
    python -m tests.scripts.beside_trl draw FIGURE.png NAME=DIRECTORY[,DIRECTORY...]:ALONE ...

``train`` needs ``pip install trl``. It reads the settings of Torpor's own run from its overrides, trains with TRL
(generation by transformers) and writes metrics.jsonl as Torpor does: held-out accuracy of greedy answers, the seconds
of every step, GPU and host memory. Adam, learning rate, clipping, KL term, temperature and updates per step are those
of the config; TRL keeps fp32 weights and computes under bf16 autocast, as is its default.

``draw`` makes one figure of runs of either, a line a name with the standard error over its directories (seeds), and
prints the table for BENCHMARKS.md; seconds and memory are those of the run ALONE, which had the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path

import psutil
import torch
from matplotlib import pyplot

from tests.helpers.composing import config_of
from trainer.config.pieces import make_policy_loss, make_task
from trainer.data.selection import drawn_positions, purpose_of_round
from trainer.measure.accuracy import accuracy_of
from trainer.report.records import read_records

GIB = 2**30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def turn(example):
    """A question as a user's turn, for the tokenizer's chat template."""
    return [{"role": "user", "content": example.question}]


def questions(config, task):
    """Numbers of the questions of every step, in order."""
    algo, purpose = config.algo, purpose_of_round(0)
    for step in range(1, algo.num_steps + 1):
        how = {"count": algo.prompts_per_step, "population": len(task.train)}
        yield from drawn_positions(config, purpose, step, **how)


def grpo_settings(config, directory):
    """TRL's settings from ours: a step is as many optimizer steps as it has minibatches."""
    from trl import GRPOConfig

    algo, optimizer = config.algo, config.roles["actor"].optimizer
    responses = algo.prompts_per_step * algo.responses_per_prompt
    return GRPOConfig(
        output_dir=str(directory / "trl"),
        seed=config.seed,
        max_steps=algo.num_steps * algo.minibatches,
        per_device_train_batch_size=responses // algo.minibatches,
        steps_per_generation=algo.minibatches,
        num_generations=algo.responses_per_prompt,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimizer.lr_warmup_steps,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad,
        beta=algo.kl.coef,
        epsilon=make_policy_loss(config).clip_low,
        loss_type="grpo",
        scale_rewards="group",
        shuffle_dataset=False,
        bf16=True,
        use_cpu=DEVICE == "cpu",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def now():
    """Seconds, when the device has done all its work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def used():
    """GPU memory in use by all, in bytes; torch returns none of what it has taken."""
    free, total = torch.cuda.mem_get_info()
    return total - free


class Recorder:
    """Writes a record after every step of ``minibatches`` optimizer steps, evaluations outside of its seconds."""

    def __init__(self, config, task, directory):
        self._config, self._task = config, task
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "metrics.jsonl").open("w")
        self._process, self._start = psutil.Process(), 0.0
        self.rewards = []

    def reward(self, completions, position, **_):
        """Called by TRL with the completions of some questions."""
        examples = [self._task.train[number] for number in position]
        texts = (completion[0]["content"] for completion in completions)
        found = [self._task.score(text, example) for text, example in zip(texts, examples, strict=True)]
        self.rewards += found
        return found

    def begin(self):
        self._start = now()

    def end(self, step, model, tokenizer):
        seconds, record = now() - self._start, {"step": step}
        if step > 0:
            record["seconds/step"] = seconds
            record["reward_mean"] = statistics.fmean(self.rewards)
        self.rewards = []
        every, last = self._config.algo.evaluate_every, self._config.algo.num_steps
        if step in (0, last) or (every and step % every == 0):
            record |= self._evaluate(model, tokenizer)
        record["gpu_used_bytes"] = used() if DEVICE == "cuda" else None
        record["host_rss_bytes"] = self._process.memory_info().rss
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    @torch.no_grad()
    def _evaluate(self, model, tokenizer):
        examples = list(self._task.heldout)[: self._config.algo.heldout_prompts]
        texts = [
            tokenizer.apply_chat_template(turn(one), tokenize=False, add_generation_prompt=True) for one in examples
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        how = {"do_sample": False, "max_new_tokens": self._config.rollout.max_new_tokens}
        with torch.autocast(DEVICE, torch.bfloat16):
            tokens = model.generate(**batch.to(model.device), **how, pad_token_id=tokenizer.pad_token_id)
        answers = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = [self._task.score(answer, one) for answer, one in zip(answers, examples, strict=True)]
        found = accuracy_of(zip((one.question for one in examples), scores, strict=True))
        return {"heldout_accuracy": found.mean, "heldout_accuracy_se": found.standard_error}


def train(directory, overrides):
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    config = config_of(*overrides)
    task, minibatches = make_task(config), config.algo.minibatches
    rows = [{"prompt": turn(task.train[number]), "position": number} for number in questions(config, task)]
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer.path)
    model = AutoModelForCausalLM.from_pretrained(config.roles["actor"].model.path, dtype=torch.float32)
    recorder = Recorder(config, task, directory)

    class AtEachStep(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            recorder.end(0, model, tokenizer)

        def on_step_begin(self, args, state, control, **_):
            if state.global_step % minibatches == 0:
                recorder.begin()

        def on_step_end(self, args, state, control, model=None, **_):
            if state.global_step % minibatches == 0:
                recorder.end(state.global_step // minibatches, model, tokenizer)

    GRPOTrainer(
        model=model,
        reward_funcs=recorder.reward,
        args=grpo_settings(config, directory),
        train_dataset=Dataset(InMemoryTable.from_pylist(rows), fingerprint=f"seed_{config.seed}"),
        processing_class=tokenizer,
        callbacks=[AtEachStep()],
    ).train()


def records_of(directory):
    return read_records(Path(directory) / "metrics.jsonl")


def seconds_of(record):
    """Of a step: all phases but evaluations and saving."""
    if "seconds/step" in record:
        return record["seconds/step"]
    left_out = ("build", "warm_up", "evaluate", "checkpoint")
    return sum(value for key, value in record.items() if key.startswith("seconds/") and key[8:] not in left_out)


def most_used(directory):
    """Bytes of GPU memory at most, by a run of either."""
    path = Path(directory) / "memory.jsonl"
    records = read_records(path) if path.exists() else records_of(directory)
    return max(record.get("gpu_used_bytes") or 0 for record in records)


def mean_and_error(values):
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def curve(runs):
    """[(step, mean accuracy in percent, its standard error over runs)]."""
    points = []
    for records in zip(*runs, strict=False):  # the steps that all of them have made
        if all("heldout_accuracy" in record for record in records):
            points.append((records[0]["step"], *mean_and_error([100 * one["heldout_accuracy"] for one in records])))
    return points


def draw(figure, named):
    """A figure of all curves over steps and over seconds, and the table in Markdown on stdout."""
    _, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    columns = ("", "held-out accuracy at the end", "s per step, median", "GPU GiB at most", "host GiB at most", "seeds")
    print(f"| {' | '.join(columns)} |\n| :--- {'| ---: ' * 5}|")
    for name, directories, alone in named:
        runs, timed = [records_of(directory) for directory in directories], records_of(alone)[2:]
        steps, accuracy, errors = zip(*curve(runs), strict=True)
        median = statistics.median(map(seconds_of, timed))
        low, high = zip(*((a - e, a + e) for a, e in zip(accuracy, errors, strict=True)), strict=True)
        for axes, places in ((by_step, steps), (by_time, [median * step for step in steps])):
            axes.plot(places, accuracy, marker="o", markersize=3, label=name)
            axes.fill_between(places, low, high, alpha=0.2)
        host, gpu = max(one["host_rss_bytes"] for one in timed), most_used(alone)
        shown = (f"{accuracy[-1]:.1f} ± {errors[-1]:.1f} %", f"{median:.3f}", f"{gpu / GIB:.1f}", f"{host / GIB:.1f}")
        print(f"| {name} | {' | '.join(shown)} | {len(runs)} |")
    by_step.set(xlabel="step", ylabel="held-out accuracy, %")
    by_time.set(xlabel="seconds of training")
    by_time.legend(loc="lower right")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    pyplot.savefig(figure, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["train", "draw"])
    parser.add_argument("output", type=Path)
    parser.add_argument("given", nargs="+", help="overrides, or NAME=DIRECTORY[,DIRECTORY...]:ALONE")
    arguments = parser.parse_args()
    if arguments.verb == "train":
        train(arguments.output, arguments.given)
    else:
        parts = (re.fullmatch("(.*)=(.*):(.*)", one).groups() for one in arguments.given)
        draw(arguments.output, [(name, directories.split(","), alone) for name, directories, alone in parts])


if __name__ == "__main__":
    main()

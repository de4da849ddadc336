"""The rank that plays the episodes of one step; used by tests.dist.test_episodes."""

from typing import Any

from torch import distributed

from tests.helpers.interviews import Interview
from trainer import worker
from trainer.config.schema import Config
from trainer.data.rewards import Payer
from trainer.measure import metrics
from trainer.measure.phases import Phases
from trainer.megatron import platform
from trainer.tasks import Example, Reply
from trainer.training.episodes import play


class Counted(Interview):
    """An interview that knows how often it was asked in this process."""

    asked = 0

    def answer(self, responses: Any, example: Example) -> Reply:
        Counted.asked += 1
        return super().answer(responses, example)


def play_a_step(config: Config) -> dict[str, Any]:
    """Of all ranks: the tokens, masks and rewards of each episode by its number; how often a rank asked the
    environment; what the metrics say. And the rewards of fewer examples than there may be ranks."""
    platform.set_up(config)
    platform.set_up_process_groups(config)
    run = worker.build(config, Phases(lambda record: None, gpu=False))
    run.prompts.environment = Counted(max_turns=4)
    numbers = run.prompts.response_numbers()
    with run.engine.awake():
        episodes = play(
            config, run.prompts, run.engine, run.prompts.for_step(1), seed=3, payer=Payer.REWARD, numbers=numbers
        )
        few = run.prompts.heldout(1)
        alone = play(config, run.prompts, run.engine, few, seed=0, payer=Payer.ENVIRONMENT, greedy=True)
    drawn = episodes.responses
    rows = {
        number: (drawn.tokens[row][:end].tolist(), drawn.response_mask[row][:end].tolist(), episodes.rewards[row])
        for row, (number, end) in enumerate(zip(numbers, lengths(drawn.response_mask), strict=True))
    }
    found: list[Any] = [None] * distributed.get_world_size()
    own = {"rows": rows, "asked": Counted.asked, "few": alone.rewards}
    distributed.all_gather_object(found, own)
    return {"ranks": found, "metrics": metrics.of_episodes(episodes.tally)}


def lengths(mask: Any) -> list[int]:
    return [int(row.nonzero().max()) + 1 for row in mask]

"""Whitening over two gloo ranks equals whitening of the gathered batch, also if a rank has no tokens."""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trainer.algo.masked import whiten

WORLD_SIZE = 2


def make_case(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per rank (x, mask); ranks differ in shape, padding holds NaN."""
    lengths = {
        "uneven": ([1, 50], [200, 3, 0]),
        "rank_without_tokens": ([0, 0], [4, 9]),
        "rank_without_rows": ([], [4, 9]),
        "one_token": ([0], [1]),
        "no_tokens": ([0], [0, 0]),
        "all_equal": ([3], [5, 1]),
    }[name]
    generator = torch.Generator().manual_seed(0)
    ranks = []
    for rows in lengths:
        columns = max([1, *rows])
        mask = torch.arange(columns)[None] < torch.tensor(rows, dtype=torch.long)[:, None]
        x = torch.randn(len(rows), columns, generator=generator) * 3 + 100
        if name == "all_equal":
            x = torch.full_like(x, 0.1)
        ranks.append((torch.where(mask, x, torch.nan), mask))
    return ranks


CASES = ("uneven", "rank_without_tokens", "rank_without_rows", "one_token", "no_tokens", "all_equal")


def whiten_on_rank(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for name in CASES:
        x, mask = make_case(name)[rank]
        results[name] = whiten(x, mask=mask, group=dist.group.WORLD)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def whitened(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("whitening"))
    mp.spawn(whiten_on_rank, args=(folder,), nprocs=WORLD_SIZE)
    return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_whiten_as_if_they_were_one(whitened, name):
    masks = [mask for _, mask in make_case(name)]
    all_tokens = torch.cat([x[mask] for x, mask in make_case(name)])[None]
    expected = whiten(all_tokens, mask=torch.ones_like(all_tokens, dtype=torch.bool))
    actual = torch.cat([result[name][mask] for result, mask in zip(whitened, masks, strict=True)])[None]
    torch.testing.assert_close(actual, expected)
    assert all(not result[name][~mask].any() for result, mask in zip(whitened, masks, strict=True))
    if name in ("uneven", "rank_without_tokens", "rank_without_rows"):
        assert actual.mean().item() == pytest.approx(0, abs=1e-6)
        assert actual.var(correction=0).item() == pytest.approx(1, abs=1e-5)
    else:
        assert torch.equal(actual, torch.zeros_like(actual))

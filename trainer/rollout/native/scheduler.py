"""Which rows are decoded when: prompts wait for slots and pages, finished rows give theirs back. Host side only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.common.multiples import divide_up
from trainer.rollout.native.cache import KvCache
from trainer.rollout.native.slots import Entry

_ENTER_TOGETHER = 8  # an eighth of the slots is free before prompts interrupt rows that are being decoded


@dataclass(frozen=True)
class Request:
    """One response to be drawn: ``index`` in the call, ``number`` for its draws, ``limit`` of its tokens."""

    index: int
    number: int
    limit: int


@dataclass
class Running:
    """A row in a slot, with ``drawn`` tokens after its prompt; ``is_stopped``: by a stop string."""

    request: Request
    slot: int
    pages: list[int]
    prompt_tokens: int
    drawn: int = 0
    is_stopped: bool = False


@dataclass(frozen=True)
class Group:
    """Responses to one prompt, which enter together so that it is computed once."""

    prompt: Sequence[int]
    requests: list[Request]


@dataclass
class Scheduler:
    """The rows of one call. A row enters when there is room for its longest response, so none has to leave early."""

    cache: KvCache
    waiting: deque[Group]
    running: dict[int, Running] = field(default_factory=dict)  # by slot
    _free_slots: list[int] = field(default_factory=list)
    _free_pages: list[int] = field(default_factory=list)
    _users: dict[int, int] = field(default_factory=dict)  # page -> rows that share it

    @property
    def steps_left(self) -> int:
        """After so many more steps every running row has ended."""
        return max((row.request.limit - row.drawn for row in self.running.values()), default=0)

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], numbers: Sequence[int], limits: Sequence[int], *, cache: KvCache
    ) -> Scheduler:
        """One request for each prompt; equal prompts form groups, as large as the empty cache holds."""
        groups: dict[tuple[int, ...], list[Request]] = {}
        for index, (prompt, number, limit) in enumerate(zip(prompts, numbers, limits, strict=True)):
            groups.setdefault(tuple(prompt), []).append(Request(index, number, limit))
        scheduler = cls(cache, deque())
        scheduler._free_slots = list(reversed(range(cache.rows)))
        scheduler._free_pages = list(reversed(range(1, cache.pages)))  # page 0 is scratch
        for prompt, requests in groups.items():
            shared, own = scheduler._pages_of(len(prompt))
            most = min(cache.rows, (cache.pages - 1 - shared) // own)
            scheduler.waiting.extend(
                Group(prompt, requests[start : start + most]) for start in range(0, len(requests), most)
            )
        return scheduler

    def _pages_of(self, prompt_tokens: int) -> tuple[int, int]:
        """(pages that rows of one prompt share, pages of each of them alone)."""
        page_tokens = self.cache.page_tokens
        shared = prompt_tokens // page_tokens
        return shared, divide_up(prompt_tokens + self.cache.response_tokens, page_tokens) - shared

    def enter(self, *, most_tokens: int) -> tuple[list[Sequence[int]], list[Entry]]:
        """Prompts that can be computed now, ``most_tokens`` together unless one alone has more, and their rows."""
        prompts: list[Sequence[int]] = []
        entries: list[Entry] = []
        waiting = sum(len(group.requests) for group in self.waiting)
        if self.running and len(self._free_slots) < min(waiting, self.cache.rows // _ENTER_TOGETHER):
            return prompts, entries
        tokens = 0
        while self.waiting and self._has_room(self.waiting[0]):
            tokens += len(self.waiting[0].prompt)
            if prompts and tokens > most_tokens:
                break
            group = self.waiting.popleft()
            entries.extend(self._start(group, prompt=len(prompts)))
            prompts.append(group.prompt)
        return prompts, entries

    def _has_room(self, group: Group) -> bool:
        shared, own = self._pages_of(len(group.prompt))
        rows = len(group.requests)
        return rows <= len(self._free_slots) and shared + rows * own <= len(self._free_pages)

    def _start(self, group: Group, *, prompt: int) -> list[Entry]:
        shared, own = self._pages_of(len(group.prompt))
        shared_pages = [self._free_pages.pop() for _ in range(shared)]
        entries = []
        for request in group.requests:
            pages = shared_pages + [self._free_pages.pop() for _ in range(own)]
            for page in pages:
                self._users[page] = self._users.get(page, 0) + 1
            slot = self._free_slots.pop()
            self.running[slot] = Running(request, slot, pages, len(group.prompt))
            entries.append(Entry(slot, request.number, request.limit, prompt, pages))
        return entries

    def leave(self, slots: Sequence[int]) -> list[Running]:
        """The rows in ``slots`` are finished; they give back what they held."""
        rows = [self.running.pop(slot) for slot in slots]
        for row in rows:
            self._free_slots.append(row.slot)
            for page in row.pages:
                self._users[page] -= 1
                if not self._users[page]:
                    self._free_pages.append(page)
        return rows

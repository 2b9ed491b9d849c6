"""Recurrent states of slots: which block of the state tables a call reads, which it writes, and which are
kept.

Layers with linear attention, short convolutions or state spaces have a state of a fixed size beside the KV
cache. It goes forward only: no call can take it back to an earlier position. So a prompt that begins like
another one continues from a snapshot, a block that is kept as it was after one of the other's chunks; and
draft tokens write a block each, of which the one after the last accepted token goes on. What the blocks hold
is the engine's; all rules about them are here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

ZERO = 0  # the block that every sequence begins with: zeros, never written


class State(NamedTuple):
    """The state after the first `position` tokens of a slot."""

    position: int
    block: int


class Run(NamedTuple):
    """The next tokens of one slot in a call, and the blocks that these tokens read and write."""

    slot: int
    position: int
    tokens: int
    read: int  # block
    writes: list[int]  # the block of the state after the last token; of draft tokens one after each

    @property
    def end(self) -> int:
        return self.position + self.tokens

    @property
    def is_prompt(self) -> bool:
        """Whether the run is a part of a prompt with more than one token: these write one state. Draft tokens
        write a state each."""
        return self.tokens > len(self.writes)


class States:
    """The blocks of the state tables: ZERO, one for each slot to write to, `snapshots` more, and
    `draft_tokens` for the draft tokens of a call.

    in_place: a slot always writes the same block, and a call copies a state that is kept to a block of its
    own. Else the block that was written is kept, and the slot gets another block.
    """

    def __init__(self, slots: int, snapshots: int, draft_tokens: int = 0, in_place: bool = False):
        self.count = 1 + slots + snapshots + draft_tokens
        self.snapshots = snapshots
        self._in_place = in_place
        self._own = list(range(1, 1 + slots))  # the block that each slot writes next
        self._free = list(range(1 + slots, 1 + slots + snapshots))
        self._for_drafts = list(range(1 + slots + snapshots, self.count))
        self._drafts: dict[int, list[State]] = {}  # by slot: of its last call, not yet accepted
        # Of each slot; None: a call that failed has changed it.
        self._current: list[State | None] = [State(0, ZERO)] * slots
        self._kept: list[dict[int, int]] = [{} for _ in range(slots)]  # by slot: position → block
        self._at_border: dict[int, bool] = {}  # by block of a snapshot; the least recently used first

    @property
    def kept(self) -> int:
        """How many snapshots there are."""
        return len(self._at_border)

    @property
    def unused(self) -> set[int]:
        """The blocks whose contents no later call reads: a call writes such a block before it is read."""
        used = {state.block for states in self._drafts.values() for state in states}
        return set(range(1, self.count)) - self._continued - used - self._at_border.keys()

    @property
    def _continued(self) -> set[int]:
        """The blocks that slots continue from."""
        return {state.block for state in self._current if state}

    def reusable(self, slot: int, tokens: int) -> int:
        """Returns the last position up to `tokens` at which `slot` has a snapshot, so that a sequence can
        continue from there; 0: there is none. Changes nothing."""
        return max((position for position in self._kept[slot] if position <= tokens), default=0)

    def resume(self, source: int, slot: int, tokens: int) -> None:
        """Makes `slot` continue from the snapshot that `source` has at the position `tokens`, which
        `reusable` returned; 0: from the state of zeros. `slot` then has the snapshots of `source` up to that
        position, and no others; they count as just used. Draft tokens of `slot` are dropped. `source` may be
        `slot`; another one stays as it is."""
        self._accept(slot, None)
        self._kept[slot] = {
            position: block for position, block in self._kept[source].items() if position <= tokens
        }
        self._current[slot] = State(tokens, self._kept[slot][tokens] if tokens else ZERO)
        for block in self._kept[slot].values():
            self._at_border[block] = self._at_border.pop(block)
        self._free_unkept()

    def accept(self, positions: Mapping[int, int]) -> None:
        """Keeps the states after the accepted draft tokens of the last call, and frees the blocks of the
        others.

        positions: where each slot that runs next goes on, which says how many of its draft tokens were
        accepted. A slot with draft tokens that is not in `positions` has ended, and has no state until it
        begins anew.
        """
        for slot in list(self._drafts):
            self._accept(slot, positions.get(slot))

    def _accept(self, slot: int, position: int | None) -> None:
        """Does for one slot what `accept` does for all; changes nothing for a slot without draft tokens.
        position: where the slot goes on; None: it has ended."""
        states = self._drafts.pop(slot, ())
        for state in states:
            if state.position == position:
                self._current[slot] = state
                self._own[slot] = state.block
        self._for_drafts += [state.block for state in states if state.block != self._own[slot]]

    def begin(self, slot: int, position: int, tokens: int, are_drafts: bool = False) -> Run:
        """Plans the next tokens of a slot in a call: returns the blocks that they read and write. Position 0
        begins a new sequence, without the snapshots of the last one. The slot has no state until `end`, or
        `accept` after a call with draft tokens. After a call that failed neither gives it one: it must begin
        anew.

        are_drafts: all tokens but the first are draft tokens, and each writes a state. Raises ValueError if
        the state of the slot is not the one at `position`.
        """
        if position == 0:
            self.resume(slot, slot, 0)
        state = self._current[slot]
        if state is None or state.position != position:
            raise ValueError(f"slot {slot} has no state at position {position}")
        self._current[slot] = None
        writes = [self._own[slot]]
        if are_drafts:
            writes += [self._for_drafts.pop() for _ in range(tokens - 1)]
            self._drafts[slot] = [State(position + n, block) for n, block in enumerate(writes, 1)]
        return Run(slot, position, tokens, state.block, writes)

    def position(self, slot: int) -> int:
        """Returns how many tokens the state of a slot has. The slot must have a state."""
        return self._current[slot].position

    def end(self, runs: Sequence[Run], keep: Mapping[int, str]) -> dict[int, int]:
        """Records that the call of these runs succeeded. Returns the blocks of the new snapshots, by slot:
        with `in_place` the caller copies the states there, else they have been written. Slots with draft
        tokens are left to `accept`.

        keep: how the state after a slot's tokens is kept for sequences that begin alike: "border",
        "interval", or "" for no snapshot. If no block is free, an older snapshot is dropped: one at an
        interval before one at a message's border, then the first and the last of a slot after others, then
        the least recently used one. If none can be dropped, as slots continue from all of them, no snapshot
        is made.
        """
        blocks = {}
        for run in runs:
            if run.slot in self._drafts:
                continue
            written = run.writes[0]
            self._current[run.slot] = State(run.end, written)
            if keep.get(run.slot) and (block := self._free_block()) is not None:
                if not self._in_place:
                    self._own[run.slot], block = block, written
                blocks[run.slot] = self._kept[run.slot][run.end] = block
                self._at_border[block] = keep[run.slot] == "border"
        return blocks

    def _free_block(self) -> int | None:
        """Takes a free block and returns it. If none is free, drops a snapshot, as `end` says, from every
        slot that has it, and returns its block. Returns None if there are no snapshots, or if each is the
        current state of a slot, running or ended."""
        if not self._free:
            ends = {kept[end(kept)] for kept in self._kept if kept for end in (min, max)}
            snapshots = sorted(self._at_border, key=lambda block: (self._at_border[block], block in ends))
            victim = next((block for block in snapshots if block not in self._continued), None)
            self._kept = [
                {position: block for position, block in kept.items() if block != victim}
                for kept in self._kept
            ]
            self._free_unkept()
        return self._free.pop() if self._free else None

    def _free_unkept(self) -> None:
        """Frees the blocks of snapshots that no slot has any more, and none continues from."""
        held = {block for kept in self._kept for block in kept.values()} | self._continued
        for block in self._at_border.keys() - held:
            del self._at_border[block]
            self._free.append(block)

"""Every policy once more, as obviously as Python allows: no slots, no lists of slots, no stamps."""

from __future__ import annotations

from vllm_ula.replay.policy import Policy, Served, sequences
from vllm_ula.traces.events import TracedCall


def wanted_by(call, tokens=slice(None), of="selected_positions"):
    """Distinct entries that decode tokens select, in order."""
    rows = getattr(call, of)[tokens][call.decode[tokens]]
    return list(dict.fromkeys(entry for row in rows.tolist() for entry in row if entry >= 0))


class Lru:
    """The hot region: a list of positions, oldest first."""

    def __init__(self, num_rows):
        self.num_rows, self.rows = num_rows, []

    def serve(self, wanted):
        kept = [p for p in self.rows if p in wanted]
        others = [p for p in self.rows if p not in wanted]
        missed = [p for p in wanted if p not in self.rows]
        # Empty slots go before rows; what finds no slot is not kept.
        new = missed[: self.num_rows - len(kept)]
        leaving = max(len(others) + len(kept) + len(new) - self.num_rows, 0)
        self.rows = others[leaving:] + new[::-1] + kept
        return len(missed)


class SglangOracle(Policy):
    def __init__(self, hot_rows):
        self.hot_rows, self.regions = hot_rows, {}

    def admit(self, admission):
        self.regions[admission.seq] = region = Lru(self.hot_rows)
        if admission.prompt_tokens <= self.hot_rows:
            region.rows = list(range(self.hot_rows))

    def call(self, call):
        total = Served()
        for seq, tokens in sequences(call):
            if not call.decode[tokens].any():
                continue
            wanted = wanted_by(call, tokens)
            newest = call.positions[tokens].min()
            missed = 0
            if call.positions[tokens].max() >= self.hot_rows:
                missed = self.regions[seq].serve([p for p in wanted if p < newest])
            total += Served(
                len(wanted), len(wanted) - missed, missed, 0, 0, tokens.stop - tokens.start
            )
        return total

    def end(self, end):
        self.regions.pop(end.seq, None)

    def deaths(self, deaths):
        pass


class SharedOracle(Policy):
    """Device rows as a list of logical slots: dead ones, then from oldest to newest."""

    def __init__(self, device_slots, block_size):
        self.num_device, self.block_size = device_slots, block_size
        self.rows, self.live = list(range(device_slots)), set()

    def touch(self, row):
        self.rows.remove(row)
        self.rows.append(row)

    def seat(self, row):
        leaves = self.rows.pop(0)
        self.rows.append(row)
        return leaves in self.live

    def call(self, call):
        writes = [w for w in call.written.tolist() if w >= 0]
        used = set()
        for row in writes:
            if row in self.rows:
                self.touch(row)
                used.add(row)
        incoming = []
        for row, decode in zip(call.written.tolist(), call.decode.tolist(), strict=True):
            if row >= 0 and decode and row not in used and len(used) < self.num_device:
                used.add(row)
                incoming.append(row)
        promoted, fetched = [], 0
        rows_of_tokens = call.selection[call.decode].tolist()
        for rows in rows_of_tokens:
            rows = [row for row in rows if row >= 0]
            if len(used | set(rows)) > self.num_device:
                break
            for row in rows:
                if row not in promoted:
                    promoted.append(row)
                if row in used:
                    continue
                used.add(row)
                if row in self.rows:
                    self.touch(row)
                else:
                    incoming.append(row)
                    fetched += row not in writes
        written_back = sum([self.seat(row) for row in incoming])
        for row in writes:
            if row not in self.rows and self.rows[0] not in self.live and self.rows[0] not in used:
                self.seat(row)
                used.add(row)
            self.live.add(row)
        in_place = [row for row in wanted_by(call, of="selection") if row not in promoted]
        on_device = sum(row in self.rows for row in in_place)
        return Served(
            selected=len(promoted) + len(in_place),
            hits=len(promoted) - fetched,
            fetched=fetched,
            in_place_device=on_device,
            in_place_host=len(in_place) - on_device,
            written_back=written_back,
        )

    def deaths(self, deaths):
        for block in deaths.blocks.tolist():
            for row in range(block * self.block_size, (block + 1) * self.block_size):
                self.live.discard(row)
                if row in self.rows:
                    self.rows.remove(row)
                    self.rows.insert(0, row)

    def admit(self, admission):
        pass

    def end(self, end):
        pass


def fewest_fetches(events, device_rows):
    """Least possible fetches of a shared pool: every choice of rows to keep, after every call.

    Rows are logical slots. A call needs what it selects or decode tokens write all at once.
    """
    calls = [event for event in events if isinstance(event, TracedCall)]
    states = {frozenset(): 0}
    for call in calls:
        decode = call.decode
        need = set(wanted_by(call, of="selection"))
        written = set(call.written.tolist())
        held = need | set(call.written[decode].tolist())
        after: dict[frozenset[int], int] = {}
        for state, cost in states.items():
            now = cost + len(need - state - written)
            candidates = sorted(state | held | written)
            room = device_rows - len(held)
            others = [row for row in candidates if row not in held]
            for kept in subsets(others, room):
                key = frozenset(kept) | held
                after[key] = min(after.get(key, now), now)
        states = after
    return min(states.values())


def subsets(rows, most):
    """The largest subsets; keeping more never costs anything."""
    from itertools import combinations

    return combinations(rows, min(most, len(rows)))


class FurthestFirst(Policy):
    """Belady by looking into the future anew for every choice."""

    def __init__(self, events, device_rows):
        self.calls = [event for event in events if isinstance(event, TracedCall)]
        self.device_rows, self.rows, self.now = device_rows, set(), 0

    def next_use(self, row):
        for ahead, call in enumerate(self.calls[self.now + 1 :], start=1):
            if row in call.written.tolist():
                return None
            if row in wanted_by(call, of="selection"):
                return ahead
        return None

    def call(self, call):
        need = set(wanted_by(call, of="selection"))
        written = set(call.written.tolist())
        held = need | set(call.written[call.decode].tolist())
        fetched = len(need - self.rows - written)
        rest = [row for row in self.rows | written if row not in held]
        rest = [row for row in rest if self.next_use(row)]
        rest.sort(key=self.next_use)
        self.rows = held | set(rest[: self.device_rows - len(held)])
        self.now += 1
        return Served(selected=len(need), hits=len(need) - fetched, fetched=fetched)

    def admit(self, admission):
        pass

    def end(self, end):
        pass

    def deaths(self, deaths):
        pass


class VllmOracle(Policy):
    """Pages by name: pinned ones in a set, free blocks in a list, each as the page still in it."""

    def __init__(self, num_blocks, hot_blocks, page_size):
        self.num_blocks, self.hot_blocks, self.page_size = num_blocks, hot_blocks, page_size
        self.queue = [None] * num_blocks
        self.pinned, self.pages, self.asks, self.regions = {}, {}, set(), {}

    def take(self):
        return self.queue.pop(0)

    def unpin(self, seq, length):
        full = min(length // self.page_size, self.pages[seq] - 2)
        for page in sorted((p for p in self.pinned[seq] if p < full), reverse=True):
            self.pinned[seq].remove(page)
            self.queue.append((seq, page))

    def advance(self, seq, length):
        if seq in self.asks and seq not in self.regions:
            if len(self.queue) < self.hot_blocks:
                self.unpin(seq, length)
            if len(self.queue) >= self.hot_blocks:
                for _ in range(self.hot_blocks):
                    self.take()
                self.regions[seq] = Lru(self.hot_blocks * self.page_size)
        while self.pages[seq] * self.page_size < length:
            if self.queue:
                self.take()
                self.pinned[seq].add(self.pages[seq])
            self.pages[seq] += 1
        if seq in self.regions:
            self.unpin(seq, length)
        elif len(self.queue) < max(self.hot_blocks, self.num_blocks // 10):
            self.asks.add(seq)

    def admit(self, admission):
        seq = admission.seq
        self.pinned[seq], self.pages[seq] = set(), 0
        for length in range(1, admission.prompt_tokens + 1):
            if length % self.page_size == 0 or length == admission.prompt_tokens:
                self.advance(seq, length)

    def call(self, call):
        total = Served()
        for seq, tokens in sequences(call):
            self.advance(seq, int(call.positions[tokens].max()) + 1)
            if not call.decode[tokens].any():
                continue
            wanted = wanted_by(call, tokens)
            newest = call.positions[tokens].min()
            unpinned = {entry[1] for entry in self.queue if entry and entry[0] == seq}
            readable = self.pinned[seq] | unpinned
            away = [p for p in wanted if p < newest and p // self.page_size not in readable]
            fetched = self.regions[seq].serve(away) if seq in self.regions else len(away)
            total += Served(
                len(wanted), len(wanted) - fetched, fetched, 0, 0, tokens.stop - tokens.start
            )
        return total

    def end(self, end):
        seq = end.seq
        self.queue = [None if entry and entry[0] == seq else entry for entry in self.queue]
        freed = len(self.pinned.pop(seq)) + (self.hot_blocks if seq in self.regions else 0)
        self.queue += [None] * freed
        self.asks.discard(seq)
        self.regions.pop(seq, None)

    def deaths(self, deaths):
        pass

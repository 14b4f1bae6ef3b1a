"""The workload of the comparisons: 8 requests, greedy and seeded, and the pools they run under."""

from __future__ import annotations

from engine.harness import Request, prompts

LENGTHS = (40, 130, 200, 250, 300, 333, 395, 500)
REQUESTS = [
    Request(prompt, 16, arrives=i // 3, seed=100 + i if i % 2 else None)
    for i, prompt in enumerate(prompts(LENGTHS))
]
AGAIN = [Request(r.prompt, 4, arrives=i) for i, r in enumerate(REQUESTS[1::2])]
HISTORY = sum(LENGTHS) + 16 * len(LENGTHS)  # 2,276 tokens
BLOCKS = 176  # logical blocks of 16 tokens, in every arm
D_MIN = 144  # index_topk 128 and 8 decode tokens, in whole blocks
POOLS: dict[str, dict[str, float]] = {
    "half": {"device_slots": 1136, "host_gib": 0.05},
    "eighth": {"device_slots": 288, "host_gib": 0.05},
    "minimum": {"device_slots": D_MIN, "host_gib": 0.05},
    "no host": {},
}

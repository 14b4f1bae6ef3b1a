"""The cases: every operation against its reference, then against the machine and torch."""

from benchmarks.gpu import (
    attention_cases,
    decode_step,
    exchange_cases,
    index_cases,
    map_cases,
    row_cases,
    selection_cases,
)

CASES = (
    *map_cases.CASES,
    *index_cases.CASES,
    *selection_cases.CASES,
    *row_cases.CASES,
    *attention_cases.CASES,
    *exchange_cases.CASES,
    *decode_step.CASES,
)

"""Traces: what a serving run selected, wrote and forgot, as files that can be replayed."""

from vllm_ula.traces.events import (
    Admission,
    BlocksGiven,
    CallTokens,
    Deaths,
    End,
    Header,
    TracedCall,
)
from vllm_ula.traces.reader import Trace, open_trace
from vllm_ula.traces.writer import TraceWriter

__all__ = [
    "Admission",
    "BlocksGiven",
    "CallTokens",
    "Deaths",
    "End",
    "Header",
    "Trace",
    "TraceWriter",
    "TracedCall",
    "open_trace",
]

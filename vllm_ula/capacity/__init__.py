"""How many tokens fit, in pure arithmetic: every formula about capacity is here.

token.py       bytes of a token: rows, index keys, maps
rank.py        logical, device and host slots of a rank, as the engine has them at start
slots.py       what they hold
systems.py     systems, models and machines to compare
admission.py   the requests each of them admits
held.py        the rows each of them keeps: unique, copies, buffers
"""

from vllm_ula.capacity.admission import Bound, admitted, bounds
from vllm_ula.capacity.held import Held, KeptBytes, device_rows, held, of_ranks
from vllm_ula.capacity.rank import fit, host_share, min_device_slots, split
from vllm_ula.capacity.slots import Capacity, Limit
from vllm_ula.capacity.systems import (
    B300,
    GLM_5_3,
    H200,
    PAGE,
    Machine,
    Model,
    Parallel,
    System,
)
from vllm_ula.capacity.token import MapBytes, TokenBytes
from vllm_ula.capacity.units import GIB, ceil_to, floor_to

__all__ = [
    "B300",
    "GIB",
    "GLM_5_3",
    "H200",
    "PAGE",
    "Bound",
    "Capacity",
    "Held",
    "KeptBytes",
    "Limit",
    "Machine",
    "MapBytes",
    "Model",
    "Parallel",
    "System",
    "TokenBytes",
    "admitted",
    "bounds",
    "ceil_to",
    "device_rows",
    "fit",
    "floor_to",
    "held",
    "host_share",
    "min_device_slots",
    "of_ranks",
    "split",
]

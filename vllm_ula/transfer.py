"""Moving the bytes of an exchange, for all layers of a domain (paper section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ula.kernels.reference.exchange import exchange as exchange_rows
from vllm_ula.records import DeviceSlots, Exchange, HostSlots, LayerRows


def transfer(layers: Sequence[LayerRows], exchange: Exchange) -> None:
    """Fetch incoming rows and write live victims back; the map still says the old homes.

    Args:
        layers: every layer of the domain.
        exchange: what changes homes. Rows it neither fetches nor writes back move no bytes.

    Raises:
        TypeError: a slot of one tier stands where one of the other belongs.
    """
    if not isinstance(exchange.victims, DeviceSlots) or not isinstance(exchange.vacated, HostSlots):
        raise TypeError(
            f"an exchange moves between DeviceSlots and HostSlots, not "
            f"{type(exchange.victims).__name__} and {type(exchange.vacated).__name__}"
        )
    num = len(exchange) if exchange.num is None else int(exchange.num)
    if not num:
        return
    fetch, write_back = exchange.fetch[:num], exchange.write_back[:num]
    vacated, victims = exchange.vacated.index[:num], exchange.victims.index[:num]
    fetch_from, fetch_to = vacated[fetch], victims[fetch]
    down_from, down_to = victims[write_back], vacated[write_back]
    for layer in layers:
        exchange_rows(layer.device, layer.host, fetch_from, fetch_to, down_from, down_to)

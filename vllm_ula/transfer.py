"""Moving the bytes of an exchange, for all layers of a domain (paper section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ula.kernels.reference.exchange import exchange as exchange_rows
from vllm_ula.records import DeviceSlots, Exchange, HostSlots, LayerRows, Moved


def transfer(layers: Sequence[LayerRows], exchange: Exchange) -> Moved:
    """Fetch incoming rows and write live victims back; the map still says the old homes.

    Args:
        layers: every layer of the domain.
        exchange: what changes homes. Rows it neither fetches nor writes back move no bytes.

    Returns:
        Rows moved (once per domain) and bytes moved (over all layers).

    Raises:
        TypeError: a slot of one tier stands where one of the other belongs.
    """
    if not isinstance(exchange.victims, DeviceSlots) or not isinstance(exchange.vacated, HostSlots):
        raise TypeError(
            f"an exchange moves between DeviceSlots and HostSlots, not "
            f"{type(exchange.victims).__name__} and {type(exchange.vacated).__name__}"
        )
    if not len(exchange):
        return Moved()
    fetch, write_back = exchange.fetch, exchange.write_back
    fetched, written_back = int(fetch.sum()), int(write_back.sum())
    if fetched == written_back == 0:
        return Moved()
    fetch_from, fetch_to = exchange.vacated.index[fetch], exchange.victims.index[fetch]
    down_from, down_to = exchange.victims.index[write_back], exchange.vacated.index[write_back]
    for layer in layers:
        exchange_rows(layer.device, layer.host, fetch_from, fetch_to, down_from, down_to)
    row_bytes = sum(layer.row_bytes for layer in layers)
    return Moved(fetched, written_back, fetched * row_bytes, written_back * row_bytes)

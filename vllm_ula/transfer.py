"""Moving the bytes of an exchange, for all layers of a domain (paper section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ula.kernels import dispatch
from vllm_ula.records import DeviceSlots, Exchange, HostSlots, LayerRows, Moved


def transfer(layers: Sequence[LayerRows], exchange: Exchange) -> Moved:
    """Fetch incoming rows and write live victims back; the map still says the old homes.

    Args:
        layers: of one domain.
        exchange: what changes homes. Rows it neither fetches nor writes back move no bytes.

    Returns:
        Rows moved (once per domain) and bytes moved (over these layers); nothing is counted on a
        GPU, where that would wait for the planning.

    Raises:
        TypeError: a slot of one tier stands where one of the other belongs.
    """
    victims, vacated = exchange.victims, exchange.vacated
    if not isinstance(victims, DeviceSlots) or not isinstance(vacated, HostSlots):
        raise TypeError(
            f"an exchange moves between DeviceSlots and HostSlots, not "
            f"{type(victims).__name__} and {type(vacated).__name__}"
        )
    if not len(exchange):
        return Moved()
    fetch, write_back, num = exchange.fetch, exchange.write_back, exchange.num
    dispatch.exchange(victims.index, vacated.index, fetch, write_back, num, layers)
    if victims.index.is_cuda:
        return Moved()
    if num is not None:
        fetch, write_back = fetch[: int(num)], write_back[: int(num)]
    fetched, written_back = int(fetch.sum()), int(write_back.sum())
    row_bytes = sum(layer.row_bytes for layer in layers)
    return Moved(fetched, written_back, fetched * row_bytes, written_back * row_bytes)

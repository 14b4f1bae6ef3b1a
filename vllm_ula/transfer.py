"""Moving the bytes of an exchange, for all layers of a domain (paper section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ula.kernels import dispatch
from vllm_ula.records import DeviceSlots, Exchange, HostSlots, LayerRows


def transfer(layers: Sequence[LayerRows], exchange: Exchange) -> None:
    """Fetch incoming rows and write live victims back; the map still says the old homes.

    Args:
        layers: of one domain.
        exchange: what changes homes. Rows it neither fetches nor writes back move no bytes.

    Raises:
        TypeError: a slot of one tier stands where one of the other belongs.
    """
    victims, vacated = exchange.victims, exchange.vacated
    if not isinstance(victims, DeviceSlots) or not isinstance(vacated, HostSlots):
        raise TypeError(
            f"an exchange moves between DeviceSlots and HostSlots, not "
            f"{type(victims).__name__} and {type(vacated).__name__}"
        )
    if len(exchange):
        fetch, write_back = exchange.fetch, exchange.write_back
        dispatch.exchange(victims.index, vacated.index, fetch, write_back, exchange.num, layers)

"""Fixtures of the core suite."""

import pytest

from vllm_ula.planner import PbLru, TimestampLru


@pytest.fixture(params=[PbLru, TimestampLru])
def planner(request):
    return request.param

import pytest

from vllm_ula.config import (
    CHECK_VARIABLE,
    KERNELS,
    KERNELS_VARIABLE,
    UlaConfig,
    check_every_step,
    check_record_directory,
    chosen_kernels,
)
from vllm_ula.errors import ConfigError, UlaError
from vllm_ula.kernels.dispatch import Kernels

NAN, INF = float("nan"), float("inf")
BAD = [
    *(
        ("host_gib", value, f"host_gib={value}: must be >= 0 GiB; use 4")
        for value in (-1, -0.5, NAN, INF, -INF, "4", None, True, [4])
    ),
    *(
        ("device_gib", value, f"device_gib={value}: must be > 0 GiB; use 1")
        for value in (0, 0.0, -2, NAN, INF, "1", False)
    ),
    *(
        ("device_slots", value, f"device_slots={value}: must be a whole number > 0; use 4096")
        for value in (0, -64, 64.0, "64", True)
    ),
    *(
        (
            "planner",
            value,
            f"planner={value}: must be one of pb_lru, timestamp_lru, hash_lru; use pb_lru",
        )
        for value in ("lru", "PB_LRU", "", None, 1, ["pb_lru"])
    ),
    *(
        (
            "recency_buckets",
            value,
            f"recency_buckets={value}: must be a whole number 2..4096; use 64",
        )
        for value in (0, 1, -4, 4097, 8.0, "64", None, True)
    ),
    *(
        ("record", value, f"record={value}: must be the path of a directory; use trace")
        for value in ("", 1, True, ["trace"])
    ),
    *(
        ("record_gib", value, f"record_gib={value}: must be > 0 GiB; use 1")
        for value in (0, 0.0, -1, NAN, INF, "1", None, True)
    ),
    *(
        (
            "bucket_age",
            value,
            f"bucket_age={value}: must be one of admitted, touched, calls; use admitted",
        )
        for value in ("rows", "", None, 1)
    ),
    *(
        (
            "hash_buckets",
            value,
            f"hash_buckets={value}: must be a power of two up to 4096; use 64",
        )
        for value in (0, 3, -4, 8192, 8.0, "64", None, True)
    ),
    *(
        (
            key,
            1,
            f"{key}=1: is no setting of ula; use one of host_gib, device_gib, device_slots, "
            "planner, recency_buckets, bucket_age, hash_buckets, record, record_gib",
        )
        for key in ("host_gb", "Host_gib", "cpu_bytes_to_use", "")
    ),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD)
def test_a_bad_setting_is_named_with_value_rule_and_what_works(key, value, message):
    with pytest.raises(ConfigError) as refused:
        UlaConfig.from_extra_config({key: value})
    assert str(refused.value) == message
    assert refused.value.key == key
    assert isinstance(refused.value, UlaError)


def test_two_sizes_for_one_device_pool_are_refused():
    with pytest.raises(ConfigError) as refused:
        UlaConfig(device_slots=64, device_gib=2)
    assert str(refused.value) == (
        "device_slots=64: fixes the device pool, which device_gib=2 sizes too; use one of the two"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("host_gib", v) for v in (0, 4, 0.25)),
        *(("device_gib", v) for v in (None, 1, 0.001)),
        *(("device_slots", v) for v in (None, 1, 4096)),
        *(("planner", v) for v in ("pb_lru", "timestamp_lru", "hash_lru")),
        *(("bucket_age", v) for v in ("admitted", "touched", "calls")),
        *(("hash_buckets", v) for v in (1, 64, 4096)),
        *(("recency_buckets", v) for v in (2, 64, 4096)),
        *(("record", v) for v in (None, "trace", "/tmp/a trace")),
        *(("record_gib", v) for v in (1, 0.001, 64)),
    ],
)
def test_good_settings_are_kept(key, value):
    assert getattr(UlaConfig.from_extra_config({key: value}), key) == value


def test_a_trace_goes_into_a_new_or_an_empty_directory(tmp_path):
    check_record_directory(str(tmp_path / "new" / "trace"))
    check_record_directory(str(tmp_path))
    file = tmp_path / "file"
    file.touch()
    works = "use a new or an empty directory"
    with pytest.raises(ConfigError) as refused:
        check_record_directory(str(file))
    assert str(refused.value) == f"record={file}: is a file; {works}"
    with pytest.raises(ConfigError) as refused:
        check_record_directory(str(tmp_path))
    rule = "holds files, which a trace would mix with"
    assert str(refused.value) == f"record={tmp_path}: {rule}; {works}"


def test_defaults_are_a_device_only_cache():
    assert UlaConfig.from_extra_config({}) == UlaConfig(
        0.0, None, None, "pb_lru", 64, "admitted", 64, None, 1.0
    )
    assert UlaConfig().host_bytes == 0


def test_host_bytes_count_in_gib():
    assert UlaConfig(host_gib=4).host_bytes == 4 * 2**30
    assert UlaConfig(host_gib=0.5).host_bytes == 2**29


@pytest.mark.parametrize(("value", "asks"), [(None, False), ("0", False), ("1", True)])
def test_the_check_variable(monkeypatch, value, asks):
    monkeypatch.delenv(CHECK_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(CHECK_VARIABLE, value)
    assert check_every_step() is asks


@pytest.mark.parametrize("value", ["", "2", "true", "yes", " 1"])
def test_a_malformed_check_variable_is_an_error(monkeypatch, value):
    monkeypatch.setenv(CHECK_VARIABLE, value)
    with pytest.raises(ConfigError) as refused:
        check_every_step()
    assert str(refused.value) == f"VLLM_ULA_CHECK={value}: must be 0 or 1; use 1"


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("interpreted", ["0", "1"])
@pytest.mark.parametrize("value", [None, *KERNELS])
def test_the_kernels_variable(monkeypatch, value, interpreted, on_cpu):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(KERNELS_VARIABLE, value)
    if (value, interpreted, on_cpu) == ("triton", "0", True):
        with pytest.raises(ConfigError) as refused:
            chosen_kernels(on_cpu)
        assert str(refused.value) == (
            "VLLM_ULA_KERNELS=triton: a CPU runs Triton kernels only in Triton's interpreter; "
            "use auto, or TRITON_INTERPRET=1 with it"
        )
    else:
        assert chosen_kernels(on_cpu) == (value or "auto")


@pytest.mark.parametrize("value", ["", "cuda", "Triton", " torch"])
def test_malformed_kernels_are_an_error(monkeypatch, value):
    monkeypatch.setenv(KERNELS_VARIABLE, value)
    with pytest.raises(ConfigError) as refused:
        chosen_kernels(on_cpu=False)
    assert str(refused.value) == (
        f"VLLM_ULA_KERNELS={value}: must be one of auto, torch, triton; use auto"
    )


def test_kernels_have_the_names_dispatch_gives_them():
    assert tuple(kernels.value for kernels in Kernels) == KERNELS

"""The environment of a measurement."""

from dflash_local import Model
from dflash_local.bench.report.report import Environment


def test_the_environment_names_files_and_devices(model: Model) -> None:
    found = Environment.of(model)
    assert found.target.startswith("tiny-coder") and found.drafter is not None
    assert found.devices and found.n_threads == 1 and found.n_ctx == 2048
    assert (found.kv_type, found.n_gpu_layers, found.block_size) == ("q8_0", 0, 16)

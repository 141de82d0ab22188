"""The attached GPU, with a fake NVML: no GPU, one, several, MIG slices, old drivers, and drivers that fail."""

import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fsdp_advisor.hardware import attached, attached_gpu, find_gpu

MIB = 2**20
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total=81559 * MIB, reserved=470 * MIB, uuid="GPU-1")
T4 = SimpleNamespace(name="Tesla T4", total=15360 * MIB, reserved=451 * MIB, uuid="GPU-2")
ODD = SimpleNamespace(name="NVIDIA Toaster 3000", total=8192 * MIB, reserved=192 * MIB, uuid="GPU-3")


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """The functions of pynvml that `attached` calls, for a list of GPUs."""

    nvmlMemory_v2 = 0x2000028

    def __init__(self, *cards: Any) -> None:
        super().__init__("pynvml")
        self.cards = cards
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if index >= len(self.cards):
            raise NVMLError("invalid argument")
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise NVMLError("not found")

    def nvmlDeviceGetName(self, card: Any) -> Any:
        return card.name

    def nvmlDeviceGetMigMode(self, card: Any) -> list[int]:
        if not hasattr(card, "slices"):
            raise NVMLError("not supported")
        return [1, 1]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Any, index: int) -> Any:
        return card.slices[index]

    def nvmlDeviceGetMemoryInfo(self, card: Any, version: int | None = None) -> Any:
        if version is None:
            return SimpleNamespace(total=card.total)
        return SimpleNamespace(total=card.total, reserved=card.reserved)


Plug = Callable[..., FakeNvml]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Plug:
    """A function that makes GPUs visible to NVML. CUDA_VISIBLE_DEVICES is unset."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*cards: Any) -> FakeNvml:
        nvml = FakeNvml(*cards)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def test_known_gpu_has_its_rates_and_measured_memory(plug: Plug) -> None:
    nvml = plug(H100, T4)
    gpu = attached_gpu()
    assert gpu is not None
    assert gpu.name == "H100-80GB"
    assert gpu.memory_bytes == (81559 - 470) * MIB
    assert "NVML" in gpu.memory_source
    assert gpu.bf16_flops == find_gpu("H100").bf16_flops
    assert nvml.open == 0


def test_unknown_gpu_has_measured_memory_and_no_rates(plug: Plug) -> None:
    plug(ODD)
    gpu = attached_gpu()
    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes, gpu.bf16_flops) == ("NVIDIA Toaster 3000", 8000 * MIB, None)


@pytest.mark.parametrize(
    ("visible", "name"),
    [("0", "H100-80GB"), ("1", "T4"), ("1,0", "T4"), (" 1 , 0", "T4"), ("GPU-2", "T4"), ("0,7", "H100-80GB")],
)
def test_cuda_visible_devices_selects_the_gpu(
    plug: Plug, monkeypatch: pytest.MonkeyPatch, visible: str, name: str
) -> None:
    plug(H100, T4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = attached_gpu()
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles", "-1,0", "9", "GPU-9", "rubbish"])
def test_cuda_visible_devices_can_hide_every_gpu(plug: Plug, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    plug(H100, T4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert attached_gpu() is None


def test_mig_slice_has_its_own_memory_and_no_rates(plug: Plug) -> None:
    part = SimpleNamespace(name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", total=9728 * MIB, reserved=0, uuid="MIG-1")
    plug(SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total=81920 * MIB, reserved=0, uuid="GPU-1", slices=[part]))
    gpu = attached_gpu()
    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes, gpu.bf16_flops) == (part.name, 9728 * MIB, None)


def test_a_name_in_bytes_is_found(plug: Plug) -> None:
    plug(SimpleNamespace(name=b"Tesla T4", total=15360 * MIB, reserved=451 * MIB, uuid="GPU-1"))
    gpu = attached_gpu()
    assert gpu is not None and gpu.name == "T4"


def test_old_driver_without_memory_v2(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = plug(T4)
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda card: SimpleNamespace(total=15109 * MIB))
    gpu = attached_gpu()
    assert gpu is not None and gpu.memory_bytes == 15109 * MIB


def test_gpu_without_memory_reading_has_the_memory_of_the_table(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NVMLError("not supported")

    nvml = plug(T4)
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)
    assert attached_gpu() == find_gpu("T4")
    nvml.cards = (ODD,)
    assert attached_gpu() is None


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlShutdown"])
def test_failing_driver_gives_no_gpu(plug: Plug, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: Any) -> None:
        raise NVMLError("driver/library version mismatch")

    monkeypatch.setattr(plug(H100), call, fail)
    assert attached_gpu() is None


def test_driver_without_gpus_gives_no_gpu(plug: Plug) -> None:
    nvml = plug()
    assert attached_gpu() is None
    assert nvml.open == 0


def test_missing_pynvml_gives_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    assert attached_gpu() is None


def test_without_driver_pynvml_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(attached, "DRIVER_FILES", ("/nowhere/nvidiactl",))
    start = time.perf_counter()
    assert attached_gpu() is None
    assert time.perf_counter() - start < 0.005
    assert "pynvml" not in sys.modules

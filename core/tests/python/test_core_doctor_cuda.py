"""`phalanx doctor` on CUDA: a driver that is not there, one that is broken, and one made for this test."""

import os
import shutil
import subprocess

import pytest

from phalanx.core.doctor import _cuda
from phalanx.core.doctor._host import Host

# What a driver with two devices answers; cuInit's status is in the environment.
DRIVER = """
#include <stdlib.h>
#include <string.h>
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuInit(unsigned flags) {
  const char *status = getenv("FAKE_STATUS");
  if (status == NULL) abort();
  return flags + atoi(status);
}
int cuGetErrorName(int status, const char **name) { *name = status ? "CUDA_ERROR_FAKE" : "CUDA_SUCCESS"; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, device ? "Old One" : "New One", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device ? 8 : 80) << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 75: *value = device ? 7 : 9; return 0;
    case 76: *value = device ? 5 : 0; return 0;
    case 102: case 103: *value = 1; return 0;
    case 128: if (device) return 1; *value = 1; return 0;
    case 132: if (device) return 1; *value = 1; return 0;
    default: return 1;
  }
}
int cuDeviceCanAccessPeer(int *able, int device, int peer) { *able = device == 0 && peer == 1; return 0; }
"""


def look(root):
    return list(_cuda.check_cuda(Host(2, root)))


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A libcuda.so.1 that processes started from now on find first."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc)")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    folder = tmp_path / "lib"
    folder.mkdir()
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(paths))
    monkeypatch.setenv("FAKE_STATUS", "0")
    monkeypatch.setenv("PHALANX_TUNING", str(tmp_path / "tuning"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_devices_are_described(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(_cuda, "torch_cuda", lambda: "12.8")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan  1 00:00:00 UTC 2026\nGCC version: 12\n"
    )
    (tmp_path / "proc/driver/nvidia/version").write_text(version)
    cuda, first, second, *tuning = look(tmp_path)
    assert cuda.level == "ok"
    assert cuda.text == "driver 570.86.15, for CUDA 12.8; 2 device(s)"
    assert first.name == "cuda:0"
    imex = "no fabric handles without /dev/nvidia-caps-imex-channels"
    assert first.text == f"New One, sm_90, 80 GiB, shares memory as descriptors, {imex}, multicast, reaches cuda:1"
    assert second.text == "Old One, sm_75, 8 GiB, shares memory as descriptors, no multicast"
    assert [each.text.partition(":")[0] for each in tuning] == ["New One", "Old One"]
    (tmp_path / "dev/nvidia-caps-imex-channels").mkdir(parents=True)
    assert "has fabric handles" in look(tmp_path)[1].text


def test_what_the_table_says_for_each_kind_of_device_is_told(driver, tmp_path):
    def tuning_of(rows):
        (tmp_path / "tuning").write_text(rows)
        return [each for each in look(tmp_path) if each.name == "gpu tuning"]

    measured, built_in = tuning_of(
        "gpu=New_One ranks=4 shared=0 line_bytes=64\ngpu=New_One ranks=2 shared=0 line_bytes=32\n"
        "gpu=New_One ranks=2 shared=1 line_bytes=32\nhost=0 ranks=9 chunk_bytes=4096\n"
    )
    assert measured.level == built_in.level == "ok"
    groups = "groups of 2, 4 with a GPU for each rank and groups of 2 that share some"
    assert measured.text == f"New One: {tmp_path / 'tuning'}, for {groups}"
    assert built_in.text.startswith("Old One: built-in values")
    assert "phalanx tune --device cuda" in built_in.text
    strange, _ = tuning_of("gpu=New_One ranks=2 shared=1 line_bytes=many\n")
    assert strange.level == "warn"
    for nothing in ("gpu=New_One ranks=2\n", "gpu=New_One ranks=two shared=1\n", "gpu=New_One ranks=2 shared=2\n"):
        assert "built-in" in tuning_of(nothing)[0].text


def test_a_torch_that_cannot_use_the_devices_is_noted(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(_cuda, "torch_cuda", lambda: "")
    cuda = look(tmp_path)[0]
    assert cuda.level == "ok"
    assert "CPU build" in cuda.advice


@pytest.mark.parametrize(
    ("status", "advice"), [(100, "--gpus all"), (803, "different versions"), (999, "nvidia-uvm"), (5, "nvidia-smi")]
)
def test_a_driver_that_does_not_start_is_a_warning_that_says_what_to_do(driver, tmp_path, monkeypatch, status, advice):
    monkeypatch.setenv("FAKE_STATUS", str(status))
    (cuda,) = look(tmp_path)
    assert cuda.level == "warn"
    assert f"cuInit says {status} (CUDA_ERROR_FAKE)" in cuda.text
    assert advice in cuda.advice


def test_a_driver_that_crashes_harms_nobody(driver, tmp_path, monkeypatch):
    monkeypatch.delenv("FAKE_STATUS")
    (cuda,) = look(tmp_path)
    assert cuda.level == "warn"
    assert "with status -6" in cuda.text


def test_a_driver_that_hangs_is_left_alone(tmp_path, monkeypatch):
    script = tmp_path / "probe.py"
    script.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(_cuda, "_PROBE", script)
    monkeypatch.setattr(_cuda, "_SECONDS", 0.5)
    (cuda,) = look(tmp_path)
    assert cuda.level == "warn"
    assert "did not answer" in cuda.text


def test_no_driver_is_in_order_unless_the_kernel_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(_cuda, "ask_cuda_driver", lambda: {"missing": "libcuda.so.1: cannot open shared object file"})
    (cuda,) = look(tmp_path)
    assert (cuda.level, cuda.advice) == ("ok", "")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    (cuda,) = look(tmp_path)
    assert cuda.level == "warn"
    assert "NVIDIA_DRIVER_CAPABILITIES" in cuda.advice

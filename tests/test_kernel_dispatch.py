"""Which implementation runs on which device, and what is said or raised where a kernel cannot run."""

import types

import jax
import pytest

from pallas_kernels import dispatch, fp8


def device(capability, kind="a GPU"):
    return types.SimpleNamespace(compute_capability=capability, device_kind=kind)


@pytest.mark.parametrize(
    "said, expected",
    [("9.0", (9, 0)), ("12.1", (12, 1)), ("10.0a", (10, 0)), ("10.3f", (10, 3)), ("gfx942", None), (None, None)],
)
def test_capability(said, expected):
    assert dispatch.capability(device(said)) == expected
    assert dispatch.capability(jax.devices("cpu")[0]) is None


@pytest.mark.parametrize("said", ["gfx942", "gfx90a", "7.5", "13.0", None])
def test_other_gpus_are_left_to_xla(said, monkeypatch):
    """AMD's have a compute capability too, of another form; there, and on GPUs that are too old or new, it is said."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [device(said, "that one")])
    with pytest.warns(UserWarning, match=rf"that one \(compute capability {said}\) is not one .*8\.0 to 12\.1"):
        assert dispatch.automatic.__wrapped__() == "xla"


@pytest.mark.parametrize("said, fp8_too", [("8.0", False), ("8.9", True), ("9.0a", True), ("12.1", True)])
def test_gpus_with_kernels(said, fp8_too, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [device(said)])
    assert dispatch.automatic.__wrapped__() == "mosaic"
    assert fp8.has_instructions() == fp8_too


def test_fp8_of_what_is_not_nvidias(monkeypatch):
    """Such a device traces kernels for the interpreter only, which converts FP8 itself."""
    monkeypatch.setattr(jax, "devices", lambda *_: [device("gfx942")])
    assert fp8.has_instructions()

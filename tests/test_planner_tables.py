"""Tables of cards, drives and errors, each row by what it does.

The rows are written here again, from those who publish them: a test that takes its cases from the table itself does not
notice a row that is missing.
"""

import pytest

from surojax import ConfigError, default_config
from surojax.data.files import NotText
from surojax.planner import costs, drives, gpus
from surojax.training import safe


@pytest.mark.parametrize(
    "name, reason", [("Tesla V100", "sm_70"), ("p100", "sm_60"), ("RTX 2080 Ti", "sm_75"), ("T4", "sm_75")]
)
def test_cards_without_bfloat16(name, reason):
    with pytest.raises(
        ConfigError, match=rf"^--gpu: expected a GPU that computes in bfloat16, got '{name}' \({reason}"
    ):
        gpus.gpu_key(name)


@pytest.mark.parametrize(
    "name, read, write, tbw",
    [
        ("980pro", 7.0, 1.5, 600),
        ("nm790", 7.4, 1.45, 1500),
        ("t500", 7.4, 0.64, 1200),
        ("sn850x", 7.3, 3.4, 1200),
        ("9400pro", 7.0, 7.0, 7.68 * 365 * 5),
        ("pm9d3a", 12.0, 6.8, 7.68 * 365 * 5),
    ],
)
def test_drives_by_name(name, read, write, tbw):
    """Makers' sheets, and what a full cache left; of the last two one write of the drive a day for five years."""
    for count in (1, 3):
        found = drives.disks(f"{name}:{count}" if count > 1 else name)
        assert (found.read, found.write) == (count * read * 1e9, count * write * 1e9)
        assert found.tbw == pytest.approx(count * tbw)


# A message of each option's failure, and the option that it names, if all are in use.
FAILURES = {
    "attention": ("No cuDNN plan", "flash support", "FMHA failed", "cudnn: bad param"),
    "kernels": ("Mosaic GPU lowering", "pallas_call"),
    "block_scaled_products": ("block_scaled dot", "BlockScaled", "scaled-dot is not supported", "scaled dot"),
    "copy_engines": ("symmetric memory", "put_signal", "memcpy-local", "P2P access", "MemcpyLocal"),
    "xla_options": (
        *("unknown xla_gpu_foo", "compile option", "compile_options", "latency-hiding", "PGLE", "profile"),
        "scheduler failed",
    ),
    "cuda_graphs": ("command buffer", "command_buffer", "CUDA graph", "cuda-graph", "CommandBuffer"),
}


@pytest.mark.parametrize("name, message", [(name, text) for name, texts in FAILURES.items() for text in texts])
def test_the_option_that_a_message_names(name, message):
    c = default_config()
    c.update({"kernels": "mosaic", "recipe": "mxfp8", "memcpy_all_gather": True, "cuda_graphs": "on"})
    assert {x.name for x in safe.OPTIONS if x.in_safe and x.in_use(c)} == set(FAILURES)
    option = safe.BY_NAME[name]
    assert safe.advice(c, message).startswith(f"most likely {option.does}, which the message names: go on without it")


@pytest.mark.parametrize("word", ["MoveToHost", "MoveToDevice", "Sharding", "AllocateBuffer"])
def test_calls_without_a_kernel(word):
    assert word in costs.NO_KERNEL


def test_bytes_of_another_encoding():
    """By the first bytes of a file: UTF-16 of either order, what is compressed, and others."""
    advice = {
        b"\xff\xfea\x00": "iconv -f utf-16",
        b"\xfe\xff\x00a": "iconv -f utf-16",
        b"\x1f\x8b\x08\x00": "end in .gz",
        b"\x28\xb5\x2f\xfd": "end in .zst",
        b"BZh\xe9": "end in .bz2",
        b"\xfd7zXZ\x00": "end in .xz",
        b"caf\xe9": "iconv -f latin1",
    }
    for content, words in advice.items():
        with pytest.raises(UnicodeDecodeError) as raised:
            content.decode("utf-8")
        assert words in str(NotText(content, raised.value.start, 0)), content
        assert "iconv -f latin1" in str(NotText(content, raised.value.start, 5))  # not at the beginning

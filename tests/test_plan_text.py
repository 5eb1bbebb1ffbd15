"""A plan as text, line by line, of plans with invented numbers."""

import dataclasses

import pytest

from surojax.placement import cuda_plugin
from surojax.planner import plan_text
from surojax.planner.amounts import GiB, MiB
from surojax.planner.run_plan import Plan

GPU = "h100"


def of_homes(device: float, host: float = 0, nvme: float = 0) -> dict[str, int]:
    return {"device": int(device), "host": int(host), "nvme": int(nvme)}


ESTIMATED = Plan(
    gpu=GPU,
    gpus=2,
    gpus_per_node=2,
    parameters=1_234_560_000,
    attention="cudnn",
    packed=False,
    cp_method="ulysses",
    mesh={"dp": 2, "tp": 1},
    between_machines=[],
    fits=True,
    device_bytes=300 * MiB,
    device_temp_bytes=200 * MiB,
    host_bytes=0,
    host_temp_bytes=0,
    nvme_bytes=0,
    classes={"weights": of_homes(100 * MiB)},
    collectives=[{"op": "all-reduce", "axis": "dp", "count": None, "bytes": 50 * MiB, "textbook_bytes": 0}],
    h2d_bytes=0,
    d2h_bytes=0,
    nvme_read_bytes=0,
    nvme_write_bytes=0,
    disks="",
    bubble=0.0,
    not_predicted="no compiler",
    device_limit_bytes=76 * GiB,
    host_limit_bytes=None,
    changes=[],
)
COMPILED = dataclasses.replace(
    ESTIMATED,
    gpus=4,
    packed=True,
    attention="mosaic, xla",
    experts="experts: by a kernel",
    between_machines=["dp", "pp"],
    estimate=False,
    xla="0.12.1",
    fits=False,
    device_bytes=80 * GiB,
    host_bytes=30 * GiB,
    host_temp_bytes=GiB // 2,
    nvme_bytes=40 * GiB,
    classes={"weights": of_homes(10 * GiB, 20 * GiB), "master": of_homes(0, 0, 40 * GiB)},
    collectives=[
        {"op": "all-gather", "axis": "dp", "count": 64, "bytes": 3 * GiB, "textbook_bytes": 2.5 * GiB},
    ],
    h2d_bytes=2 * GiB,
    d2h_bytes=GiB,
    within_host_bytes=GiB // 4,
    nvme_read_bytes=5 * GiB,
    nvme_write_bytes=6 * 10**9,
    disks="7 GB/s read, 6 written (assumed)",
    drive_tbw=600.0,
    bubble=0.125,
    rematerialised={"count": 1234, "bytes": 3 * MiB, "largest": "fusion.3"},
    host_limit_bytes=50 * GiB,
    changes=["first change", "second change"],
    not_predicted="",
    predicted_step_s=2.0,
    predicted_range_s=[1.5, 2.75],
    hangs_on="link: 1 to 2 ms",
    calibrated=True,
    tokens_per_s_per_gpu=1000.0,
    mfu=0.4321,
    exposed_s={"gather": 0.25, "host in": 0.0},
    exposed_by_loop_s={"forward": {"gather": 0.25}},
    exposed_in_files_s={"weights": 0.002, "master": 0.5},
    host_transfers={"copy_engine": 3, "kernel": 1},
    launches_s=2.5,
)

BY_SHAPES = """\
plan: 1,234.6M parameters on 2 x NVIDIA H100 80GB HBM3 (dp=2 x tp=1)
ESTIMATE from shapes: no compiler for GPUs is installed here; to compile the step: pip install 'surojax[plan]'

  MiB per GPU         device      host      nvme
  weights             100.00         -         -
  working space       200.00         -         -
  total               300.00         -         -

of that temporary: 200.0 MiB on the device, 0.0 MiB on the host
computed again by XLA to save memory: nothing

  per step and GPU                 count       MiB  textbook
  all-reduce over dp                   -     50.00         -
  host to device                                 -
  device to host                                 -

no time is predicted: no compiler

fits: 300.0 MiB of 76.0 GiB, which is 95% of each NVIDIA H100 80GB HBM3 but for 512.0 MiB, which cuDNN's \
workspaces may take
"""
AS_COMPILED = """\
plan: 1,234.6M parameters on 4 x NVIDIA H100 80GB HBM3 (dp=2 x tp=1)
between machines: dp, pp
compiled by XLA of the CUDA plugin 0.12.1; another version makes another program
offloads: in turn
documents in a row: flash attention within each (kernel of pallas_kernels), whose memory grows with S
documents in a row: attention by XLA, with S x S scores in memory; the kernel takes 16-bit heads of a \
multiple of 16 up to 128 channels, of 32 up to 256
experts: by a kernel

  GiB per GPU         device      host      nvme
  weights              10.00     20.00         -
  master                   -         -     40.00
  working space        70.00     10.00         -
  total                80.00     30.00     40.00

of that temporary: 200.0 MiB on the device, 512.0 MiB on the host
computed again by XLA to save memory: 1,234 operations, 3.0 MiB of results, most in fusion.3

  per step and GPU                 count       GiB  textbook
  all-gather over dp                  64      3.00      2.50
  host to device                              2.00
  device to host                              1.00
  within host memory                          0.25
  read from NVMe                              5.00
  written to NVMe                             5.59

disks: 7 GB/s read, 6 written (assumed)
12.0 GB written to files a step: the 600 TB that the drives are made for after 50,000 steps

predicted: 2,000.0 ms a step (1,500 to 2,750), 1,000 tokens/s per GPU, 4,000 in all, MFU 0.432, by XLA 0.12.1
  its products are fitted to published rows of this GPU
  most of the range: link: 1 to 2 ms
  launch-bound: without CUDA graphs the host takes about 2,500 ms to launch what runs for less; larger \
batches or models change it
pipeline: a stage idles 12.5% of a step (bubble); the predicted time is an estimate, of stages that go in lockstep
  exposed ms              gather      host in
  forward                  250.0          0.0
  total                    250.0          0.0
  of disks: master 500.0, weights 2.0 ms exposed
host transfers in loops: 3 by copy engine, 1 by kernel, which occupy the multiprocessors

does not fit: 80.0 GiB of 76.0 GiB, which is 95% of each NVIDIA H100 80GB HBM3 but for 512.0 MiB, which \
cuDNN's workspaces may take
does not fit: 60.0 GiB of 50.0 GiB, which is 90% of host memory, for 2 GPUs
  would change it: first change
  second change
"""


@pytest.mark.parametrize("p, text", [(ESTIMATED, BY_SHAPES), (COMPILED, AS_COMPILED)], ids=["estimated", "compiled"])
def test_a_plan_as_text(monkeypatch, p, text):
    monkeypatch.setattr(cuda_plugin, "copies_slowly", lambda: "offloads: in turn")
    assert plan_text.plan_table(p) == text.rstrip("\n")


def test_which_memory_a_run_needs():
    """More than three quarters of a card is with a setting; host memory is of a machine with all GPUs, or some."""
    verdict = lambda **changes: plan_text.verdict(dataclasses.replace(ESTIMATED, **changes))
    of_pool = "  with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment: JAX takes 0.75 by itself"
    card = 80 * 2**30
    assert [of_pool in verdict(device_bytes=int(x * card)) for x in (0.7, 0.8, 1.0)] == [False, True, False]
    host = verdict(host_bytes=2 * GiB, host_limit_bytes=4 * GiB)[-1]
    assert host == "fits: 4.0 GiB of 4.0 GiB, which is 90% of host memory, for all GPUs"


def test_where_a_time_comes_from():
    at_rates = dataclasses.replace(COMPILED, gpu="l4", calibrated=False, hangs_on="", bubble=0.0, launches_s=1.9)
    lines = plan_text.time_lines(at_rates)
    assert lines[1:] == ["  not calibrated: no published row of this GPU; its products are from data sheets"]
    assert plan_text.range_lines(dataclasses.replace(COMPILED, corrected="measured here"))[0] == "  measured here"
    unknown = dataclasses.replace(ESTIMATED, estimated_step_s=0.0125, bubble=0.25)
    assert plan_text.time_lines(unknown) == [
        "no time is predicted: no compiler; estimated from shapes: 12.5 ms a step",
        "pipeline: a stage idles 25.0% of a step (bubble)",
    ]
    by_engines = dataclasses.replace(COMPILED, host_transfers={"copy_engine": 2, "kernel": 0}, exposed_in_files_s={})
    assert plan_text.prediction_lines(by_engines)[-1] == "host transfers in loops: 2 by copy engine, 0 by kernel"


@pytest.mark.parametrize(
    "attention, how", [("xla", "by XLA, with s/2 x s/2 scores in memory"), ("cudnn", "by a kernel of pallas_kernels")]
)
def test_documents_of_pieces(attention, how):
    line = f"documents in a row: attention of pairs of pieces (cp_method=ring) {how}"
    assert plan_text.documents(attention, "ring") == line

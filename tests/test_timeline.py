"""The model of time on programs that are small enough to add up by hand, on a GPU with round figures."""

import dataclasses
import json
import math
import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import pytest

from surojax.planner import costs, hlo, plan_text, prediction, rates, timeline
from surojax.planner.costs import COLLECTIVES, DEVICE_COPY, GATHER, HOST_IN, HOST_OUT, PASS, PRODUCT
from surojax.planner.file_time import SimulatedStep
from surojax.planner.gpus import GPUS, Rates
from surojax.training.run_summary import comparison

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import calibrate

ROUND = Rates(
    products=0.5,
    attention=0.5,
    attention_backward=0.25,
    memory=0.5,
    host=0.5,
    duplex=0.5,
    link=0.5,
    hop=0.25,
    launch=0.0,
    copy=0.0,
    ramp=0.0,
    iteration=0.0,
    collective_sms=0.5,
)
TILE = 2 * 256 * 128 * 64  # FLOPs of [256, 64] x [64, 128]
GPU = dataclasses.replace(  # one second for a tile, for a million bytes over each link, and for a billion in memory
    GPUS["h100"],
    sm_count=1,
    bf16_flops=2.0 * TILE,
    memory_bandwidth=2e9,
    pcie_bandwidth=2e6,
    link_bandwidth=2e6 + 1,  # more than PCI Express: a link of its own
    rates=ROUND,
)
MESH = {"dp_replicate": 1, "dp_shard": 3}

PRODUCT_OF_A_SECOND = (
    'custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)
XLA_PRODUCT = "  %y = bf16[256,128]{1,0} fusion(%a, %b), kind=kCustom, calls=%by_xla"
LINEAR = ', backend_config={"dynamic_slice_config":{"linear":{"byte_offset":"0","byte_stride":"1000000"}}}'
ASYNC_SLICE = "((s8[4,1000,1000]{2,1,0:S(5)}, s32[]), s8[1,1000,1000]{2,1,0}, u32[]) fusion-start(%stack, %i)"
HEAD = f"""HloModule step, is_scheduled=true

%by_xla (d0: bf16[256,64], d1: bf16[64,128]) -> bf16[256,128] {{
  %d0 = bf16[256,64]{{1,0}} parameter(0)
  %d1 = bf16[64,128]{{1,0}} parameter(1)
  %turned = bf16[64,256]{{0,1}} bitcast(%d0)
  ROOT %dot.1 = bf16[256,128]{{1,0}} dot(%turned, %d1), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
}}

%copied (p0: s8[4,1000,1000], p1: s32[]) -> s8[1,1000,1000] {{
  %p0 = s8[4,1000,1000]{{2,1,0:S(5)}} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice.1 = s8[1,1000,1000]{{2,1,0}} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={{1,9,9}}{LINEAR}
}}

%by_kernel (q0: s8[4,1000,1000], q1: s32[]) -> s8[1,1000,1000] {{
  %q0 = s8[4,1000,1000]{{2,1,0:S(5)}} parameter(0)
  %q1 = s32[] parameter(1)
  ROOT %slice.2 = s8[1,1000,1000]{{2,1,0}} dynamic-slice(%q0, %q1, %q1, %q1), dynamic_slice_sizes={{1,9,9}}
}}

%sliced (r0: s8[8,250000000], r1: s32[], r2: s8[250000000]) -> s8[1,250000000] {{
  %r0 = s8[8,250000000]{{1,0}} parameter(0)
  %r1 = s32[] parameter(1)
  %r2 = s8[1,250000000]{{1,0}} parameter(2)
  %slice.3 = s8[1,250000000]{{1,0}} dynamic-slice(%r0, %r1, %r1), dynamic_slice_sizes={{1,9}}
  ROOT %sum = s8[1,250000000]{{1,0}} add(%slice.3, %r2)
}}

%updated (s0: s8[8,250000000], s1: s32[], s2: s8[1,250000000]) -> s8[8,250000000] {{
  %s0 = s8[8,250000000]{{1,0}} parameter(0)
  %s1 = s32[] parameter(1)
  %s2 = s8[1,250000000]{{1,0}} parameter(2)
  %negative = s8[1,250000000]{{1,0}} negate(%s2)
  ROOT %written = s8[8,250000000]{{1,0}} dynamic-update-slice(%s0, %negative, %s1, %s1)
}}

"""
ARGUMENTS = """  %a = bf16[256,64]{1,0} parameter(0)
  %b = bf16[64,128]{1,0} parameter(1)
  %stack = s8[4,1000,1000]{2,1,0:S(5)} parameter(2)
  %large = s8[8,250000000]{1,0} parameter(3)
  %i = s32[] parameter(4)
  %layer = s8[1,1000,1000]{2,1,0} parameter(5)
  %part = s8[1,250000000]{1,0} parameter(6)
"""
Y = f"= (bf16[256,128]{{1,0}}, s8[4]{{0}}) {PRODUCT_OF_A_SECOND}"


def program(
    *lines: str, body: tuple[str, ...] = (), trips: int | Fraction = 0, before: tuple[str, ...] = ()
) -> hlo.Module:
    """A program of these instructions; body: those of a loop before them; before: instructions before the loop."""
    text = HEAD
    if body:
        text += "%body (t: (s32[])) -> (s32[]) {\n" + ARGUMENTS + "\n".join(body) + "\n}\n\n"
        config = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
        name = 'metadata={op_name="jit(f)/while/body/backward/while"}'
        loop = f"  %w = (s32[]) while(%i), condition=%c, body=%body, {name}, backend_config={config}"
        lines = (*before, loop, *lines)
    return hlo.parse_module(
        text + "ENTRY %main (a: bf16[256,64]) -> s32[] {\n" + ARGUMENTS + "\n".join(lines) + "\n}\n"
    )


def simulated(module: hlo.Module, gpu=GPU, **how) -> timeline.Timeline:
    return timeline.simulate(costs.ProgramOnGpu(module, gpu, MESH), **how)


READ = f"  %s = {ASYNC_SLICE}, kind=kLoop, calls=%copied"
READ_BY_KERNEL = READ.replace("%copied", "%by_kernel")
END = "  %d = s8[1,1000,1000]{2,1,0} fusion-done(%s)"
WRITE = "  %o = (s8[1,1000,1000]{2,1,0:S(5)}, s8[1,1000,1000]{2,1,0}, u32[]) copy-start(%layer)"
WRITTEN = "  %e = s8[1,1000,1000]{2,1,0:S(5)} copy-done(%o)"


@pytest.mark.parametrize(
    "line, kind, seconds",
    [
        (f"  %y {Y}", PRODUCT, 1.0),
        (XLA_PRODUCT, PRODUCT, 1.0),  # by XLA's own kernel, as on a GPU, where XLA measures which is faster
        ("  %k = s8[8,250000000]{1,0} copy(%large)", DEVICE_COPY, 4.0),  # two billion bytes read, two written
        ("  %n = s8[8,250000000]{1,0} negate(%large)", PASS, 4.0),
        ("  %f = s8[1,250000000]{1,0} fusion(%large, %i, %part), kind=kLoop, calls=%sliced", PASS, 0.75),
        ("  %u = s8[8,250000000]{1,0} fusion(%large, %i, %part), kind=kLoop, calls=%updated", PASS, 0.5),
        ("  %h = s8[1,1000,1000]{2,1,0:S(5)} copy(%layer)", HOST_OUT, 1.0),
        ("  %g = s8[3,1000,1000]{2,1,0} all-gather(%layer), replica_groups={{0,1,2}}", GATHER, 2.5),  # two hops
    ],
)
def test_each_kind_of_work_by_hand(line, kind, seconds):
    """Of a fusion that slices a stack or updates it in place, only the part moves: a quarter of a second each way."""
    found = simulated(program(line))
    assert found.busy[kind] == pytest.approx(found.seconds) == pytest.approx(seconds, rel=1e-5)


BRANCH = "%branch (a: bf16[256,64]) -> s32[] {\n" + ARGUMENTS + f"  %y {Y}\n}}\n\n"


@pytest.mark.parametrize(
    "line, seconds",
    [
        ("  %c = s32[] call(%a, %b), to_apply=%branch", 1.0),
        ("  %c = s32[] conditional(%i, %a, %b), branch_computations={%branch, %branch}", 2.0),  # all of them
        ('  %m = s8[1,1000,1000]{2,1,0} custom-call(%layer), custom_call_target="MoveToDevice"', 0.0),
        ('  %s = s8[1,1000,1000]{2,1,0} custom-call(%layer), custom_call_target="Sharding"', 0.0),
    ],
)
def test_calls_of_other_computations_and_of_nothing(line, seconds):
    entry = "ENTRY %main (a: bf16[256,64]) -> s32[] {\n" + ARGUMENTS + line + "\n}\n"
    assert simulated(hlo.parse_module(HEAD + BRANCH + entry)).seconds == pytest.approx(seconds)


def test_bytes_of_a_fusion_by_hand():
    """Of slices and gathers what they result in, also behind a bitcast; what is overwritten is not read."""
    text = """HloModule step

%f (p0: f32[100]) -> (f32[1,10], f32[5,10], f32[7], f32[100]) {
  %p0 = f32[100]{0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[10,10]{1,0} parameter(2)
  %p3 = s32[5,1]{1,0} parameter(3)
  %p4 = f32[7]{0} parameter(4)
  %p5 = f32[100]{0} parameter(5)
  %bits = f32[10,10]{1,0} bitcast(%p0)
  %slice = f32[1,10]{1,0} dynamic-slice(%bits, %p1, %p1)
  %rows = f32[5,10]{1,0} gather(%p2, %p3)
  %less = f32[7]{0} negate(%p4)
  %new = f32[100]{0} dynamic-update-slice(%p5, %less, %p1)
  ROOT %all = (f32[1,10]{1,0}, f32[5,10]{1,0}, f32[7]{0}, f32[100]{0}) tuple(%slice, %rows, %less, %new)
}
"""
    read, written = 40 + 4 + 200 + 20 + 28, 40 + 200 + 28 + 28
    assert costs._fusion_bytes(hlo.parse_module(text)["f"]) == read + written


@pytest.mark.parametrize(
    "scopes, has_loops, label",
    [
        *((f"jit(f)/while/body/{name}/while", True, name) for name in ("forward", "backward", "head", "update")),
        ("jit(f)/forward/while/body/backward/while", False, "backward"),  # the innermost
        ("jit(f)/while", True, "microbatches"),
        ("jit(f)/while", False, "other loops"),
        (None, False, "other loops"),
    ],
)
def test_loops_are_labelled_by_their_scopes(scopes, has_loops, label):
    attributes = f', metadata={{op_name="{scopes}"}}' if scopes else ""
    assert costs._label(hlo.Instruction("w", "s32[]", "while", (), attributes), has_loops) == label


def test_products_take_whole_waves():
    """A tile alone leaves a multiprocessor idle, unless a split of the k loop fills both. On three, the best for one
    large tile are eight parts: two smaller tiles, each split in four, in three waves."""
    two = dataclasses.replace(GPU, sm_count=2, bf16_flops=4.0 * TILE, memory_bandwidth=2e15)
    time = lambda m, k=64: costs.product_time(two, m, 128, k)
    assert time(256) == pytest.approx(0.5, rel=1e-3)  # one tile, split in two
    assert time(512) == pytest.approx(1.0, rel=1e-3)
    assert time(768) == pytest.approx(1.5, rel=1e-3)
    three = dataclasses.replace(two, sm_count=3, bf16_flops=6.0 * TILE)
    assert costs.product_time(three, 256, 128, 64) == pytest.approx(3 * 0.125 / 0.95, rel=1e-3)
    whole = dataclasses.replace(two, memory_bandwidth=1.0)  # sums of parts cost too much
    moved = 2 * (768 * 64 + 64 * 128 + 768 * 128) / 0.5
    assert costs.product_time(whole, 768, 128, 64) == pytest.approx(moved)
    eight_bits = dataclasses.replace(two, fp8_flops=8.0 * TILE)
    assert costs.product_time(eight_bits, 512, 128, 64, dtype="f8e4m3fn") == pytest.approx(0.5, rel=1e-3)


def test_products_at_the_power_limit_lose_nothing_by_tiles():
    """On a card whose clock rises by a half if multiprocessors rest: that makes up for a last wave that is not full."""
    card = dataclasses.replace(GPU, sm_count=2, bf16_flops=4.0 * TILE, memory_bandwidth=1e7)  # sums of parts take long
    limited = dataclasses.replace(card, rates=dataclasses.replace(ROUND, boost=1.5))
    times = [[costs.product_time(gpu, n * 256, 128, 64) for n in (2, 3, 20)] for gpu in (limited, card)]
    assert times[0] == pytest.approx([1.0, 1.5, 10.0])
    assert times[1][1] > 1.55 and times[1][::2] == pytest.approx([1.0, 10.0])


def test_copies_within_the_device_delay_products_beside_them():
    """Four seconds of copying under a product of one: free, or on its account where a card was seen to do that."""
    copied = "  %c = (s8[8,250000000]{1,0}, s8[8,250000000]{1,0}, u32[]) copy-start(%large)"
    module = program(copied, f"  %y {Y}", "  %d = s8[8,250000000]{1,0} copy-done(%c)")
    for beside, product_ends in ((0.0, 1.0), (0.5, 2.0), (1.0, 5.0)):
        gpu = dataclasses.replace(GPU, rates=dataclasses.replace(ROUND, beside=beside))
        found = simulated(module, gpu, events=True)
        (product,) = [event for event in found.events if event.kind == PRODUCT]
        assert (product.end, found.seconds) == pytest.approx((product_ends, max(4.0, product_ends)))


def test_a_step_that_waits_for_its_launches_says_so():
    """Of kernels that take no time: 3 us each, 4 for a copy, 1.5 for each of three events of a copy that is awaited."""
    fast = dataclasses.replace(GPU, bf16_flops=1e30, memory_bandwidth=1e30, pcie_bandwidth=1e30)
    module = program(READ, f"  %y {Y}", END, body=(f"  %z {Y}",), trips=10)
    step = SimulatedStep([module], MESH)
    launches = 4e-6 + 3 * 1.5e-6 + 11 * 3e-6
    assert step.launches(fast) == pytest.approx(launches)
    found = prediction.predict(step, fast, tokens=1, compute_time=0.0, has_graphs=False)
    assert found.launch_bound and found.predicted_step_s == pytest.approx(launches)
    assert found.predicted_range_s and found.predicted_range_s[1] == pytest.approx(2 * launches)
    assert "launch-bound" in plan_text.launches(found) and "0.0 ms" in plan_text.launches(found)
    for other in (
        prediction.predict(step, fast, tokens=1, compute_time=0.0),
        prediction.predict(step, GPU, tokens=1, compute_time=0.0, has_graphs=False),
    ):
        assert not other.launch_bound


def test_attention_counts_causal_products():
    line = (
        '  %t = bf16[1,64,4,32]{3,2,1,0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmaxNAME", '
        'backend_config={"dimensions": ["1", "4", "64", "64"], "mask_type": "CAUSAL"}'
    )
    flops = 4 * (4 * 64 * 64) * 64 / 2  # two products of 4 heads; %a has 64 channels
    forward, backward = (simulated(program(line.replace("NAME", name))).seconds for name in ("", "Backward"))
    assert forward == pytest.approx(flops / (0.5 * GPU.bf16_flops))
    assert backward == pytest.approx(2.5 * flops / (0.25 * GPU.bf16_flops))
    in_window = line.replace('CAUSAL"', 'CAUSAL", "sliding_window_length":16').replace("NAME", "")
    left = 1 - (48 / 64) ** 2  # of the triangle
    assert simulated(program(in_window)).seconds == pytest.approx(left * flops / (0.5 * GPU.bf16_flops))


@pytest.mark.parametrize("of_values, parts, window", [(64, 1, 0), (192, 2, 16), (64, 1, 64)])
def test_attention_by_our_kernel_counts_causal_products(of_values, parts, window):
    """Two products forward, three for dq, four for dk and dv; those for scores once for each part of the channels.

    Of the triangle of 64 x 64 scores a window of 16 leaves out one of 48 x 48.
    """
    scores = (64 * 64 - 48 * 48 * (window == 16)) / 2
    q, k, v, do = "[1,64,4,32]", "[1,64,2,32]", f"[1,64,2,{of_values}]", f"[1,64,4,{of_values}]"
    kT, vT, n = "[1,2,32,64]", f"[1,2,{of_values},64]", "[1,64]"
    calls = {
        (q, k, vT, n): parts * 32 + of_values,
        (q, do, k, kT, v, n, n, n): parts * (32 + of_values) + 32,
        (k, v, q, q, do, do, n, n, n, n): (parts + 1) * (32 + of_values),
    }
    for operands, channels in calls.items():
        given = "\n".join(f"  %x{i} = bf16{shape} parameter({i})" for i, shape in enumerate(operands))
        names = ", ".join(f"%x{i}" for i in range(len(operands)))
        attributes = 'custom_call_target="mosaic_gpu_v2", metadata={op_name="NAME"}'
        line = f"{given}\n  %t = bf16[1] custom-call({names}), {attributes}"
        forward = f"jit(f)/jvp(window_{window})/attention/kernel/mpmd_map"
        for name in (forward, f"jit(f)/checkpoint/window_{window}/transpose(jvp(attention))/kernel/mpmd_map"):
            rate = 0.5 if len(operands) == 4 else 0.25
            seconds = simulated(program(line.replace("NAME", name))).seconds
            assert seconds == pytest.approx(2 * 4 * scores * channels / (rate * GPU.bf16_flops)), operands


def test_an_asynchronous_pair_overlaps():
    """A second of copying beside a second of a product; alone, all of it is exposed."""
    beside = simulated(program(READ, f"  %y {Y}", END))
    assert beside.seconds == pytest.approx(1.0) and sum(beside.exposed.values()) == pytest.approx(0, abs=1e-9)
    alone = simulated(program(READ, END, f"  %y {Y}"))
    assert alone.seconds == pytest.approx(2.0)
    assert alone.exposed == {(timeline.ENTRY, HOST_IN): pytest.approx(1.0)}


def test_a_kernel_that_reads_host_memory_keeps_products_waiting():
    """Started in front of a product, it has the multiprocessors first; a copy engine needs none."""
    found = simulated(program(READ_BY_KERNEL, f"  %y {Y}", END))
    assert found.seconds == pytest.approx(2.0) and found.exposed[timeline.ENTRY, HOST_IN] == pytest.approx(1.0)
    by_copies = costs.ProgramOnGpu(program(READ_BY_KERNEL, f"  %y {Y}", END), GPU, MESH, copies_only=True)
    assert timeline.simulate(by_copies).seconds == pytest.approx(1.0)


def test_both_directions_slow_each_other():
    """Half the rate each, so two seconds for both, as one after the other; duplex=1 would take one."""
    found = simulated(program(READ, WRITE, END, WRITTEN))
    assert found.seconds == pytest.approx(2.0) and found.busy == {
        HOST_IN: pytest.approx(2.0),
        HOST_OUT: pytest.approx(2.0),
    }
    free = dataclasses.replace(GPU, rates=dataclasses.replace(ROUND, duplex=1.0))
    assert simulated(program(READ, WRITE, END, WRITTEN), free).seconds == pytest.approx(1.0)


GATHERS = "  %g = (s8[1,1000,1000]{2,1,0}, s8[3,1000,1000]{2,1,0}) all-gather-start(%layer), replica_groups={{0,1,2}}"
GATHERED = "  %h = s8[3,1000,1000]{2,1,0} all-gather-done(%g)"


@pytest.mark.parametrize("plugin, first, seconds", [((0, 12), 2.0, 5.0), ((0, 11, 2), 2 + 8 / 3, 5.0)])
def test_copies_are_queued_on_the_streams_of_the_plugin(monkeypatch, plugin, first, seconds):
    """A write and four reads of a second each. 0.12 has a stream for each direction: the first read ends beside the
    write, at half the rate. 0.11 has four in turn: three reads share the rate beside the write, behind which is the
    fourth one, so that after 2 seconds 2/3, 2/3, 2/3 and all are left, a quarter of the rate for each."""
    monkeypatch.setattr(costs.cuda_plugin, "plugin_version", lambda: plugin)
    reads = [READ.replace("%s =", f"%s{i} =") for i in range(4)]
    ends = [END.replace("%d =", f"%d{i} =").replace("%s)", f"%s{i})") for i in range(4)]
    found = simulated(program(WRITE, *reads, ends[0], f"  %y {Y}", *ends[1:], WRITTEN), events=True)
    (product,) = [event for event in found.events if event.kind == PRODUCT]
    assert (product.begin, found.seconds) == pytest.approx((first, max(seconds, first + 1)))


def test_streams_in_turn_are_those_that_xla_wrote_down():
    """Copies of a computation first, then its slices by number; the body of a loop after them."""
    first, second = (READ.replace("%s =", f"%s.{number} =") for number in (10, 9))
    module = program(first, second, WRITE, WRITTEN, body=(READ.replace("%s =", "%t.1 ="),), trips=2, before=(END,))
    assert costs.streams_in_turn(module) == {name: f"in turn {i}" for i, name in enumerate(("o", "s.9", "s.10", "t.1"))}


def test_collectives_take_multiprocessors_and_share_a_link_of_pci_express():
    """Half of the multiprocessors, for as long as bytes move: half a second of hops, two seconds for two megabytes."""
    found = simulated(program(GATHERS, f"  %y {Y}", GATHERED))
    assert found.busy[PRODUCT] == pytest.approx(0.5 + 2 * 0.5, rel=1e-4)
    assert found.exposed == {(timeline.ENTRY, GATHER): pytest.approx(1.0, rel=1e-4)}
    shared = dataclasses.replace(GPU, link_bandwidth=GPU.pcie_bandwidth)
    alone, beside = (simulated(program(*lines), shared).seconds for lines in ((READ, END), (READ, GATHERS, END)))
    assert alone == pytest.approx(1.0) and beside == pytest.approx(0.5 + 2.0 + 0.5)


def test_loops_run_as_often_as_they_say():
    """A second of copying and one of a product in each iteration; all that is exposed is booked to the loop's scope."""
    found = simulated(program(body=(READ, END, f"  %y {Y}"), trips=40))
    assert found.seconds == pytest.approx(80)
    assert found.exposed == {("backward", HOST_IN): pytest.approx(40)}
    whole = simulated(program(body=(READ, END, f"  %y {Y}"), trips=40), most=1000)
    assert whole.seconds == pytest.approx(found.seconds) and whole.busy == pytest.approx(found.busy)
    for mean in (Fraction(2, 3), Fraction(41, 2)):
        part = simulated(program(body=(READ, END, f"  %y {Y}"), trips=mean))
        assert part.seconds == pytest.approx(2 * mean)
        assert part.exposed == {("backward", HOST_IN): pytest.approx(float(mean))}


def test_what_was_started_before_a_loop_goes_on_in_it():
    """20 seconds of copying beside 40 of products; a gather slows half of the iterations, simulated or not."""
    slow = dataclasses.replace(GPU, pcie_bandwidth=1e5, link_bandwidth=2e5 + 1)
    products: dict = {"body": (f"  %y {Y}",), "trips": 40}
    copied = simulated(program(END, before=(READ,), **products), slow)
    assert copied.seconds == pytest.approx(40) and not sum(copied.exposed.values())
    assert copied.busy == {HOST_IN: pytest.approx(20), PRODUCT: pytest.approx(40)}
    # Two copies of 5.75 seconds each: the first ends within the last iteration that is simulated.
    both = program(before=(READ, READ.replace("%s =", "%r =")), body=(f"  %y {Y}",), trips=12)
    found = simulated(both, dataclasses.replace(GPU, pcie_bandwidth=2e6 / 5.75), most=6)
    assert found.seconds == pytest.approx(12) and found.busy[HOST_IN] == pytest.approx(11.5)
    for bandwidth, seconds in ((2e5 + 1, 50.25), (1e4, None)):
        gathers = program(GATHERED, before=(GATHERS,), **products)
        gpu = dataclasses.replace(slow, link_bandwidth=bandwidth)
        found, whole = (simulated(gathers, gpu, most=most) for most in (6, 1000))
        assert found.seconds == pytest.approx(whole.seconds) and found.busy == pytest.approx(whole.busy)
        assert found.exposed == pytest.approx(whole.exposed)
        assert seconds is None or found.seconds == pytest.approx(seconds, rel=0.02)


def test_host_transfers_in_loops_are_told_apart():
    """Once for each instruction of a body, not for each time that it runs; those outside loops do not count."""
    body = (READ, END, READ_BY_KERNEL.replace("%s =", "%s2 ="), END.replace("%s)", "%s2)"), WRITE, WRITTEN)
    assert costs.host_transfers(program(READ, END, body=body, trips=7)) == {"copy_engine": 2, "kernel": 1}


@pytest.mark.parametrize("read", [READ, READ_BY_KERNEL])
def test_the_waits_that_are_drawn_are_what_is_exposed(read):
    """Also of a loop around a loop, whose last iterations are not simulated, and behind a kernel that copies."""
    body = costs.ProgramOnGpu(program(read, END, body=(read, END, f"  %y {Y}"), trips=12), GPU, MESH).steps()
    machine = timeline.Machine(GPU, 1, 3, record=True)
    machine.run([*body, costs.Loop("microbatches", 9, tuple(body), has_loops=False)])
    found = machine.timeline()
    drawn = defaultdict[tuple[str, str], float](float)
    for event in found.events:
        if event.stream == timeline.WAITS:
            drawn[event.loop, event.kind] += event.end - event.begin
    assert found.exposed == pytest.approx(drawn) and {label for label, _ in drawn} == {
        "outside loops",
        "backward",
        "microbatches",
    }
    assert sum(drawn.values()) <= found.seconds and max(event.end for event in found.events) <= found.seconds


def test_a_trace_has_the_events_in_order(tmp_path):
    """Every work and wait of the step, with the loop it is in; all of a loop's iterations are there."""
    module = program(body=(READ, END, f"  %y {Y}"), trips=12)
    file = tmp_path / "trace.json"
    prediction.write_trace(file, SimulatedStep([module], MESH).timeline(GPU, with_events=True), "one GPU")
    events = [x for x in json.loads(file.read_text())["traceEvents"] if x["ph"] == "X"]
    assert len(events) == 12 * 3 and [x["ts"] for x in events] == sorted(x["ts"] for x in events)
    assert all(x["dur"] == pytest.approx(1e6) and x["args"]["loop"] == "backward" for x in events)
    assert events[-1]["ts"] + events[-1]["dur"] == pytest.approx(24e6)
    names = [x for x in json.loads(file.read_text())["traceEvents"] if x["name"] == "thread_name"]
    rows = {x["args"]["name"]: x["tid"] for x in names}
    assert {rows[HOST_IN], rows[costs.MAIN], rows[timeline.WAITS]} == {x["tid"] for x in events}
    assert COLLECTIVES in rows
    late, early = (timeline.TimelineEvent("a", "product", costs.MAIN, "", x, x + 1.0, 0.0) for x in (3.0, 1.0))
    written = prediction.trace(timeline.Timeline(4.0, {}, {}, [late, early]), "")["traceEvents"]
    assert [x["ts"] for x in written if x["ph"] == "X"] == [1e6, 3e6]


def test_a_prediction_adds_up():
    """The range: a second of product and a second of reading, each at its ends, apart from what does not move."""
    module = program(READ_BY_KERNEL, f"  %y {Y}", END)
    found = prediction.predict(SimulatedStep([module], MESH), GPU, tokens=100, compute_time=0.5)
    assert found.predicted_step_s == pytest.approx(2.0) and found.tokens_per_s_per_gpu == pytest.approx(50)
    spans = GPU.spans()
    # copies: a copy engine reads under the product, as fast as it takes. The others move one of the two seconds.
    faster = [1 - 1 / spans["products"].fast, 1 - 1 / spans["host"].fast, 1.0]
    slower = [1 / spans["products"].slow - 1, 1 / spans["host"].slow - 1]
    low, high = (2 - math.hypot(*faster), 2 + math.hypot(*slower))
    assert found.predicted_range_s == pytest.approx([low, high])
    assert found.step_at_ends_s.keys() == {"products", "host", "copies"}
    assert found.step_at_ends_s["host"] == pytest.approx([1 + 1 / spans["host"].fast, 1 + 1 / spans["host"].slow])
    assert found.hangs_on.startswith("whether copy engines do") and found.calibrated
    too_fast = prediction.predict(SimulatedStep([module], MESH), GPU, tokens=100, compute_time=2.5)
    assert too_fast.predicted_step_s is None and "our attention kernel" in too_fast.not_predicted
    in_loop = SimulatedStep([program(body=(READ, END), trips=3)], MESH)
    for time, is_predicted in ((0.1, True), (1e9, False)):
        found_in_loop = prediction.predict(in_loop, GPU, tokens=100, compute_time=time)
        assert found_in_loop.host_transfers == {"copy_engine": 1, "kernel": 0}
        assert (found_in_loop.predicted_step_s is not None) == is_predicted
    assert found.mfu == pytest.approx(0.25) and found.exposed_s[HOST_IN] == pytest.approx(1.0)
    assert found.exposed_by_loop_s == {timeline.ENTRY: {HOST_IN: pytest.approx(1.0)}}


def test_the_rate_that_a_step_hangs_on_is_named():
    """A step that only waits for the host link; a card without published rows says so, and its range is wider."""
    module = program(READ, END)
    found = prediction.predict(SimulatedStep([module], MESH), GPU, tokens=1, compute_time=0.1)
    host = GPU.spans()["host"]
    assert found.hangs_on == (
        f"host link ({0.5 * host.slow:.2f} to {0.5 * host.fast:.2f}, measured by others): "
        f"{1e3 / host.fast:,.0f} to {1e3 / host.slow:,.0f} ms"
    )
    guessed = dataclasses.replace(GPU, products_from=rates.SHEET)
    products = SimulatedStep([program(f"  %y {Y}")], MESH)
    known, wide = (prediction.predict(products, g, tokens=1, compute_time=0.1) for g in (GPU, guessed))
    assert known.calibrated and not wide.calibrated and known.predicted_step_s == wide.predicted_step_s
    (low, high), (lower, higher) = known.predicted_range_s or (), wide.predicted_range_s or ()
    assert lower < low < 1 < high < higher


@dataclasses.dataclass
class SlowedBy:
    """In place of a simulated step: one second, and as much longer as any rate is slower."""

    busy: dict[str, float]
    parts: tuple = ()

    def timeline(self, gpu, *, copies_only: bool = False):
        ratios = [getattr(gpu.rates, name) / getattr(GPU.rates, name) for name in ("host", "duplex", "link", "memory")]
        ratios += [gpu.rates.dram / GPU.rates.dram, gpu.rates.network / GPU.rates.network]
        seconds = 2 - copies_only - math.log(math.prod(ratios)) + math.log(gpu.rates.collective_sms / 0.5)
        return timeline.Timeline(seconds, self.busy, {}, [])


@pytest.mark.parametrize(
    "kind, more",
    [
        (PRODUCT, set()),
        (HOST_IN, {"host", "duplex", "dram"}),
        (HOST_OUT, {"host", "duplex", "dram"}),
        (GATHER, {"dram", "link", "network", "collective_sms"}),
        (costs.REDUCE, {"dram", "link", "network", "collective_sms"}),
    ],
)
def test_rates_matter_to_steps_that_have_such_work(kind, more):
    step = SlowedBy({kind: 1.0})
    assert prediction.at_ends(step, GPU, step.timeline(GPU)).keys() == {"memory", "copies", *more}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ends, said",
    [
        ({"host": [1.0, 2.0], "disks": [1.0, 2.5]}, "disks: 1,000 to 2,500 ms"),
        ({"latencies": [0.05, 2.0], "host": [1.0, 2.0]}, "latencies (half to twice, assumed): 50.0 to 2,000 ms"),
        ({"copies": [1.0, 2.0]}, "whether copy engines do the host transfers that are kernels in this program: 1,000"),
        ({}, ""),
    ],
)
def test_what_a_step_hangs_on_in_words(ends, said):
    assert prediction._hangs_on(GPU, ends).startswith(said) and bool(said) == bool(prediction._hangs_on(GPU, ends))
    same = dataclasses.replace(GPU, seen=rates.Seen(same=True))
    assert prediction._hangs_on(same, ends) == "" and prediction._range(same, 2.0, ends) == [1.94, 2.06]


def test_a_step_that_was_corrected_keeps_the_shipped_prediction_in_its_range():
    slower = dataclasses.replace(GPU, seen=rates.Seen(factor=2.0))
    assert prediction._range(slower, 2.0, {"host": [1.7, 2.4], "link": [1.6, 2.3]}) == [1.0, 2.5]
    faster = dataclasses.replace(GPU, seen=rates.Seen(factor=0.5))
    assert prediction._range(faster, 2.0, {"host": [1.7, 2.4], "link": [1.6, 2.3]}) == [1.5, 4.0]
    assert prediction._range(GPU, 2.0, {"host": [2.5, 1.5]}) == [2.0, 2.0]


@pytest.mark.parametrize(
    "seconds, text",
    [(0.0125, "12.5 ms"), (0.1, "100 ms"), (9.999, "9,999 ms"), (10.0, "10.0 s"), (1234.5, "1,234.5 s")],
)
def test_seconds_as_text(seconds, text):
    assert prediction.duration(seconds) == text


def test_gpus_of_a_machine_share_its_host_memory():
    """Three GPUs read a megabyte in a second each; host memory that moves 1.5 MB/s for all takes twice as long."""
    assert simulated(program(READ, END)).seconds == pytest.approx(1.0)
    full = dataclasses.replace(ROUND, dram=1.0)
    scarce = dataclasses.replace(GPU, host_memory_bandwidth=1.5e6, rates=full)
    assert simulated(program(READ, END), scarce).seconds == pytest.approx(2.0)
    both = dataclasses.replace(scarce, host_memory_bandwidth=3e6)  # reads and writes together
    assert simulated(program(READ, WRITE, END, WRITTEN), both).seconds == pytest.approx(2.0)  # as the link's duplex
    assert simulated(program(READ, WRITE, END, WRITTEN), scarce).seconds == pytest.approx(4.0)
    staged = dataclasses.replace(scarce, name="NVIDIA GeForce of a test")  # what is sent is written there, and read
    collective = program(GATHERS, GATHERED)
    assert simulated(collective, scarce).seconds == pytest.approx(2.5)
    assert simulated(collective, staged).seconds == pytest.approx(0.5 + 2 * 2e6 / 0.5e6)


def test_products_in_eight_bits_have_a_rate_of_their_own():
    gpu = dataclasses.replace(GPU, fp8_flops=4.0 * TILE)
    slower = dataclasses.replace(ROUND, eight_bit=0.5)
    sixteen, eight, slow = (
        costs.product_time(dataclasses.replace(gpu, rates=of), 256, 128, 64, dtype=dtype)
        for of, dtype in ((slower, "bf16"), (ROUND, "f8e4m3fn"), (slower, "f8e4m3fn"))
    )
    assert (sixteen, eight, slow) == pytest.approx((1.0, 0.5, 1.0), rel=1e-3)


def test_the_cost_of_tokens():
    """An hour for 3,600 tokens at one a second; money for each GPU."""
    line = plan_text.cost(7200, 2.5, 4, [1.0, 0.9, 1.5])
    assert line.startswith("7,200 tokens: 2.0 (1.8 to 3.0) hours on 4 GPUs; 20.00 (18.00 to 30.00) at 2.5 per GPU hour")
    assert plan_text.cost(3600, None, 1, [1.0]).startswith("3,600 tokens: 1.0 hours on 1 GPU; evaluations")


def test_measured_beside_predicted():
    """The median of steps but the first, in tokens/s; nothing where nothing was predicted or measured."""
    found = prediction.Prediction(predicted_step_s=2.0, predicted_range_s=[1.0, 4.0])
    line = comparison(found, [60.0, 2.0, 2.5, 9.0], tokens=1000)
    assert line == "tok/s: measured 400, predicted 500 (250 to 1,000), measured / predicted 0.80"
    assert "measured 500" in comparison(found, [2.0], tokens=1000)
    assert comparison(found, [], tokens=1000) == ""
    for nothing in ({}, {"predicted_step_s": 2.0}, {"predicted_range_s": [1.0, 4.0]}):
        assert comparison(prediction.Prediction(**nothing), [2.0], tokens=1000) == ""


def test_calibration_fails_when_the_model_is_wrong(monkeypatch, capsys):
    """All rows within 5 % on average and 10 % each; with products a fifth faster than fitted no longer."""
    assert calibrate.main(["--only", "rtx4090"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 7 + 1 + 6 + 5 + 1 and "2,777" in out and "with the link" in out
    errors = [calibrate.predicted(row) / row.published - 1 for row in calibrate.ROWS]
    assert len(errors) == 25 and max(map(abs, errors)) < 0.10
    assert sum(map(abs, errors)) / len(errors) < 0.05
    gpu = GPUS["rtx4090"]
    rates = dataclasses.replace(gpu.rates, products=1.2 * gpu.rates.products)
    monkeypatch.setitem(GPUS, "rtx4090", dataclasses.replace(gpu, rates=rates))
    assert calibrate.main(["--only", "rtx4090"]) == 1

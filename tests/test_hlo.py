"""What is read from compiled programs: loops multiply, groups name axes, host copies have a direction."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfers

from surojax.planner import hlo

MESH = {"dp_replicate": 2, "dp_shard": 4}
PROGRAM = """HloModule step, is_scheduled=true

%body.1 (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %reduce-scatter.1 = f32[2,4]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %all-gather-start.1 = ((f32[2,4]{1,0}), f32[8,4]{1,0}) all-gather-start(%reduce-scatter.1), GROUPS_SHARD
  %all-gather-done.1 = f32[8,4]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%x, %all-gather-done.1)
}

%outer.2 (q: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %q = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[8,4]{1,0}) while(%q), condition=%c, body=%body.1, LOOP3
}

ENTRY %main (a: f32[8,4], stack: bf16[5,6]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %stack = bf16[5,6]{1,0:S(5)} parameter(1)
  %i = s32[] constant(0)
  %while.2 = (s32[], f32[8,4]{1,0}) while(%a), condition=%c, body=%outer.2, LOOP2
  %y.remat2 = f32[8,4]{1,0} negate(%a)
  %zeros.rematerialized = f32[16,4]{1,0} fusion(), kind=kLoop, calls=%zeros
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%a), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum
  %all-reduce.2 = (f32[8,4]{1,0}, s32[]) all-reduce(%a, %i), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
  %slice = ((bf16[5,6]{1,0:S(5)}, s32[]), bf16[1,6]{1,0}, u32[]) fusion-start(%stack, %i), kind=kLoop, calls=%f
  %layer = bf16[1,6]{1,0} fusion-done(%slice)
  %write = ((bf16[5,6]{1,0:S(5)}, bf16[1,6]{1,0}, s32[]), bf16[5,6]{1,0:S(5)}, u32[]) fusion-start(%stack, %layer, %i)
  %written = bf16[5,6]{1,0:S(5)} fusion-done(%write)
  %copy-start.1 = (f32[8,4]{1,0:S(5)}, f32[8,4]{1,0}, u32[]) copy-start(%a)
  %copy-done.1 = f32[8,4]{1,0:S(5)} copy-done(%copy-start.1)
  %copy.2 = bf16[5,6]{1,0:S(5)} copy(%stack)
  ROOT %copy.3 = f32[8,4]{1,0} copy(%copy-done.1)
}
"""
for word, text in {
    "GROUPS_SHARD": "replica_groups=mesh['dp_replicate'=2,'dp_shard'=4] {'dp_shard'}",
    "LOOP3": 'backend_config={"known_trip_count":{"n":"3"}}',
    "LOOP2": 'backend_config={"known_trip_count":{"n":"2"}}',
}.items():
    PROGRAM = PROGRAM.replace(word, text)


def test_collectives_are_counted_as_often_as_they_run_by_axis():
    found = {(x.op, x.axis): (x.count, x.bytes) for x in hlo.collectives([(hlo.parse_module(PROGRAM), 1)], MESH)}
    a = 8 * 4 * 4  # bytes
    assert found == {
        ("reduce-scatter", "dp_shard"): (6, 6 * 3 * a // 4),
        ("all-gather", "dp_shard"): (6, 6 * 3 * a // 4),
        ("all-reduce", "dp_replicate"): (1, a),
        ("all-reduce", "dp_replicate+dp_shard"): (1, 2 * 7 * (a + 4) // 8),
    }


def test_host_copies_have_a_direction():
    copies = hlo.host_copies([(hlo.parse_module(PROGRAM), 1)])
    layer, a = 6 * 2, 8 * 4 * 4
    assert copies == {"h2d_bytes": layer + a, "d2h_bytes": layer + a, "within_host_bytes": 5 * layer}


LOOP = """HloModule step, is_scheduled=true

%body.1 (p: (f32[8,4], bf16[5,6], bf16[5,6])) -> (f32[8,4], bf16[5,6], bf16[5,6]) {
  %p = (f32[8,4]{1,0}, bf16[5,6]{1,0:S(5)}, bf16[5,6]{1,0:S(5)}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=0
  %a = bf16[5,6]{1,0:S(5)} get-tuple-element(%p), index=1
  %b = bf16[5,6]{1,0:S(5)} get-tuple-element(%p), index=2
  %i = s32[] constant(0)
  %gather = ((f32[8,4]{1,0}), f32[16,4]{1,0}) all-gather-start(%x), replica_groups={{0,1}}
  %slice = ((bf16[5,6]{1,0:S(5)}, s32[]), bf16[1,6]{1,0}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%f
  %y = (f32[8,4]{1,0}, s8[4]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %layer = bf16[1,6]{1,0} fusion-done(%slice)
  %attention = (f32[8,4]{1,0}, u8[0]{0}) custom-call(%x, %x), custom_call_target="__cudnn$fmhaSoftmax"
  %other = f32[8,4]{1,0} custom-call(%x), custom_call_target="AllocateBuffer"
  %gathered = f32[16,4]{1,0} all-gather-done(%gather)
  %write = ((bf16[5,6]{1,0:S(5)}, bf16[1,6]{1,0}, s32[]), bf16[5,6]{1,0:S(5)}, u32[]) fusion-start(%b, %layer, %i)
  %read = ((bf16[5,6]{1,0:S(5)}, s32[]), bf16[1,6]{1,0}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%f
  %written = bf16[5,6]{1,0:S(5)} fusion-done(%write)
  %more = bf16[1,6]{1,0} fusion-done(%read)
  %sum = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (f32[8,4]{1,0}, bf16[5,6]{1,0:S(5)}, bf16[5,6]{1,0:S(5)}) tuple(%x, %a, %written)
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %while.2 = (f32[8,4]{1,0}) while(%a), condition=%c, body=%body.1, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %copy.3 = f32[8,4]{1,0} copy(%a)
}
"""


def test_transfers_are_beside_what_is_between_their_start_and_end():
    of = lambda *how: transfers.Transfer("body.1", 3, 2, *how)
    layer, x = 6 * 2, 8 * 4 * 4
    assert transfers.overlaps(hlo.parse_module(LOOP)) == [
        of("h2d", True, 0, 1, False, 1, layer),
        of("all-gather", True, 0, 2, False, 1, x),
        of("d2h", True, 2, 2, True, 1, layer),
        of("h2d", True, 2, 2, True, 1, layer),
        of("all-reduce", False, 2, 2, False, 1, x),
    ]


def test_rematerialised_operations_are_named():
    assert hlo.rematerialised([(hlo.parse_module(PROGRAM), 1)]) == {
        "count": 1,
        "bytes": 8 * 4 * 4,
        "largest": "y.remat2",
    }


def test_means_of_rounds_are_rounded_once():
    """A loop of ten thirds of a round in one of two: 20/3 times. Names of values are not made again."""
    more = """  %kept = f32[8,4]{1,0:S(5)} copy(%x)
  %z.remat = f32[1,3]{1,0} negate(%x)
  %p.remat = f32[8,4]{1,0} get-tuple-element(%p), index=1
"""
    text = PROGRAM.replace('{"n":"3"}', '{"n":"10/3"}').replace("  ROOT %out", more + "  ROOT %out")
    module = [(hlo.parse_module(text), 1)]
    found = {(x.op, x.axis): (x.count, x.bytes) for x in hlo.collectives(module, MESH)}
    assert repr(found["all-gather", "dp_shard"]) == "(7, 640)"
    assert repr(hlo.host_copies(module)["d2h_bytes"]) == str(round(6 * 2 + 128 + 128 * 20 / 3))
    remade = hlo.rematerialised(module)
    assert repr((remade["count"], remade["bytes"])) == f"({round(1 + 20 / 3)}, {128 + 12 * 20 // 3})"


def test_a_collective_in_an_asynchronous_computation():
    text = """HloModule step

%sums (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %all-to-all.1 = f32[4]{0} all-to-all(%x), replica_groups={{0,1}}
}

ENTRY %main (a: pred[4]) -> f32[4] {
  %a = pred[4]{0} parameter(0)
  %start = ((pred[4]), f32[4]{0}) async-start(%a), calls=%sums
  ROOT %fused = f32[4]{0} fusion(%a), kind=kLoop, calls=%sums
}
"""
    module = hlo.parse_module(text)
    found = hlo.collective(module, module[""]["start"])
    assert found is not None and found.name == "all-to-all.1"
    assert hlo.collective(module, module[""]["fused"]) is None
    assert [i.name for i, *_ in hlo.executed(module)] == ["a", "start", "x", "all-to-all.1", "fused"]
    assert hlo.arrays("(pred[4], s4[3], token[])")[:2] == (hlo.Array(4, 1, False), hlo.Array(2, 1, False))


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match=r"while\.2.*constant length"):
        list(hlo.executed(hlo.parse_module(PROGRAM.replace('"known_trip_count":{"n":"2"}', ""))))


def test_programs_are_added_up():
    once = hlo.parse_module(PROGRAM)
    both = hlo.collectives([(once, 1), (once, 3)], MESH)
    assert both == [
        dataclasses.replace(x, count=4 * x.count, bytes=4 * x.bytes) for x in hlo.collectives([(once, 1)], MESH)
    ]


def test_reads_what_jax_compiles():
    """A loop of sums over one axis and a permutation over the other, on virtual devices."""
    mesh = jax.make_mesh((2, 4), ("dp_replicate", "dp_shard"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def f(x):
        one = lambda i, x: jnp.tanh(jax.lax.pcast(jax.lax.psum(x, "dp_shard"), "dp_shard", to="varying"))
        x = jax.lax.fori_loop(0, 5, one, x)
        return jax.lax.ppermute(x, "dp_replicate", [(0, 1), (1, 0)])

    spec = jax.P(("dp_replicate", "dp_shard"))
    x = jax.ShapeDtypeStruct((8, 256), np.float32, sharding=jax.NamedSharding(mesh, spec))
    text = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)).lower(x).compile().as_text()
    found = {(x.op, x.axis): (x.count, x.bytes) for x in hlo.collectives([(hlo.parse_module(text), 1)], mesh.shape)}
    sums = 5, 5 * 2 * 3 * 1024 // 4
    assert found == {("all-reduce", "dp_shard"): sums, ("collective-permute", "dp_replicate"): (1, 1024)}


@pytest.mark.parametrize(
    "opcode", ["parameter", "tuple", "get-tuple-element", "bitcast", "custom-call", "while", "conditional", "call"]
)
def test_a_name_is_no_copy(opcode):
    """Whatever it names in host memory; a negation of the same reads it from there."""
    text = "HloModule m\n\nENTRY %main (a: f32[8,4]) -> f32[8,4] {\n  %a = f32[8,4]{1,0:S(5)} parameter(0)\n"
    text += "  ROOT %b = f32[8,4]{1,0} OPCODE(%a)\n}\n"
    for op, expected in ((opcode, None), ("negate", ("h2d", 8 * 4 * 4))):
        computation = hlo.parse_module(text.replace("OPCODE", op))[""]
        assert hlo.host_copy(computation["b"], computation) == expected


@pytest.mark.parametrize(
    "shape, operand, expected",
    [
        ("bf16[5,6]{1,0}", "bf16[5,6]{1,0:S(5)}", "h2d"),
        ("bf16[5,6]{1,0:S(5)}", "bf16[5,6]{1,0}", "d2h"),
        ("bf16[5,6]{1,0:S(5)}", "bf16[5,6]{1,0:S(5)}", "within"),
        ("bf16[5,6]{1,0}", "bf16[5,6]{1,0}", None),
    ],
)
def test_the_direction_of_a_copy(shape, operand, expected):
    lines = f"  %a = {operand} parameter(0)\n  ROOT %b = {shape} copy(%a)\n"
    text = f"HloModule m\n\nENTRY %main () -> bf16[5,6] {{\n{lines}}}\n"
    computation = hlo.parse_module(text)[""]
    found = hlo.host_copy(computation["b"], computation)
    assert found == (expected and (expected, 2 * 5 * 6))


@pytest.mark.parametrize(
    "op, sent",
    [
        ("all-gather", 3 * 1000),  # a shard to each of three others
        ("reduce-scatter", 3 * 250),
        ("all-to-all", 3 * 250),
        ("all-reduce", 2 * 3 * 250),  # scatter the sums, gather them
        ("collective-permute", 1000),
    ],
)
def test_bytes_that_one_of_four_gpus_sends(op, sent):
    assert hlo.WIRE[op](4, 1000) == sent


@pytest.mark.parametrize(
    "attributes, axes, devices",
    [
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", "dp_replicate+dp_shard", 8),
        ("replica_groups={{0,4},{1,5}}", "dp_replicate", 2),
        ("source_target_pairs={{0,1},{1,0}}", "dp_shard", 2),
        ("replica_groups=[2,4]<=[8]", "dp_shard", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "dp_replicate", 2),
        ("", "dp_replicate+dp_shard", 8),  # all devices
    ],
)
def test_the_axes_of_a_group(attributes, axes, devices):
    attributes = attributes.replace("'a'", "'dp_replicate'").replace("'b'", "'dp_shard'")
    assert hlo.group(hlo.Instruction("i", "f32[8]", "all-reduce", (), attributes), MESH) == (axes, devices)


def test_the_result_of_an_instruction_is_behind_its_operands():
    shapes = {
        "fusion-start": "((bf16[5,6], s32[]), bf16[1,6], u32[])",
        "all-gather-start": "((f32[8,4]), f32[16,4])",
        "copy-start": "(f32[8,4]{1,0:S(5)}, f32[8,4]{1,0}, u32[])",
        "all-reduce-start": "(f32[8], f32[4])",
        "fusion": "((f32[8]), f32[4])",
    }
    found = {op: hlo.result(hlo.Instruction("i", shape, op, (), "")) for op, shape in shapes.items()}
    assert found == {
        "fusion-start": ", bf16[1,6], u32[])",
        "all-gather-start": ", f32[16,4])",
        "copy-start": "(f32[8,4]{1,0:S(5)}",
        "all-reduce-start": "(f32[8], f32[4])",
        "fusion": "((f32[8]), f32[4])",
    }

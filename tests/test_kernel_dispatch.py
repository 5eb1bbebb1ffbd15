"""Which implementation runs on which device, and what is said or raised where a kernel cannot run."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import (
    adamw8bit_update,
    bench,
    cross_entropy,
    dispatch,
    fp8_format,
    gated_delta_chunks,
    mx,
    nvfp4_quantize,
    quantize,
    rms_norm,
    rope,
    shapes,
    swiglu,
)


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
    assert fp8_format.has_instructions() == fp8_too


def test_fp8_of_what_is_not_nvidias(monkeypatch):
    """Such a device traces kernels for the interpreter only, which converts FP8 itself."""
    monkeypatch.setattr(jax, "devices", lambda *_: [device("gfx942")])
    assert fp8_format.has_instructions()


def delta(channels: int, dtype):
    """(tokens, starts, state) of the gated delta rule."""
    keys, values, numbers = (1, 64, 1, channels), (1, 64, 1, 1, channels), (1, 64, 1, 1)
    tokens = gated_delta_chunks.Tokens(*(jnp.zeros(shape, dtype) for shape in (keys, keys, values, numbers, numbers)))
    return tokens, jnp.zeros((1, 64), jnp.int32), jnp.zeros((1, 1, 1, channels, channels))


# What each kernel does not serve. Called with implementation="mosaic" nothing of it runs.
z, u8, one, SEED = jnp.zeros, jnp.uint8, jnp.float32(1), jnp.uint32(3)
STATE = (*adamw8bit_update.zero_moments((2, 150)), jnp.ones(8), z(2, jnp.uint32))
LOGITS, LABELS = jax.ShapeDtypeStruct((42733, 50257), jnp.bfloat16), jax.ShapeDtypeStruct((42733,), jnp.int32)
SERVED = {
    "gated_delta": lambda **how: gated_delta_chunks.gated_delta(*delta(16, jnp.bfloat16), **how),
    "rms_norm.forward": lambda **how: rms_norm.rms_norm(z((64, 128)), z(128), **how),
    "rms_norm.backward": lambda **how: rms_norm.backward(z((64, 128)), z((64, 128)), z(128), eps=1e-6, **how),
    "rope": lambda **how: rope.rope(z((64, 4, 64)), z((64, 4, 64)), z((64, 32)), z((64, 32)), **how),
    "swiglu.forward": lambda **how: swiglu.forward(z(128), z(128), **how),
    "swiglu.backward": lambda **how: swiglu.backward(z(128), z(128), z(128), **how),
    "quantize.absmax": lambda **how: quantize.absmax(z(128), **how),
    "quantize.cast": lambda **how: quantize.cast(z(128), one, fp8_format.E4M3, **how),
    "quantize.cast_transpose": lambda **how: quantize.cast_transpose(z((64, 64)), one, fp8_format.E4M3, **how),
    "quantize.transpose": lambda **how: quantize.transpose(z((64, 64), u8), **how),
    "quantize.quantize_blocks": lambda **how: quantize.quantize_blocks(z((8, 128)), jnp.int8, **how),
    "quantize.dequantize_blocks": lambda **how: quantize.dequantize_blocks(
        quantize.BlockQuantized(z((8, 128), jnp.int8), z((8, 1))), jnp.bfloat16, **how
    ),
    "quantize.stochastic_round": lambda **how: quantize.stochastic_round(z(128), jnp.int32(0), **how),
    "mx.quantize": lambda **how: mx.quantize(z((8, 128)), **how),
    "mx.quantize_transposed": lambda **how: mx.quantize_transposed(z((128, 64)), **how),
    "mx.quantize_both": lambda **how: mx.quantize_both(z((128, 64)), **how),
    "nvfp4.quantize": lambda **how: nvfp4_quantize.quantize(z((8, 128)), **how),
    "nvfp4.quantize_rotated": lambda **how: nvfp4_quantize.quantize_rotated(z((128, 64)), SEED, **how),
    "nvfp4.quantize_both": lambda **how: nvfp4_quantize.quantize_both(z((128, 64)), SEED, (SEED, SEED), **how),
    "nvfp4.quantize_weights": lambda **how: nvfp4_quantize.quantize_weights(z((128, 64)), **how),
    "cross_entropy": lambda **how: cross_entropy.loss_and_gradient(z((2, 128)), z(2, jnp.int32), 1.0, **how),
    "adamw8bit": lambda **how: adamw8bit_update.adamw8bit(
        z((2, 128)), z((2, 128)), *adamw8bit_update.zero_moments((2, 128)), z(8), z(2, jnp.uint32), in_place=True, **how
    ),
}
UNSERVED = {
    "gated_delta": lambda **how: gated_delta_chunks.gated_delta(*delta(8, jnp.float32), **how),
    "rms_norm.forward": lambda **how: rms_norm.forward(z((64, 1001)), z(1001), eps=1e-6, **how),
    "rms_norm.backward": lambda **how: rms_norm.backward(z((64, 1001)), z((64, 1001)), z(1001), eps=1e-6, **how),
    "rope": lambda **how: rope.forward(z((1, 1, 64)), z((1, 1, 64)), z((1, 32)), z((1, 32)), **how),
    "swiglu.forward": lambda **how: swiglu.forward(z((3, 100)), z((3, 100)), **how),
    "swiglu.backward": lambda **how: swiglu.backward(z((3, 100)), z((3, 100)), z((3, 100)), **how),
    "quantize.absmax": lambda **how: quantize.absmax(z(100), **how),
    "quantize.cast": lambda **how: quantize.cast(z(100), one, fp8_format.E4M3, **how),
    "quantize.cast_transpose": lambda **how: quantize.cast_transpose(z((64, 100)), one, fp8_format.E4M3, **how),
    "quantize.transpose": lambda **how: quantize.transpose(z((64, 100), u8), **how),
    "quantize.quantize_blocks": lambda **how: quantize.quantize_blocks(z((8, 64)), jnp.int8, 64, **how),
    "quantize.dequantize_blocks": lambda **how: quantize.dequantize_blocks(
        quantize.BlockQuantized(z((8, 64), jnp.int8), z((8, 1))), jnp.bfloat16, **how
    ),
    "quantize.stochastic_round": lambda **how: quantize.stochastic_round(z(100), jnp.int32(0), **how),
    "mx.quantize": lambda **how: mx.quantize(z((8, 96)), **how),
    "mx.quantize_transposed": lambda **how: mx.quantize_transposed(z((96, 64)), **how),
    "mx.quantize_both": lambda **how: mx.quantize_both(z((96, 64)), **how),
    "nvfp4.quantize": lambda **how: nvfp4_quantize.quantize(z((8, 96)), **how),
    "nvfp4.quantize_rotated": lambda **how: nvfp4_quantize.quantize_rotated(z((96, 64)), SEED, **how),
    "nvfp4.quantize_both": lambda **how: nvfp4_quantize.quantize_both(z((96, 64)), SEED, (SEED, SEED), **how),
    "nvfp4.quantize_weights": lambda **how: nvfp4_quantize.quantize_weights(z((96, 64)), **how),
    "cross_entropy": lambda **how: jax.eval_shape(functools.partial(cross_entropy.logprob, **how), LOGITS, LABELS),
    "adamw8bit": lambda **how: adamw8bit_update.adamw8bit(z((2, 150)), z((2, 150)), *STATE, **how),
}


@pytest.mark.parametrize("op", UNSERVED)
def test_kernels_refuse_with_one_error(op):
    """It is what a caller's mistake is too, and says which op, what it expects and what it got."""
    with pytest.raises(dispatch.Unserved, match=rf"^{op}: .*expected .*, got .*; use implementation=None") as found:
        UNSERVED[op](implementation="mosaic")
    assert isinstance(found.value, NotImplementedError) and isinstance(found.value, ValueError)


@pytest.mark.parametrize("op", UNSERVED)
def test_what_is_left_to_xla_is_said_once(op, monkeypatch):
    """As on a GPU that the kernels serve, when it is traced; the warning names the line that calls the op."""
    monkeypatch.setattr(dispatch, "automatic", lambda device=None: "mosaic")
    dispatch._say_once.cache_clear()
    with pytest.warns(UserWarning, match=rf"^{op}: .*expected .*, got .*; using XLA's instead$") as said:
        jax.eval_shape(UNSERVED[op])
    assert len(said) == 1 and said[0].filename == __file__
    jax.eval_shape(UNSERVED[op])  # warnings are errors here
    dispatch._say_once.cache_clear()
    jax.eval_shape(functools.partial(UNSERVED[op], implementation="xla"))


@pytest.mark.full(after=6)
@pytest.mark.parametrize("op", SERVED)
def test_kernels_need_a_gpu_or_the_interpreter(op):
    """Traced they may be, for a GPU that is not here; run or compiled for this device, the error names the op."""
    kernel = functools.partial(SERVED[op], implementation="mosaic")
    jax.eval_shape(kernel)
    for call in (kernel, jax.jit(kernel)):
        with pytest.raises(dispatch.Unserved, match=f"^{op}: device: expected an NVIDIA GPU, or interpret=.*, got cpu"):
            call()


DIFFERENTIABLE = {
    "rms_norm": lambda x, **how: rms_norm.rms_norm(x, z(128), **how),
    "rms_norm of a sum": lambda x, **how: rms_norm.rms_norm(x, z(128), residual=x, **how)[0],
    "rope": lambda x, **how: rope.rope(x[:, None], x[:, None], z((64, 64)), z((64, 64)), **how)[0],
    "cross_entropy": lambda x, **how: cross_entropy.cross_entropy(x, z(64, jnp.int32), **how),
}


@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_the_backward_pass_has_the_implementation_that_was_asked_for(op, implementation, monkeypatch):
    def automatic(device=None):
        raise AssertionError("nothing was asked for")

    monkeypatch.setattr(dispatch, "automatic", automatic)
    call = functools.partial(DIFFERENTIABLE[op], implementation=implementation)
    assert jax.eval_shape(jax.grad(lambda x: call(x).sum()), z((64, 128))).shape == (64, 128)


def test_kernels_need_a_gpu_under_transformations():
    """vmap and gradients pass through what looks for the device; only lowering asks for one."""
    x, labels = z((2, 3, 128)), z((2, 3), jnp.int32)
    loss = lambda x, labels: cross_entropy.cross_entropy(x, labels, implementation="mosaic").sum()
    prob = lambda x: cross_entropy.logprob(x, labels, implementation="mosaic").sum()
    grad = jax.grad(lambda x: jax.vmap(loss)(x, labels).sum())
    assert jax.eval_shape(grad, x).shape == jax.eval_shape(jax.grad(prob), x).shape == x.shape
    with pytest.raises(dispatch.Unserved, match=r"^cross_entropy: device"):
        jax.jit(jax.vmap(loss))(x, labels)


def operations(jaxpr, conditional=False):
    """(operation, whether it is in a branch) of a program and of all programs in it."""
    for operation in jaxpr.eqns:
        yield operation, conditional
        parts = jax.tree.leaves(list(operation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
        for part in (getattr(x, "jaxpr", x) for x in parts):
            if hasattr(part, "eqns"):
                yield from operations(part, conditional or operation.primitive.name == "cond")


def reductions_by_all(program) -> list[str]:
    """Reductions to one number that all of a kernel's several warp groups take."""
    return [
        operation.primitive.name
        for kernel, _ in operations(program.jaxpr)
        for mesh, body in zip(kernel.params.get("meshes", ()), kernel.params.get("jaxprs", ()), strict=False)
        if (getattr(mesh, "num_threads", None) or 1) > 1
        for operation, in_branch in operations(getattr(body, "jaxpr", body))
        if operation.primitive.name in ("reduce_max", "reduce_sum", "reduce_min")
        and not operation.outvars[0].aval.shape
        and not in_branch
    ]


@pytest.mark.parametrize("op", bench.OPS)
def test_one_warp_group_alone_reduces_to_a_number(op):
    """Mosaic exchanges numbers between warps in one place for all warp groups of a program, which nobody orders, and
    the interpreter has no such place: `cross_entropy._logsumexp`."""
    cases = bench.OPS[op].cases(shapes.MODELS["llama7b"], 256)
    programs = [jax.make_jaxpr(functools.partial(case.run, implementation="mosaic"))(*case.args) for case in cases]
    assert not [reductions_by_all(program) for program in programs if reductions_by_all(program)]


def test_a_reduction_by_all_warp_groups_is_seen():
    def kernel(x_ref, y_ref):
        y_ref[jax.lax.axis_index("group")] = jnp.max(x_ref[...])

    number = jax.ShapeDtypeStruct((2,), jnp.float32)
    for groups, found in ((2, ["reduce_max"]), (1, [])):
        run = plgpu.kernel(
            kernel, out_type=number, grid=(1,), grid_names=("rows",), num_threads=groups, thread_name="group"
        )
        assert reductions_by_all(jax.make_jaxpr(run)(jnp.zeros(128))) == found


LARGE = [  # (kernel, shape of its input that has 2^31 numbers, one that has fewer)
    (lambda x: quantize.absmax(x, implementation="mosaic"), (2**31,), (2**31 - 128,)),
    (lambda x: quantize.cast_transpose(x, one, fp8_format.E4M3, implementation="mosaic"), (2**15, 2**16), (64, 2**20)),
    (lambda x: quantize.quantize_blocks(x, jnp.int8, implementation="mosaic"), (2**24, 128), (2**24 - 8, 128)),
    (lambda x: mx.quantize(x, implementation="mosaic"), (2**24, 128), (2**24 - 8, 128)),
    (lambda x: nvfp4_quantize.quantize(x, implementation="mosaic"), (2**24, 128), (2**24 - 8, 128)),
    (lambda x: nvfp4_quantize.quantize_weights(x, implementation="mosaic"), (2**24, 128), (2**24 - 128, 128)),
]


@pytest.mark.parametrize("kernel, large, fewer", LARGE)
def test_arrays_that_32_bits_number(kernel, large, fewer):
    """Nothing of their size is made."""
    with pytest.raises(dispatch.Unserved, match=r"other (sizes|blocks): the kernel needs .*2\^31"):
        jax.eval_shape(kernel, jax.ShapeDtypeStruct(large, jnp.float32))
    jax.eval_shape(kernel, jax.ShapeDtypeStruct(fewer, jnp.float32))


def test_the_device_that_a_program_is_for():
    """The default one, the first of a platform, or the one that was chosen."""
    assert dispatch.target() == jax.devices()[0] and dispatch.automatic.__wrapped__() == "xla"
    with jax.default_device("cpu"):
        assert dispatch.target() == jax.devices()[0] and dispatch.automatic.__wrapped__("cpu") == "xla"
    with jax.default_device(jax.devices()[-1]):
        assert dispatch.target() == jax.devices()[-1]
    assert dispatch.automatic.__wrapped__(jax.devices()[-1]) == "xla"
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="that one")
    assert dispatch.automatic.__wrapped__(gpu) == "mosaic"

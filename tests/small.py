"""A model small enough to compile in a second, and a few functions to run it, shared by the tests."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from surojax.assembly.assemble import assemble
from surojax.memory.in_file import InFile
from surojax.models import decoder, decoder_model
from surojax.models.decoder import Decoder
from surojax.models.decoder_config import DecoderConfig
from surojax.models.kinds import targets
from surojax.models.loss import cross_entropy
from surojax.models.model import DEFAULT, Compute, Model
from surojax.objectives.objective import CrossEntropy
from surojax.optim import optimizer as optim
from surojax.optim.adamw import adamw
from surojax.optim.learning_rate import learning_rate_schedule
from surojax.placement.layout import Layout, batch_sharding
from surojax.placement.mesh import make_mesh, shards
from surojax.placement.param import Kind, Param
from surojax.placement.table import Storage, place
from surojax.step.spec import StepSettings

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def target_names(names: str, config: DecoderConfig = CONFIG) -> tuple[str, ...]:
    """Our names of the matrices that PEFT's names select in a model."""
    return targets.target_names(names, decoder.declarations(config).values())


TABLES = dataclasses.replace(CONFIG, vocab_size=256)  # of which files have embedding and head in four pieces

# How a test marked gpu runs a kernel: in Pallas' GPU interpreter, or with `pytest -m gpu -n 0` on a real GPU.
KERNEL = {"implementation": "mosaic", "interpret": jax.default_backend() == "cpu"}
REFERENCE = {"implementation": "xla"}


# The levels of the compiler that tests/conftest.py turns down, as users have them.
AS_USERS_DO = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def quick_at(cases: Sequence, *positions: int) -> list:
    """The cases of a parametrised test: those at these positions for `pytest`, the others for `pytest --all` only.

    A case is a tuple with a value for each argument of the test.
    """
    marks = lambda i: () if i in positions else pytest.mark.full
    return [pytest.param(*case, marks=marks(i)) for i, case in enumerate(cases)]


def paired(*choices: Sequence) -> list[tuple]:
    """As many cases as the longest list has choices, each with one choice of every list in turn: no cross product.

    Lists of as many choices would always meet in the same pairs, which a rotation of one does not change; so use it
    where choices act by themselves.
    """
    return [tuple(of_one[i % len(of_one)] for of_one in choices) for i in range(max(map(len, choices)))]


def needs(devices: int):
    """Marks a test that makes a mesh of so many devices: virtual CPU devices are always enough."""
    return pytest.mark.skipif(jax.device_count() < devices, reason=f"needs {devices} devices")


def tokens(*shape: int, seed: int = 0, vocab_size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels), int32 of this shape; a few labels are ignored."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, vocab_size, shape).astype(np.int32)
    labels = np.roll(inputs, -1, axis=-1)
    return inputs, np.where(rng.random(shape) < 0.05, np.int32(-1), labels)


def normal(seed: int, shape: Sequence[int], dtype=jnp.float32) -> jax.Array:
    """Normal numbers that numpy draws: jax.random compiles a program for every shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


@contextlib.contextmanager
def vectors_drawn():
    """Within it, the scales of norms scatter around 1 and biases around 0, by 0.2, instead of being 1 and 0.

    A norm that is left out or taken for another, and a bias that is dropped, then change the result. Matrices are as
    they are without it.
    """

    def around(mean: float):
        return lambda key, shape, dtype=jnp.float32: mean + 0.2 * jax.random.normal(key, shape, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx.initializers, "ones", around(1.0))
        patch.setattr(nnx.initializers, "zeros", around(0.0))
        yield


def drawn_params(config: DecoderConfig, seed: int, times: float = 1) -> dict:
    """Float32 parameters `{"blocks", "outer"}` of which none is 0 or 1, multiplied by a factor."""
    return jax.tree.map(lambda x: jnp.array(times * x), _drawn_params(config, seed))


@functools.cache
def _drawn_params(config: DecoderConfig, seed: int) -> dict:
    with vectors_drawn():
        return jax.device_get(decoder_model.build(config).init(seed))


NEW_STATES: dict = {}


def made_once(plan, make, *names):
    """What `make` returns, a new state of this plan, made once for all placements of the same arrays in a process.

    Compiling that takes as long as a third of a step's. tests/test_placement.py has that they are the same numbers.
    names: what else the numbers depend on.
    """
    arrays, structure = jax.tree.flatten(plan)
    if not all(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):  # some are in files
        return make()
    key = (*names, structure, *((x.shape, x.dtype) for x in arrays))
    if key not in NEW_STATES:
        NEW_STATES[key] = jax.device_get(make())
    return jax.device_put(NEW_STATES[key], jax.tree.map(lambda x: x.sharding, plan))


def stored(x) -> np.ndarray:
    """The values of an array of a state, or of what a file has in its place."""
    if not isinstance(x, InFile):
        return np.asarray(x)
    array = np.zeros(x.shape, x.dtype)
    for l in range(x.stack_shape[0]):
        for index, values in x.first_pieces(l, x.read(l)):
            array[index] = values
    return array


STEP_FIELDS = {field.name for field in dataclasses.fields(StepSettings)}


class Small:
    """A training step over `devices` virtual devices, and its state."""

    def __init__(
        self,
        devices: int = 1,
        *,
        config: DecoderConfig = CONFIG,
        compute: Compute = DEFAULT,
        model: Model | None = None,
        replicate: int = 1,
        ep_size: int = 1,
        cp_size: int = 1,
        tp_size: int = 1,
        pp_size: int = 1,
        z_loss: float = 0.0,
        batch: tuple[int, int, int] | None = None,
        seed: int = 0,
        m_dtype: str = "float32",
        optimizer=adamw,
        **settings,
    ):
        """settings: fields of `StepSettings` and of `Storage`."""
        sizes = {
            "dp_replicate_size": replicate,
            "ep_size": ep_size,
            "cp_size": cp_size,
            "tp_size": tp_size,
            "pp_size": pp_size,
            "kv_heads": config.num_key_value_heads,
        }
        self.mesh = make_mesh(jax.devices()[:devices], **sizes)
        of_step = {name: settings.pop(name) for name in STEP_FIELDS & settings.keys()}
        placed = {"model_dtype": "float32", "recipe": compute.precision.recipe, **settings}
        schedule = learning_rate_schedule("cosine", peak=1e-2, total_steps=20, warmup_steps=2)
        self.run = assemble(
            model or decoder_model.build(config, compute),
            place(Storage(**placed), num_shards=shards(self.mesh)),
            optimizer(schedule, m_dtype=m_dtype),
            self.mesh,
            StepSettings(**{"objective": CrossEntropy(z_loss), **of_step}),
            batch,
        )
        self.plan, self.engine, self.optimizer = self.run.plan, self.run.engine, self.run.optimizer
        self.step = self.run.train_step()
        self.seed = seed
        self.drawn_alike = self.run.model.init_outer if model else (config, compute.precision.recipe)

    @functools.cached_property
    def state(self):
        """`drawn`, when it is first asked for; see `made_once`."""
        return made_once(self.plan, self.drawn, self.drawn_alike, self.seed)

    def init(self):
        """A new state made where it rests."""
        return self.run.init_state(self.seed)

    def drawn(self):
        """The same with every parameter drawn, see `vectors_drawn`."""
        with vectors_drawn():
            return self.init()

    def compile_as_users_do(self, batch) -> None:
        """Compiles the step at the compiler's levels that tests/conftest.py turns down.

        Without LLVM's optimisations, what its fast instruction selection cannot translate is contracted and the rest is
        not, which differs from kernel to kernel, and from processor to processor.
        """
        self.step = self.step.lower(self.plan, *self.put(batch)).compile(AS_USERS_DO)

    def put(self, batch):
        """A batch `[A, B, S]` on the devices."""
        return jax.device_put(batch, batch_sharding(self.mesh))

    def train(self, batches) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each step."""
        found = []
        for batch in batches:
            self.state, metrics = self.step(self.state, *self.put(batch))
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return found


REPLICATED = Layout(jax.P(), jax.P())  # the layout of what is not sharded


def declared(arrays: dict) -> dict:
    """`Param`s of a made-up model's arrays `{"blocks": [L, ...], "outer"}`; two dimensions make a matrix or a table."""

    def of_part(number: int, tree, layer_axes: int):
        leaves, structure = jax.tree.flatten(tree)

        def one(i: int, x):
            shape = x.shape[layer_axes:]
            kind = Kind.VECTOR if len(shape) < 2 else (Kind.MATRIX, Kind.TABLE)[number]
            return Param(f"{number}.{i}", shape, ("embed",) * len(shape), kind, stream=2 * i + number)

        return structure.unflatten([one(i, x) for i, x in enumerate(leaves)])

    return {"blocks": of_part(0, arrays["blocks"], 1), "outer": of_part(1, arrays["outer"], 0)}


def new_moments(optimizer: optim.Optimizer, arrays: dict) -> dict:
    """Optimizer state of a made-up model's arrays, zeros; every array of the blocks' has the layer axis."""
    params = declared(arrays)
    state = lambda param: optimizer.rule(param).init(param.shape, 1)
    outer = jax.tree.map(state, params["outer"])
    blocks = jax.tree.map(state, params["blocks"])
    layers = len(jax.tree.leaves(arrays["blocks"])[0])
    return {"blocks": jax.tree.map(lambda x: jnp.stack([x] * layers), blocks), "outer": outer}


def plain_loss(config: DecoderConfig):
    """(params, inputs `[..., S]`, labels, starts) -> mean loss of the plain model: what the engine must equal."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def loss(params, inputs, labels, starts=None):
        rows = (-1, inputs.shape[-1])
        starts = None if starts is None else starts.reshape(rows)
        logits = nnx.merge(graph, params)(inputs.reshape(rows), starts)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)) / (labels >= 0).sum()

    return loss


@functools.cache
def plain_model(config: DecoderConfig):
    """Compiled: (params, ids `[1, S]`) -> logits `[1, S, V]`."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return jax.jit(lambda params, ids: nnx.merge(graph, params)(ids))


def plain_logits(config: DecoderConfig, params, ids, length: int = 0) -> np.ndarray:
    """The plain model's logits `[S, V]`. length: of a row that begins with the ids: one program for all texts."""
    row = np.zeros((1, max(length, len(ids))), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(plain_model(config)(params, row))[0, : len(ids)]


def worst_relative(found, expected) -> float:
    """Largest difference over a tree, relative to the largest entry of the expected leaf."""

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)

    return max(jax.tree.leaves(jax.tree.map(one, found, expected)))

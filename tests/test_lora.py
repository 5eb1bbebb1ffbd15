"""Adapters (models/lora.py) against PEFT, and what of a step they leave out. fixtures/make_lora_reference.py says how
its numbers were made.
"""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, needs, plain_loss, plain_model, quick_at, target_names, tokens, worst_relative
from test_engine import ORDER_OF_SUMS

from surojax.config import checks, default_config
from surojax.errors import CheckpointError, ConfigError
from surojax.exchange.base import check_base, fingerprint
from surojax.exchange.model_tensors import tensor_name
from surojax.families.family import TENSOR_NAMES
from surojax.models import decoder_model
from surojax.models.lora import Adapter, Lora, adapters, dropped
from surojax.models.model import Compute, RecipeInputs
from surojax.numerics import fp8, nf4
from surojax.numerics.recipes import BLOCK_SCALED, RECIPES, Precision
from surojax.optim.adamw import adamw
from surojax.placement.mesh import make_mesh
from surojax.placement.param import part_of, with_part
from surojax.step.weights import quantise_with_one_scale

SITES = decoder_model.build(CONFIG).sites

with np.load(Path(__file__).parent / "fixtures" / "lora_reference.npz") as arrays:
    REFERENCE = dict(arrays)
ALL = target_names("all-linear")
TINY = dataclasses.replace(CONFIG, num_hidden_layers=2)
CASES = {
    "lora": Lora(4, 8.0, ALL),
    "rslora": Lora(4, 8.0, target_names("q_proj,v_proj"), rank_stabilised=True),
    "dora": Lora(4, 8.0, ALL, magnitudes=True),
    "loraplus": Lora(4, 8.0, ALL, learning_rate_ratio=4.0),
    "saved": Lora(4, 8.0, target_names("o_proj"), saved=("embed", "head")),
}
ADAPTED = dataclasses.replace(CONFIG, lora=Lora(4, 8.0, ALL))
DORA_OF_THREE = dataclasses.replace(CONFIG, lora=Lora(2, 8.0, ALL, magnitudes=True))
DORA = dataclasses.replace(CONFIG, num_hidden_layers=2, lora=Lora(4, 8.0, ALL, saved=("embed",), magnitudes=True))


def names_of_peft(model) -> dict[str, tuple[str, int | None]]:
    """PEFT's names of what is trained: our name, and the layer."""
    (segment,) = model.segments
    by_name = {param.name: param for param in jax.tree.leaves(segment.params)}
    found = {}
    for matrix, names in adapters(segment.params):
        for l in range(segment.num_layers):
            module = tensor_name(by_name[matrix], segment, l).removesuffix(".weight")
            found |= {f"{module}.lora_A.weight": (names.a, l), f"{module}.lora_B.weight": (names.b, l)}
            if names.magnitude:
                found[f"{module}.lora_magnitude"] = (names.magnitude, l)
    return found | {TENSOR_NAMES[name]: (name, None) for name in model.trained_params["outer"]}


def tree_of(model, prefix: str, names: dict[str, tuple[str, int | None]]) -> dict:
    """The arrays of the reference with this prefix, as a tree of ours."""
    tree: dict = {"blocks": {}, "outer": {}}
    for theirs, (ours, l) in names.items():
        *path, last = ours.split(".")
        branch = tree["outer" if l is None else "blocks"]
        for step in path:
            branch = branch.setdefault(step, {})
        x = REFERENCE[f"{prefix} {theirs}"]
        branch[last] = x if l is None else [*branch.get(last, []), x]
    return jax.tree.map(np.stack, tree, is_leaf=lambda x: isinstance(x, list))


def base_params() -> dict:
    """The parameters of the reference's base."""
    model = decoder_model.build(TINY)
    (segment,) = model.segments
    names: dict = {tensor_name(p): (p.name, None) for p in jax.tree.leaves(model.outer_params)}
    for l in range(segment.num_layers):
        names |= {tensor_name(p, segment, l): (p.name, l) for p in jax.tree.leaves(segment.params)}
    return tree_of(model, "base", names)


def with_values(small: Small, params: dict):
    """A new state with these values of all parameters."""
    state = small.init()._replace(weights=params, master=part_of(params, small.plan.master))
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, small.plan))


@pytest.mark.parametrize(("case", "devices", "placed"), [
    *quick_at([(case, 1, {}) for case in CASES]),
    *quick_at([("dora", 4, {"zero_level": 3, "tp_size": 2}), ("saved", 2, {"zero_level": 3, "shard_outer": True})]),
])  # fmt: skip
@needs(4)
def test_forward_gradients_and_two_steps_are_those_of_peft(case, devices, placed):
    config = dataclasses.replace(TINY, lora=CASES[case])
    model = decoder_model.build(config)
    names = names_of_peft(model)
    assert {f"{case} adapter {name}" for name in names} == {x for x in REFERENCE if x.startswith(f"{case} adapter ")}
    params = with_part(base_params(), tree_of(model, f"{case} adapter", names))
    ids = REFERENCE["tokens"]
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if devices == 1:

        @jax.jit
        def logits_and_gradients(params, inputs, labels):
            return plain_model(config)(params, inputs), jax.grad(plain_loss(config))(params, inputs, labels)

        logits, found = jax.device_get(logits_and_gradients(params, inputs, labels))
        np.testing.assert_allclose(logits, REFERENCE[f"{case} logits"], atol=1e-5)
        expected = tree_of(model, f"{case} gradient", names)
        assert worst_relative(part_of(found, expected), expected) < 1e-5
    optimizer = functools.partial(adamw, weight_decay=0.1, max_grad_norm=0.0)
    small = Small(devices, config=config, optimizer=optimizer, **placed)
    state = with_values(small, params)
    batch = [np.asarray(x, np.int32)[None] for x in (inputs, labels)]
    for _ in range(2):
        state, _ = small.step(state, *small.put(batch))
    expected = tree_of(model, f"{case} trained", names)
    found = jax.device_get(state.master)
    # A step is as large as the learning rate whatever the gradient: where that is nearly 0, rounding may turn it.
    worst = jax.tree.map(lambda a, b: np.quantile(np.abs(a - b), 0.999), found, expected)
    assert max(jax.tree.leaves(worst)) < 1e-5
    frozen = part_of(jax.device_get(state.weights), base_params())
    trained = decoder_model.build(config).trained_params["outer"]
    assert jax.tree.all(jax.tree.map(np.array_equal, frozen["blocks"], base_params()["blocks"]))
    for name, x in base_params()["outer"].items():
        assert np.array_equal(frozen["outer"][name], x) == (name not in trained)


def results_of(jaxpr, primitive: str) -> list[tuple[int, ...]]:
    """The shapes of the results of a primitive in a program, loops and functions included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            found += [x.aval.shape for x in equation.outvars]
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            found += results_of(inner, primitive) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.full(after=2)
@pytest.mark.parametrize(("recompute_block", "chunks", "precision"), [
    *[(*how, Precision()) for how in ((True, 1), (False, 1), (True, 2))],
    *quick_at([(True, 1, Precision(gradient_dtype="bfloat16"))]),
    *quick_at([(False, 1, Precision(recipe)) for recipe in RECIPES[1:]], 1),
])  # fmt: skip
def test_a_step_computes_no_gradient_of_what_is_frozen(recompute_block, chunks, precision):
    """No product of the whole step has the shape of a frozen matrix, and nothing is added up in that of a table."""
    D, F = (64, 160) if precision.recipe in BLOCK_SCALED else (32, 80)
    matrices = {(D, D), (D // 2, D), (F, D), (D, F)}
    table = (96, D)

    def shapes(lora):
        sizes = {"vocab_size": 96, "hidden_size": D, "intermediate_size": F, "head_dim": D // 4, "lora": lora}
        compute = Compute(sequence_chunks=chunks, precision=precision)
        small = Small(config=dataclasses.replace(CONFIG, **sizes), compute=compute, recompute_block=recompute_block)
        batch = [jax.ShapeDtypeStruct((2, 2, 24), jnp.int32)] * 2
        jaxpr = small.step.trace(small.plan, *batch).jaxpr
        return set(results_of(jaxpr, "dot_general")), set(results_of(jaxpr, "scatter-add"))

    products, tables = shapes(None)
    assert products > matrices | {table} and table in tables
    products, tables = shapes(ADAPTED.lora)
    assert not products & (matrices | {table}) and table not in tables
    assert products > {(4, D), (D, 4), (F, 4), (4, F)}


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.startswith("fp8_")])
def test_a_block_in_float8_saves_nothing_for_gradients_of_what_is_frozen(recipe):
    """Residuals in float8 are the transposed inputs of products, for the gradients of their matrices."""

    def saved_in_float8(config) -> int:
        segment = decoder_model.build(config, Compute(precision=Precision(recipe))).segments[0]
        params = segment.params
        one = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
        w = jax.eval_shape(lambda w: quantise_with_one_scale(params, w, fp8.E4M3), one)
        inputs = RecipeInputs(jnp.ones(SITES.number) if recipe == "fp8_hybrid" else None)
        _, saved = jax.eval_shape(segment.block_forward, w, jax.ShapeDtypeStruct((2, 16, 32), jnp.float32), inputs)
        return sum(x.dtype.itemsize == 1 for x in jax.tree.leaves(saved))

    assert saved_in_float8(CONFIG) == 4 and saved_in_float8(ADAPTED) == 0


def test_only_what_is_trained_has_state():
    plan = Small(config=ADAPTED, zero_level=3).plan
    for tree in (plan.master, plan.moments):
        assert tree["outer"] == {}
        assert {x.shape[1:] for x in jax.tree.leaves(tree)} == {(4, 32), (4, 80), (32, 4), (16, 4), (80, 4)}
    assert len(jax.tree.leaves(plan.master)) == 2 * len(ALL)


@pytest.mark.full
def test_adapters_that_are_new_change_no_bit():
    batch = tokens(2, 4, 16)
    curves = [Small(config=config).run for config in (CONFIG, ADAPTED)]
    losses = []
    for run in curves:
        state = run.init_state(0)
        losses.append(float(run.eval_step()(state.weights, *(x[0] for x in batch))[0]["loss"]))
    assert losses[0] == losses[1]


@pytest.mark.full
def test_adapters_begin_as_in_peft():
    model = decoder_model.build(DORA)
    base = jax.device_get(decoder_model.build(dataclasses.replace(DORA, lora=None)).init(1))
    small = Small(config=DORA)
    read = (lambda segment, l: jax.tree.map(lambda x: x[l], base["blocks"]), lambda model: base["outer"])
    state = jax.device_get(small.run.load_state(*read, seed=0))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, part_of(state.weights, base), base)))
    leaf = lambda tree, name: functools.reduce(lambda branch, step: branch[step], name.split("."), tree)
    for matrix, names in adapters(model.segments[0].params):
        a = leaf(state.master["blocks"], names.a)
        bound = a.shape[-1] ** -0.5
        assert np.abs(a).max() <= bound and np.std(a) == pytest.approx(bound / 3**0.5, rel=0.15)
        assert not leaf(state.master["blocks"], names.b).any()
        lengths = np.linalg.norm(leaf(base["blocks"], matrix), axis=-1)
        np.testing.assert_allclose(leaf(state.master["blocks"], names.magnitude), lengths, rtol=1e-6)
    a = leaf(state.master["blocks"], "attention.wq_lora.a")
    assert not np.array_equal(a[0], a[1])


OFFLOADS = dict.fromkeys(("offload_weights", "offload_residual", "offload_grads", "offload_optimizer"), True)
PLACED = [
    (DORA, 4, {"zero_level": 3, **OFFLOADS}),
    (DORA, 4, {"tp_size": 4}),
    (DORA_OF_THREE, 2, {"pp_size": 2}),  # one of the four layers in the stacks is padding
]


@pytest.mark.parametrize(("config", "devices", "placed"), quick_at(PLACED))
@needs(4)
def test_placements_change_nothing(config, devices, placed):
    batches = [tokens(2, 4, 16, seed=seed) for seed in range(2)]
    expected = Small(config=config).train(batches)
    np.testing.assert_allclose(Small(devices, config=config, **placed).train(batches), expected, rtol=1e-5)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.full
def test_magnitudes_begin_as_lengths_of_the_rows_that_are_multiplied(loaded):
    """Beside a base in NF4, whose rows are up to 1 % shorter or longer than those that it was made of."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    config = dataclasses.replace(CONFIG, **sizes, lora=Lora(2, 8.0, ("mlp.w_up",), magnitudes=True))
    small = Small(config=config, qlora_bnb=True)
    state = small.init()
    if loaded:
        base = jax.device_get(decoder_model.build(dataclasses.replace(config, lora=None)).init(1))
        read = (lambda segment, l: jax.tree.map(lambda x: x[l], base["blocks"]), lambda model: base["outer"])
        state = small.run.load_state(*read, seed=0)
    mlp = state.weights["blocks"]["mlp"]
    numbers = jax.vmap(lambda q: nf4.dequantise(q, "float32"))(mlp["w_up"])
    lengths = np.linalg.norm(numbers, axis=-1)
    np.testing.assert_allclose(state.master["blocks"]["mlp"]["w_up_lora"]["magnitude"], lengths, rtol=1e-6)
    if loaded:
        assert np.abs(lengths / np.linalg.norm(base["blocks"]["mlp"]["w_up"], axis=-1) - 1).max() > 1e-3


BAD = {
    "unknown target": ({"lora_target_modules": "q_proj,qkv"}, "lora_target_modules: expected names among q_proj"),
    "rank": ({"lora_rank": 2048}, "lora_rank: expected at most 768, the smaller side of self_attn.q_proj, got"),
    "no lora": ({"lora": False, "use_dora": True}, "use_dora: expected False with lora=False"),
    "master": ({"offload_master": "nvme", "nvme_path": "x"}, "offload_master: expected True or False with lora=True"),
    "persistent": ({"persistent_quants": True}, "persistent_quants: expected False with lora=True"),
    "quants": ({"offload_quants": True}, "offload_quants: expected False with lora=True"),
    "dora in float8": (
        {"recipe": "fp8_current", "use_dora": True},
        "use_dora: expected False with recipe='fp8_current', whose matrices have rows of other lengths",
    ),
    "optimizer": ({"optimizer": "normuon"}, "optimizer: expected 'adamw' with lora=True"),
    "nvme": ({"offload_optimizer": "nvme", "nvme_path": "/x"}, "offload_optimizer: expected True or False with lora"),
    "tied": (
        {"modules_to_save": "embed_tokens", "model.tie_word_embeddings": True},
        "modules_to_save: expected '' with tie_word_embeddings=True, since of a file",
    ),
    "module": ({"modules_to_save": "norm"}, "modules_to_save: expected names among embed_tokens, lm_head"),
    "alpha": ({"lora_alpha": 0.0}, "lora_alpha: expected more than 0"),
    "rounded": (
        {"use_dora": True, "zero_level": 3, "zero_quantized_weights": "int8"},
        "zero_quantized_weights: expected 'none' with use_dora=True",
    ),
    "dropout": ({"lora_dropout": 0.1, "use_dora": True}, "use_dora: expected False with lora_dropout=0.1"),
    "dtype": ({"lora_dtype": "float16"}, "lora_dtype: expected one of"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_settings_are_refused_in_one_line(changes, message):
    c = default_config()
    c.update_from_flattened_dict({"lora": True} | changes)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as error:
        checks.check(c)
    assert "\n" not in str(error.value)


def test_dropout_leaves_out_what_it_says_and_keeps_the_mean():
    x = jnp.ones((64, 256))
    y = np.asarray(dropped(x, jnp.uint32(3), 0.25))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert y.mean() == pytest.approx(1, abs=0.02) and y.std(axis=0).min() > 0.3
    assert not np.array_equal(y, dropped(x, jnp.uint32(4), 0.25))
    slope = jax.grad(lambda x: dropped(x, jnp.uint32(3), 0.25).sum())(x)
    np.testing.assert_array_equal(slope, y)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
@pytest.mark.full
def test_the_scale_of_rslora_is_alpha_by_the_root_of_the_rank_in_every_recipe(recipe):
    """Rank 4: 8 / sqrt(4) is what plain adapters have with alpha 16. Both are the same program."""
    wide = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=128, head_dim=32)
    compute = Compute(precision=Precision(recipe=recipe))
    batch = [jax.ShapeDtypeStruct((1, 4, 32), jnp.int32)] * 2

    def program(lora: Lora) -> str:
        small = Small(config=dataclasses.replace(wide, lora=lora), compute=compute)
        return small.step.lower(small.plan, *batch).as_text()

    stabilised = program(Lora(4, 8.0, ALL, rank_stabilised=True))
    assert stabilised == program(Lora(4, 16.0, ALL)) != program(Lora(4, 8.0, ALL))


@needs(2)
@pytest.mark.full
def test_devices_of_a_group_drop_the_same_inputs_of_a_shared_product():
    """All of them compute x a^T of column products, so results are those of one device."""
    lora = Lora(4, 8.0, target_names("q_proj,gate_proj"), dropout=0.5)
    config = dataclasses.replace(CONFIG, lora=lora)
    batches = [tokens(2, 4, 16, seed=i) for i in range(2)]
    expected = Small(config=config).train(batches)
    np.testing.assert_allclose(Small(2, config=config, tp_size=2).train(batches), expected, rtol=ORDER_OF_SUMS)


@pytest.mark.full
@needs(2)
def test_devices_of_a_group_drop_different_inputs_of_a_divided_product():
    """Each device has other inputs of a row product. A number that none drops would be dropped by all, or by none."""
    mesh = make_mesh(jax.devices()[:2], tp_size=2)

    class Weight:
        def __init__(self, x):
            self.x = x

        def __getitem__(self, _):
            return self.x

    def kept(in_axis):
        """Which inputs `[devices, tokens, inputs]` each device keeps: a is the identity."""

        def own(x):
            adapter = object.__new__(Adapter)
            values = {"lora": Lora(8, 8.0, (), dropout=0.5), "a": Weight(jnp.eye(8)), "b": Weight(jnp.eye(8))}
            vars(adapter).update(values)
            return adapter(x[0], jnp.eye(8), jnp.zeros_like(x[0]), in_axis, jnp.uint32(3))[None]

        spec = jax.P("tp")
        return np.asarray(jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones((2, 32, 8)))) > 0

    shared, divided = kept("embed"), kept("mlp")
    assert np.array_equal(*shared) and 0.3 < (divided[0] == divided[1]).mean() < 0.7


@pytest.mark.full
def test_dropout_is_the_same_when_blocks_are_recomputed_and_is_not_in_evaluation():
    config = dataclasses.replace(ADAPTED, lora=dataclasses.replace(ADAPTED.lora, dropout=0.5))
    batches = [tokens(2, 4, 16)] * 2
    recomputed, saved = (Small(config=config, recompute_block=again) for again in (True, False))
    curve = recomputed.train(batches)
    np.testing.assert_allclose(saved.train(batches), curve, rtol=1e-6)
    plain = Small(config=ADAPTED)
    assert abs(plain.train(batches)[0][0] - curve[0][0]) > 1e-4
    rows = [x[0] for x in tokens(2, 4, 16)]
    evaluated = [
        float(small.run.eval_step()(Small(config=ADAPTED).state.weights, *rows)[0]["loss"]) for small in (plain, saved)
    ]
    assert evaluated[0] == evaluated[1]
    grouped = Small(2, config=config, tp_size=2)
    assert np.isfinite(grouped.train(batches)).all()


def test_names_are_those_of_peft():
    assert target_names(" q_proj, o_proj,q_proj") == ("attention.wq", "attention.wo")
    mlp = "mlp.w_gate", "mlp.w_up", "mlp.w_down"
    assert target_names("all-linear") == tuple(f"attention.w{name}" for name in "qkvo") + mlp


def config_of(folder: Path, **changes):
    c = default_config()
    c.update(
        {"output_dir": str(folder), "data": "stdlib", "lora": True, "lora_rank": 4, "max_steps": 2, "sequence_len": 32}
    )
    c.update({"model_dtype": "float32", "sample_tokens": 0, "eval_batches": 1, "save_steps": 1} | changes)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 260}
    c.model.update(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    return c


@pytest.mark.full
def test_a_run_continues_and_its_checkpoints_have_adapters_alone(tmp_path):
    from surojax.convert import convert
    from surojax.inference.trained_model import load_trained
    from surojax.train import train

    c = config_of(tmp_path / "run", use_dora=True, lora_plus_ratio=2.0)
    whole = train(c)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    again = train(c)
    same = jax.tree.map(np.array_equal, *(jax.device_get((r.state.master, r.state.weights)) for r in (whole, again)))
    assert jax.tree.all(same)
    opened = load_trained(tmp_path / "run")
    assert jax.tree.all(jax.tree.map(np.array_equal, opened.weights, jax.device_get(whole.state.weights)))
    stored = sum(f.stat().st_size for f in (whole.checkpoint / "master").rglob("*") if f.is_file())
    # 20 kB of adapters, and metadata: 30 to 48 kB, as many files as writes came together.
    assert 2 * stored < sum(x.nbytes for x in jax.tree.leaves(whole.state.weights))
    with pytest.raises(ConfigError, match=r"expected adapters of a model that can be read, got .* drawn at random"):
        convert(tmp_path / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match="lora_rank is 4 there and 8 here"):
        train(config_of(tmp_path / "run", use_dora=True, lora_plus_ratio=2.0, lora_rank=8))


class InMemory:
    """Tensors of a base, drawn at random."""

    def __init__(self, seed: int):
        self.seed = seed

    def read(self, name: str) -> np.ndarray:
        return np.random.default_rng([self.seed, len(name)]).standard_normal((2, 3), np.float32)


def test_a_base_is_told_by_its_values():
    model = decoder_model.build(ADAPTED)
    one, other = (fingerprint(InMemory(seed), model) for seed in (0, 1))
    check_base(one, fingerprint(InMemory(0), decoder_model.build(DORA_OF_THREE)), "folder")
    with pytest.raises(CheckpointError, match="model_path: expected the base that the adapters were trained on"):
        check_base(other, one, "folder")

"""The verifier: it passes what is right, fails what is not, and has a row for every setting of the table."""

import itertools
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from small import quick_at

from surojax import verify as verifier
from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.config import fields as configs, flags
from surojax.config.fields import default_config
from surojax.declared import names_of
from surojax.errors import ConfigError
from surojax.numerics.recipes import RECIPES
from surojax.objectives.objectives import OBJECTIVES
from surojax.placement.mesh import abstract_mesh, data_parallel
from surojax.placement.table import Storage
from surojax.refusals.features import RECOMPUTE_PARTS
from surojax.refused_early import refuse_early
from surojax.verification import bounds as bounds_of, rows as rows_of, settings as settings_of, training
from surojax.verification.bounds import judge
from surojax.verification.row_batches import make_batches
from surojax.verification.rows import verify
from surojax.verification.settings import OFFLOADS, OWN, SETTINGS
from surojax.verification.training import config_of_row

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small_config(**changes):
    c = default_config()
    c.model.update(SIZES)
    c.update({"model_dtype": "float32", "sequence_len": 24, "learning_rate": 1e-2, **changes})
    return c


CONFIG_FILE = f"""
from surojax import default_config

def get_config():
    c = default_config()
    c.model.update({SIZES})
    c.update(dict(model_dtype="float32", sequence_len=24, learning_rate=1e-2))
    return c
"""


# In place of a row that compiles.
TRAINED = types.SimpleNamespace(trained=lambda first: [(1.0, 1.0)], close=lambda: None)

FOUR = [f"{name}@4" for name in ("offload_all", "overlap_update", "resident_layers", "device_memory", "offload_saved")]


@pytest.mark.parametrize(
    "only",
    quick_at([(["offload_all"],), (FOUR,)]),
    ids=["all-1", "4"],
)
def test_offloading_changes_no_bit(only):
    """Ten steps under every offload setting, alone and together; the other tests train under the other settings."""
    seen = []
    rows = verify(small_config(), steps=10, only=only, report=seen.append)
    assert [row.setting.name for row in rows] == only and seen == rows  # in the order of the table
    assert all((row.status, row.loss, row.grad_norm) == ("pass", 0, 0) for row in rows), seen


def test_rows_with_equal_arrays_begin_alike(monkeypatch):
    """Each as it is placed, from one that is drawn; a row with other arrays has a state of its own."""
    drawn = []

    def init_state(run, seed):
        drawn.append(run)
        return jax.tree.map(lambda p: jax.device_put(np.full(p.shape, len(drawn), p.dtype), p.sharding), run.plan)

    monkeypatch.setattr(Assembly, "init_state", init_state)
    curves = rows_of.Curves(small_config(), 1, None)
    states = {}
    for name in ("plain", "offload_all@4", "lora"):
        with curves.built(curves.table[name]) as row:
            states[name] = curves.first.of(row)
            assert jax.tree.map(lambda x: x.sharding, states[name]) == jax.tree.map(lambda x: x.sharding, row.run.plan)
    assert len(drawn) == 2
    first = {name: {float(x.max()) for x in jax.tree.leaves(jax.device_get(x))} for name, x in states.items()}
    assert first == {"plain": {1}, "offload_all@4": {1}, "lora": {2}}


@pytest.mark.full
def test_other_orders_of_sums_are_within_the_bound():
    (row,) = verify(small_config(), only=["lmhead_chunks"])
    assert row.status == "pass" and row.grad_norm < 1e-5, row  # measured: 7e-7, and 0 on some processors


@pytest.mark.full
@pytest.mark.parametrize("objective", ["dpo", "reward", "distill"])
def test_rows_of_another_objective_read_its_arrays(objective):
    """Pairs of answers with a reference's numbers in the batch, also with adapters; scores; a teacher's labels."""
    c = small_config(objective=objective, per_device_batch_size=OBJECTIVES[objective].together)
    c.model.num_labels = OBJECTIVES[objective].num_labels
    rows = verify(c, steps=2, only=["offload_all", "zero_level=3@4", "lora"])
    assert [row.status for row in rows] == ["pass"] * 3, rows
    assert rows[0].loss == 0 and rows[1].grad_norm < 1e-4, rows  # 0 on some processors


@pytest.mark.full
def test_a_setting_that_changes_the_result_fails(tmp_path, monkeypatch, capsys):
    """Offloading that makes each update a ten thousandth larger: the table says so, and the exit code is 1."""

    def changed(c, mesh, total_steps):
        if c.offload_optimizer:
            c.learning_rate *= 1.0001
        return from_config(c, mesh, total_steps)

    monkeypatch.setattr(training, "from_config", changed)
    (tmp_path / "small.py").write_text(CONFIG_FILE)
    with pytest.raises(SystemExit) as end:
        verifier.main(["--config", str(tmp_path / "small.py"), "--steps=2", "--only=plain,offload_optimizer"])
    out = capsys.readouterr().out
    assert end.value.code == 1 and "1 passed, 1 failed" in out
    assert "FAIL\n" in out and "too far; the first difference is in step 2" in out


def test_what_is_held_against_a_bound():
    """Equal to the bit, within a bound, a setting that did nothing, and numbers that are none."""
    bounds, plain = bounds_of.expected_bounds(small_config()), [(4.0, 1.0), (3.0, 2.0)]
    of_bfloat16 = bounds_of.expected_bounds(small_config(model_dtype="bfloat16"))
    assert of_bfloat16["saved"].reason.startswith("saved residuals are rounded to bfloat16")
    tied = small_config()
    tied.model.tie_word_embeddings = True
    for c in (small_config(), tied):
        expected = "order" if c is tied else "same"
        assert bounds_of.expected_bounds(c)["grouped"] == bounds_of.expected_bounds(c)[expected]
    moved = lambda by: [plain[0], (3.0 * (1 + by), 2.0)]
    assert judge(plain, plain, bounds["same"])[0] == "pass"
    assert judge(moved(2.0**-23), plain, bounds["same"])[0] == "FAIL"
    assert judge(moved(9e-5), plain, bounds["order"])[0] == "pass"
    assert judge(moved(2e-4), plain, bounds["order"])[0] == judge(moved(-2e-4), plain, bounds["order"])[0] == "FAIL"
    assert judge([(-4.0001, 1.0)], [(-4.0, 1.0)], bounds["order"])[0] == "pass"  # a loss may be below 0
    assert judge([(4.1, 1.1)], [(4.0, 1.0)], bounds["order"])[3].startswith(
        "loss and gradient norm too far; the first "
    )
    assert judge(moved(1e-3), plain, bounds["fp8"])[0] == "pass"
    assert judge(plain, plain, bounds["fp8"])[3] == "no difference at all: the setting did nothing"
    for bad in (np.nan, np.inf):
        assert judge(moved(bad), plain, bounds["order"])[0] == judge(plain, moved(bad), bounds["same"])[0] == "FAIL"
        assert judge(moved(bad), moved(bad), bounds["same"])[0] == "FAIL"


NO_ROW = {  # fields of `Storage` that no row has, and why
    **dict.fromkeys(settings_of.NUMBERS, "numbers are the config's"),
    "nvme_path": "rows with nvme get a temporary folder",
}


def test_a_config_that_a_run_refuses_is_refused():
    with pytest.raises(ConfigError, match=r"^lmhead_chunks: expected a divisor of"):
        rows_of.Curves(small_config(lmhead_chunks=7), 1, None)


def test_every_setting_of_the_table_has_a_row():
    """A new field of `placement.Storage`, or a new way to recompute, needs a line in SETTINGS."""
    keywords = {*names_of(Storage), *RECOMPUTE_PARTS}
    keywords |= {"recompute_block", "microbatches_per_fetch", "sequence_chunks", "overlap_update"}
    assert keywords - {name for s in SETTINGS for name in s.changes} == set(NO_ROW)


AXES = ("dp_replicate_size", "cp_size", "tp_size", "pp_size")


def test_every_axis_has_a_row_with_every_kind_of_placement():
    """What SETTINGS says of itself: a new axis needs these rows, and no row is missing for two of them."""
    kinds = {
        "alone": lambda changes: True,
        "offloads": lambda changes: all(changes.get(name) for name in OFFLOADS),
        "files": lambda changes: "nvme" in changes.values(),
        "packed": lambda changes: changes.get("sample_packing"),
        "adapters": lambda changes: changes.get("lora"),
    }
    found = {kind: set() for kind in kinds}
    for s in SETTINGS:
        axes = frozenset(axis for axis in AXES if s.changes.get(axis, 1) > 1)
        for kind, is_of in kinds.items():
            if is_of(s.changes):
                found[kind].add(axes)
    for kind, of_kind in found.items():
        assert {frozenset(), *(frozenset({axis}) for axis in AXES)} <= of_kind, kind
    assert {frozenset(two) for two in itertools.combinations(AXES, 2)} <= found["offloads"]


@pytest.mark.full
def test_every_row_compares_two_different_things():
    """No two rows draw the same but those that are two names of one setting; all have the same sequences a step, and
    configs/verify.py has sizes that they can use."""
    c = flags.load_config(verifier.ALL_ROWS)
    batches, microbatches = make_batches(c, 8, 1)
    table = {s.name: s for s in SETTINGS}
    assert len(table) == len(SETTINGS)

    def drawn(name: str):
        s = table[name]
        changes = s.changes | ({"nvme_path": "folder"} if "nvme" in s.changes.values() else {})
        row = config_of_row(c, s._replace(changes=changes), 1, len(batches[0]["inputs"]), microbatches * s.split)
        mesh = abstract_mesh(s.devices, **configs.mesh_sizes(row))
        shape = tuple(mesh.shape.items())
        per_step = row.per_device_batch_size * row.gradient_accumulation_steps * data_parallel(mesh)
        assert per_step == len(batches[0]["inputs"])
        engine = from_config(row, mesh, 1).engine
        recompute = [row[name] for name in RECOMPUTE_PARTS]
        compute = engine.model.compute
        chunks = compute.sequence_chunks, engine.lmhead_chunks, compute.cp_method
        settings = (engine.recompute_block, recompute, chunks, engine.packed, engine.pp_schedule, engine.overlap_update)
        trained = len(jax.tree.leaves(engine.layouts.master))
        model = engine.model.num_parameters
        return engine.table, shape, settings, engine.microbatches_per_fetch, s.split, trained, model

    names: dict[str, list[str]] = {}
    for s in SETTINGS:
        names.setdefault(repr(drawn(s.name)), []).append(s.name)
    assert [same for same in names.values() if len(same) > 1] == [["zero_level=2@4", "shard_gradients@4"]]


def in_recipe(recipe: str):
    """The small config, at widths and tokens that every recipe takes."""
    c = small_config(recipe=recipe, sequence_len=32)
    c.model.update({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2})
    return c


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_numbers_are_the_configs(recipe):
    """Whatever a row changes: the recipe, too, is not a setting of memory."""
    c = in_recipe(recipe)
    own = in_recipe(recipe)
    own.update({"model_dtype": "bfloat16", "zero_level": 2})
    for s in (*SETTINGS[:2], settings_of.rows_of_config(own, 4)[-1]):
        assert config_of_row(c, s, 1, 64, 2).recipe == recipe
        assert config_of_row(own, s, 1, 64, 2).model_dtype == "bfloat16"
    assert settings_of.rows_of_config(own, 4)[-1].changes == {"zero_level": 2}


@pytest.mark.full
def test_a_recipe_in_8_bits_is_verified_in_itself():
    """Offloading changes no bit of its losses; what it refuses is skipped, and why."""
    passed, skipped = ["offload_all", "zero_level=3@4", "recompute_parts"], ["zero_quantized_weights=fp8@4"]
    rows = verify(in_recipe("fp8_current"), steps=2, only=[*passed, *skipped])
    found = {row.setting.name: row for row in rows}
    assert {name: row.status for name, row in found.items()} == dict.fromkeys(passed, "pass") | dict.fromkeys(
        skipped, "skipped"
    )
    assert (found["offload_all"].loss, found["offload_all"].grad_norm) == (0, 0)
    assert "whose weights travel in fp8 anyway" in found["zero_quantized_weights=fp8@4"].why


@pytest.mark.parametrize("recipe", RECIPES)
def test_bounds_of_a_recipe(recipe):
    """Nothing where no arithmetic changes; where numbers are rounded again, the first gradient norm counts."""
    bounds = bounds_of.expected_bounds(in_recipe(recipe))
    plain = [(4.0, 1.0), (3.0, 2.0)]
    assert bounds["same"] == bounds["saved"] and bounds["same"].loss == bounds["same"].grad_norm == 0
    assert judge([(4.0, 1.2), (3.0, 2.0)], plain, bounds["order"])[0] == "FAIL"
    later = judge([(4.0, 1.0), (3.0, 2.4)], plain, bounds["order"])[0]
    assert later == ("FAIL" if recipe == "bf16" else "pass")
    assert judge([(4.0, 1.0), (3.0 * 1.03, 2.0)], plain, bounds["order"])[0] == "FAIL"
    assert ("random numbers" in bounds["order"].reason) == (recipe == "nvfp4")


@pytest.mark.full
def test_what_cannot_run_here_is_skipped_not_passed():
    rows = verify(
        small_config(), steps=1, only=["hsdp_cp_2x2x2_offload_all", "memcpy_all_gather@4"], devices=jax.devices()[:4]
    )
    assert [row.status for row in rows] == ["skipped"] * 2
    assert rows[0].why == "needs 8 devices, there are 4" and "expected false on cpu" in rows[1].why
    assert "0 passed, 0 failed, 2 skipped" in verifier.summary(rows)


@pytest.mark.parametrize(
    "argv, said",
    [
        (
            ["--only=plain,tp@4,qlora"],
            "2 rows are skipped, such as tp@4, because of the model's sizes: model.num_attention",
        ),
        (["--only=plain,tp@2,memcpy_all_gather@4"], None),  # refused, but not for their sizes
    ],
    ids=["sizes", "none"],
)
def test_rows_that_the_sizes_do_not_allow_are_named_first(monkeypatch, capsys, argv, said):
    """With the config that has sizes for all rows, before anything is compiled."""
    monkeypatch.setattr(rows_of, "Started", lambda *_: TRAINED)
    with pytest.raises(SystemExit):
        verifier.main(["--config", "configs/tiny.py", *argv])
    first, second, *_ = capsys.readouterr().out.splitlines()[1:]
    if said:
        assert first.startswith(said) and first.endswith("--config configs/verify.py has sizes that every row can use")
    assert (second if said else first).startswith("setting")


def test_the_configs_own_settings_are_a_row():
    """Under the config's own mesh; the others are what they are without them."""
    c = small_config(gpus=3, offload_residual=True, gradient_accumulation_steps=4, per_device_batch_size=2)
    own = settings_of.rows_of_config(c, 8)[-1]
    assert own.name == OWN and own.changes == {"offload_residual": True} and own.devices == 3
    assert len(make_batches(c, 8, 1)[0][0]["inputs"]) == 96  # 24 a step, for 3 devices and for 8, 4 microbatches
    assert not config_of_row(c, SETTINGS[0], 5, 96, 4).offload_residual
    assert settings_of.rows_of_config(small_config(), 8) == list(SETTINGS)
    assert settings_of.rows_of_config(small_config(gpus=1), 8) == list(SETTINGS)  # its own settings are "plain"
    assert settings_of.rows_of_config(small_config(gpus=0), 1) == list(SETTINGS)
    own = settings_of.rows_of_config(small_config(gpus=0), 8)[-1]
    assert (own.name, own.changes, own.devices, own.expect) == (OWN, {}, 8, "order")
    for n, expect, changes in [
        (1, "same", {"offload_optimizer": True, "offload_master": True, "device_memory": 0.1}),
        (1, "same", {"offload_weights": True, "resident_layers": 1, "offload_quants": True}),
        (1, "grouped", {"offload_weights": "nvme", "nvme_path": "x"}),
        (1, "grouped", {"microbatches_per_fetch": 2}),
        (1, "order", {"offload_optimizer": True, "lmhead_chunks": 2}),
        (2, "order", {"offload_optimizer": True}),
        (2, "sent_int8", {"zero_quantized_gradients": True}),
        (2, "fp8", {"zero_quantized_gradients": True, "zero_quantized_weights": "fp8"}),
        (2, "int8", {"zero_quantized_weights": "int8"}),
    ]:
        assert settings_of.rows_of_config(small_config(gpus=n, **changes), 8)[-1].expect == expect, changes


@pytest.mark.parametrize(
    "name", ["plain", "zero_level=3@8", "tp@2", "microbatches_per_fetch", "hsdp_pp_2x2x2_offload_all"]
)
def test_a_row_trains_on_all_sequences(name):
    """Whatever the config says of its own batches, schedule and devices."""
    (s,) = (s for s in SETTINGS if s.name == name)
    c = small_config(gpus=2, max_steps=0, num_epochs=3, lr_scheduler_type="wsd", warmup_steps=2, cooldown_steps=1)
    row = config_of_row(c, s, 5, 96, 4)
    groups = s.devices // configs.gpus_per_sequence(row)
    assert row.per_device_batch_size * row.gradient_accumulation_steps * groups == 96
    assert (row.gradient_accumulation_steps, row.gpus, row.max_steps, row.num_epochs) == (4, s.devices, 5, 1)
    assert (row.lr_scheduler_type, row.warmup_steps, row.warmup_ratio, row.cooldown_steps) == ("cosine", 0, 0, 0)
    assert c.gpus == 2 and not row.precompute_ref_log_probs


# (The config's sequences per step, devices, and those of a batch: a multiple of what each row divides them by.)
@pytest.mark.parametrize(
    "fields, devices, sequences, microbatches",
    [
        ({}, 8, 16, 2),
        ({"gradient_accumulation_steps": 3}, 8, 24, 3),
        ({"per_device_batch_size": 3, "gpus": 8}, 1, 32, 2),
        ({"per_device_batch_size": 2, "gpus": 8}, 1, 16, 2),
        ({"gpus": 6, "tp_size": 2}, 1, 48, 2),
        ({"gpus": 0}, 3, 48, 2),
        ({"objective": "dpo", "per_device_batch_size": 2}, 8, 32, 2),
    ],
)
def test_how_many_sequences_all_rows_train_on(fields, devices, sequences, microbatches):
    batches, found = make_batches(small_config(**fields), devices, 3)
    assert [len(batch["inputs"]) for batch in batches] == [sequences] * 3 and found == microbatches
    assert not np.array_equal(batches[0]["inputs"], batches[1]["inputs"])


def test_what_rows_train_on():
    """Frequent and rare tokens, whose next ones are the labels but for some; documents of 16 tokens on average."""
    c = small_config(sequence_len=256, per_device_batch_size=8)
    ((batch,), _) = make_batches(c, 8, 1)
    inputs, labels, starts = (batch[name] for name in ("inputs", "labels", "starts"))
    assert {x.dtype for x in batch.values()} == {np.dtype("int32")} and inputs.shape == labels.shape == starts.shape
    assert inputs.min() == 0 and inputs.max() == 63 and (inputs < 64 / 8).mean() == pytest.approx(0.5, abs=0.03)
    counted = labels[:, :-1] >= 0
    np.testing.assert_array_equal(labels[:, :-1][counted], inputs[:, 1:][counted])
    assert set(labels[labels < 0]) == {-1} and counted.mean() == pytest.approx(0.95, abs=0.01)
    at = np.arange(256)
    assert ((starts == at) | (starts == np.roll(starts, 1, axis=1))).all() and (starts[:, 0] == 0).all()
    assert (starts == at)[:, 1:].mean() == pytest.approx(1 / 16, abs=0.01)
    assert not np.array_equal(starts[0], starts[1])


def of_documents(starts, labels):
    """(row, the positions of the labels of a document) of each document that has some."""
    for row, (of_row, known) in enumerate(zip(starts, labels >= 0, strict=True)):
        for start in sorted(set(of_row)):
            if len(places := np.flatnonzero((of_row == start) & known)):
                yield row, places


def test_what_objectives_read_of_rows():
    """One margin a pair's answer and one score a text; log-probabilities of labels near those of a new model."""
    batch_of = lambda **fields: make_batches(small_config(sequence_len=64, per_device_batch_size=4, **fields), 8, 1)[0][
        0
    ]
    reward = small_config(objective="reward", per_device_batch_size=4)
    reward.model.num_labels = 1
    scored, margins = make_batches(reward, 8, 1)[0][0], batch_of(objective="dpo")
    np.testing.assert_array_equal(margins["starts"][::2], margins["starts"][1::2])  # a pair's answers
    expected = np.zeros_like(scored["scored"])
    for row, places in of_documents(scored["starts"], scored["labels"]):
        expected[row, places[-1]] = 1
    np.testing.assert_array_equal(scored["scored"], expected)
    at_first = np.zeros(scored["margin"].shape, bool)
    for row, places in of_documents(scored["starts"], scored["labels"]):
        at_first[row, places[0]] = True
    np.testing.assert_array_equal(scored["margin"] != 0, at_first)
    of_labels = margins["labels"] >= 0
    for batch, name, mean in (
        (margins, "reference", -np.log(64) - 0.05),
        (batch_of(objective="grpo"), "sampled", -np.log(64)),
    ):
        of_labels = batch["labels"] >= 0
        assert (batch[name] != 0).tolist() == of_labels.tolist() and batch[name].dtype == np.float32
        assert batch[name][of_labels].mean() == pytest.approx(mean, abs=0.02)
    grpo, kto = batch_of(objective="grpo"), batch_of(objective="kto")
    assert set(kto["desirable"].ravel()) == {-1, 0, 1}
    for batch, name in (grpo, "advantage"), (kto, "desirable"):
        for row, places in of_documents(batch["starts"], batch["labels"]):
            assert len(set(batch[name][row, places])) == 1 and batch[name][row, places[0]]
        assert not batch[name][batch["labels"] < 0].any() and batch[name].dtype == np.float32
    distill = batch_of(objective="distill")
    ids, logprobs = distill["teacher_ids"], distill["teacher"]
    assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() == 63
    assert (np.diff(np.sort(ids, axis=-1), axis=-1) > 0).all() and (ids[0, 0] != ids[0, 1]).any()
    np.testing.assert_allclose(np.exp(logprobs).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    "changes, left_out",
    [
        ({"lora": True}, ["lora", "experts", "hybrid"]),
        ({"model.num_experts": 2}, ["experts"]),
        ({"model.layer_types": "conv,full_attention"}, ["hybrid"]),
    ],
)
def test_rows_of_other_models_than_the_configs(changes, left_out):
    """Adapters, experts and layers of several kinds are compared with rows of their own, unless the config has some."""
    c = small_config(gpus=1)
    c.update_from_flattened_dict(changes)
    names = [s.name for s in settings_of.rows_of_config(c, 1)]
    assert [name for name in ("lora", "experts", "hybrid") if name not in names] == left_out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--only=ofload_master"], "--only: expected names of settings, got 'ofload_master'; did you mean offload_"),
        (["--only=zzzqqq"], "--only: expected names of settings, got 'zzzqqq'; --list shows them all"),
        (["--steps=0"], "--steps: expected 1 to 10,000, got 0"),
        (["--config.lmhead_chunks=7"], "lmhead_chunks: expected a divisor"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.setattr(rows_of, "Started", lambda *_: TRAINED)
    (tmp_path / "small.py").write_text(CONFIG_FILE)
    with pytest.raises(SystemExit) as end:
        verifier.main(["--config", str(tmp_path / "small.py"), *argv])
    assert f"surojax.verify: error: {message}" in str(end.value.code) and "\n" not in str(end.value.code)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--only=as_configured", "--config.persistent_quants=true", "--config.gpus=4"], "persistent_quants: expected"),
        (
            ["--only=offload_master=nvme", "--config.nvme_path=/nowhere/x"],
            "nvme_path: expected a folder, got '/nowhere",
        ),
        pytest.param(["--only=memcpy*"], 1, marks=pytest.mark.full),
    ],
)
def test_what_was_not_verified_did_not_pass(tmp_path, argv, message):
    """The config's own settings, when `train` would refuse them; a row without its disk; rows that were all skipped."""
    (tmp_path / "small.py").write_text(CONFIG_FILE)
    with pytest.raises(SystemExit) as end:
        verifier.main(["--config", str(tmp_path / "small.py"), "--steps=1", *argv])
    code = end.value.code
    assert code == 1 if message == 1 else message in str(code)


@pytest.mark.parametrize(
    "statuses, code, last",
    [
        ("pass pass", False, "2 passed, 0 failed"),
        ("pass FAIL", True, "1 passed, 1 failed"),
        ("skipped skipped", True, "0 passed, 0 failed, 2 skipped, which shows nothing about them"),
        ("pass skipped", False, "1 passed, 0 failed, 1 skipped, which shows nothing about them"),
    ],
)
def test_how_verify_ends(monkeypatch, capsys, statuses, code, last):
    """With the reason of each bound, once; a difference in three digits, "-" if there is none."""
    bound = bounds_of.expected_bounds(small_config())["order"]

    def verified(c, *, report, **_):
        rows = []
        for i, status in enumerate(statuses.split()):
            found = (None, None) if status == "skipped" else (0.0, 1.23e-6)
            why = "" if status == "pass" else "the reason"
            rows.append(rows_of.VerifiedSetting(SETTINGS[3 + i], status, *found, bound, why, 1.0))
            report(rows[-1])
        return rows

    monkeypatch.setattr(verifier, "verify", verified)
    monkeypatch.setattr(verifier, "refused_sizes", lambda *_, **how: {"tp@4": "too few heads"})
    with pytest.raises(SystemExit) as end:
        verifier.main(["--config=verify", "--only=plain"])
    assert end.value.code is code
    _, sizes, _, *lines = capsys.readouterr().out.splitlines()
    assert sizes.startswith("tp@4 is skipped, because of the model's sizes: too few heads; --config configs/verify.py")
    shown = [line.split()[2:] for line in lines if line.split()[1:2] == ["plain"]]
    numbers = {"pass": ["0", "1.2e-06"], "FAIL": ["0", "1.2e-06"], "skipped": ["-", "-"]}
    assert shown == [
        [*numbers[status], "1e-04", "1e-04", "(order)", "1.0", status] for status in statuses.split()
    ]  # fmt: skip
    assert lines.count("  the reason") == sum(status != "pass" for status in statuses.split())
    assert lines[-2:] == [f"order: {bound.reason}", last]


LISTED = Path(__file__).parent / "fixtures/verify_rows.txt"  # surojax verify --list > ..., to be read when it changes


def test_the_list_of_rows(capsys):
    """Written again, since rows are tried one by one: nothing else notices one that is missing, or has other fields."""

    def listed(*words):
        with pytest.raises(SystemExit) as end:
            verifier.main(["--list", *words])
        assert not end.value.code
        return capsys.readouterr().out.splitlines()

    assert listed() == LISTED.read_text().splitlines() and len(listed()) == len(SETTINGS)
    some = listed("--only=qlora,zero_level=3@*")
    assert [line.split()[0] for line in some] == ["zero_level=3@4", "zero_level=3@8", "qlora"]
    refuse_early("verify", ["--list", "--only", "plain"])  # needs no config
    with pytest.raises(ConfigError, match=r"^no config given"):
        refuse_early("verify", ["--only", "plain"])
    (own,) = listed("--only=as*", "--config=tiny", "--gpus=2", "--offload_grads")
    assert own.split() == [OWN, "plain", "order", "2", "offload_grads=True"]


@pytest.mark.parametrize("ends", [True, False])
def test_rows_compile_ahead_in_their_order_and_leave_nothing(monkeypatch, ends):
    """At most as many as there are threads wait beside the one that trains, also if that one ends with an error."""
    monkeypatch.setattr(rows_of, "cores", lambda: 2)
    events = []

    class Started:
        def __init__(self, c, s, *_):
            self.name = s.name
            events.append(("start", s.name))

        def trained(self, first):
            events.append(("train", self.name))
            if self.name == "offload_grads" and not ends:
                raise OSError("no space left")
            return [(1.0, 1.0)]

        def close(self):
            events.append(("close", self.name))

    monkeypatch.setattr(rows_of, "Started", Started)
    names = ["plain", "offload_grads", "offload_all", "tp@2", "tp_saved@2"]
    try:
        rows = verify(small_config(), steps=1, only=names)
    except OSError:
        assert not ends
        assert events[-2:] == [("close", "offload_all"), ("close", "tp@2")]
        return
    assert ends and [row.setting.name for row in rows] == names
    order = "start plain, train plain, start offload_grads, start offload_all, start tp@2, train offload_grads, "
    order += "start tp_saved@2, train offload_all, train tp@2, train tp_saved@2"
    assert ", ".join(map(" ".join, events)) == order


def test_a_model_that_does_not_fit_says_what_to_do(monkeypatch):
    def refuse(*_):
        raise ConfigError("does not fit: needs 9 GiB")

    monkeypatch.setattr(rows_of, "Started", refuse)
    with pytest.raises(ConfigError, match=r"does not fit.*; or verify a smaller model"):
        verify(small_config(), only=["plain"])

"""What was measured on GPUs here corrects what is predicted next, and a bad file corrects nothing."""

import dataclasses
import datetime
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.own_files import write_whole
from surojax.planner import candidate, fastest as fit, prediction, run_plan, search, seen
from surojax.planner.file_time import SimulatedStep
from surojax.planner.gpus import GPUS
from surojax.planner.hlo import parse_module
from surojax.planner.prediction import Prediction
from surojax.planner.rates import LATENCIES

KIND = "NVIDIA GeForce RTX 4090"
GPU = GPUS["rtx4090"]


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "cache" / "rates.json")


def entries(file: str) -> list[dict]:
    with open(file) as written:
        return json.load(written)["entries"]


def test_a_measured_step_corrects_the_same_settings_exactly_and_others_by_the_median(file):
    assert seen.corrected(GPU, file) is GPU is seen.corrected(GPU, "")
    for settings, measured in (("a", 1.1), ("b", 1.3), ("c", 1.2), ("b", 1.5)):  # the newest of "b" counts
        line = seen.record(file, KIND, 1.0, measured, settings, 1)
        assert line == f"written: a step took {measured:.2f} x the predicted time; plan and fit read {file}"
    assert [x["settings"] for x in entries(file)] == ["a", "c", "b"]
    assert entries(file)[0].keys() >= {"date", "versions", "gpus", "measured_s", "predicted_s"}
    for settings, factor in (("a", 1.1), ("b", 1.5), ("new", 1.2)):
        found = seen.corrected(GPU, file, settings)
        assert found.seen.factor == factor and found.seen.same == (settings != "new") and file in found.seen.note
        assert found.rates.products == pytest.approx(GPU.rates.products / factor)
        assert found.rates.hop == pytest.approx(GPU.rates.hop * factor) and found.rates.duplex == GPU.rates.duplex
    assert seen.corrected(GPUS["rtx3090"], file, "a") is GPUS["rtx3090"]


def test_another_plugin_is_named(file, monkeypatch):
    """A step that was measured with 0.11 says less of a program of 0.12."""
    monkeypatch.setattr(seen.cuda_plugin, "plugin_version_text", lambda: "0.11.2")
    seen.record(file, GPU.name, 1.0, 2.0, "a", 1)
    assert "CUDA plugin" not in seen.corrected(GPU, file, "a").seen.note
    monkeypatch.setattr(seen.cuda_plugin, "plugin_version_text", lambda: "0.12.0.1")
    assert "CUDA plugin 0.11.2, while 0.12.0.1 is installed" in seen.corrected(GPU, file, "a").seen.note


def test_the_newest_entries_are_kept_and_the_last_date_is_named(file, monkeypatch):
    monkeypatch.setattr(seen, "MOST_ENTRIES", 3)
    for day, settings in enumerate("abcd", 1):
        monkeypatch.setattr(
            seen, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda day=day: datetime.date(2026, 1, day)))
        )
        seen.record(file, KIND, 1.0, 1.1, settings, 1)
    assert [x["settings"] for x in entries(file)] == ["b", "c", "d"]
    assert "to 2026-01-04" in seen.corrected(GPU, file).seen.note


def test_simulation_and_estimate_share_the_correction(file):
    """A step that took 1.25 x the predicted time is predicted to take just that, with a range of its own."""
    module = parse_module("""HloModule step, is_scheduled=true

ENTRY %main (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %b = bf16[4096,4096]{1,0} parameter(1)
  ROOT %y = bf16[4096,4096]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}""")
    mesh = {"dp_shard": 1}
    step = SimulatedStep([module], mesh)
    plain = prediction.predict(step, GPU, tokens=1, compute_time=0.0)
    seen.record(file, KIND, plain.predicted_step_s, 1.25 * plain.predicted_step_s, "a", 1)
    same, other = (
        prediction.predict(
            SimulatedStep([module], mesh), seen.corrected(GPU, file, settings), tokens=1, compute_time=0.0
        )
        for settings in ("a", "b")
    )
    assert same.predicted_step_s == pytest.approx(1.25 * plain.predicted_step_s, rel=1e-3) == other.predicted_step_s
    assert same.uncorrected_s == pytest.approx(plain.predicted_step_s)  # what the next run is compared with
    low, high = same.predicted_range_s
    assert high / low == pytest.approx(1.03 / 0.97) and same.hangs_on == ""
    low, high = other.predicted_range_s
    assert low <= plain.predicted_step_s < other.predicted_step_s < high
    assert "with these settings" in same.corrected and "with 1 other settings" in other.corrected


def test_single_rates_replace_what_is_assumed(file):
    """As doctor writes them, see tests/test_doctor.py; a step measured without them does not count any more."""
    seen.record(file, KIND, 1.0, 2.0, "a", 1)
    versions = {"device_kind": KIND, "gpus": 1, "date": "2026-11-23", "versions": {}}
    rates = [versions | {"rate": "host", "value": 0.6}, versions | {"rate": "hop", "value": 3e-5}]
    write_whole(Path(file), {"version": 1, "entries": [*entries(file), *rates]})
    found = seen.corrected(GPU, file, "a")
    assert (found.rates.host, found.rates.hop, found.seen.factor) == (0.6, 3e-5, 1.0)
    assert found.rates.products == GPU.rates.products and found.seen.replaced == ("hop", "host")
    assert found.spans()["host"].source == "measured here" and found.spans()["duplex"] == GPU.spans()["duplex"]
    assert set(LATENCIES) > {"hop"} and found.spans()["latencies"] == GPU.spans()["latencies"]
    seen.record(file, KIND, 1.0, 1.5, "a", 1, replaced=found.seen.replaced)
    assert seen.corrected(GPU, file, "a").rates.host == pytest.approx(0.6 / 1.5)


HOST_RATE = {"device_kind": KIND, "rate": "host", "value": 0.9, "date": ""}
BAD = [
    "", "{", "[]", "[" * 100_000, '{"version": 2, "entries": []}', '{"version": 1}', '{"version": 1, "entries": [3]}',
    *(
        json.dumps({"version": 1, "entries": [entry]})
        for entry in (
            {"device_kind": KIND, "rate": "products", "value": "0.9", "date": ""},
            {"device_kind": KIND, "rate": "no_such", "value": 0.9, "date": ""},
            {"device_kind": KIND, "rate": "products", "value": -1, "date": ""},
            {"device_kind": KIND, "rate": "step", "value": 1e9, "date": "", "settings": "", "replaced": []},
            {"device_kind": KIND, "rate": "step", "value": 1.0, "date": "", "settings": "", "replaced": [[]]},
            {"device_kind": KIND, "rate": "step", "value": 1.0, "date": "", "settings": ""},
            *({name: value for name, value in HOST_RATE.items() if name != lacking} for lacking in HOST_RATE),
            *(HOST_RATE | {name: 3} for name in ("device_kind", "rate", "date", "versions", "settings", "replaced")),
        )
    ),
    '{"version": 1, "entries": [{"device_kind": "x", "rate": "host", "date": "", "value": NaN}]}',
    " " * (2**20 + 1),
]  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_bad_content_is_refused_in_a_line_and_left_as_it_is(tmp_path, text):
    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"^rates_file: expected .*, got .* \(.+\); move it away, or .*rates_file=$"):
        seen.corrected(GPU, str(file))
    line = seen.record(str(file), KIND, 1.0, 1.0, "a", 1)
    assert line.startswith("note: what was measured is not written: rates_file: ") and file.read_text() == text


def test_what_cannot_be_written_ends_nothing(tmp_path):
    assert seen.corrected(GPU, "~nobody-here/rates.json") is GPU
    (tmp_path / "file").write_text("")
    line = seen.record(str(tmp_path / "file" / "rates.json"), KIND, 1.0, 1.0, "a", 1)
    assert line.startswith("note: what was measured is not written") and "\n" not in line
    assert seen.record("", KIND, 1.0, 1.0, "a", 1) == ""
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


def test_a_run_writes_on_a_gpu_only_and_only_what_was_predicted(file):
    c = default_config()
    c.rates_file = file
    devices = [SimpleNamespace(platform="gpu", device_kind=KIND)] * 2
    predicted = Prediction(predicted_step_s=2.4, uncorrected_s=2.0)
    steps = [60.0, 3.0, 3.0, 2.0, 3.0, 9.0]
    cpu = [SimpleNamespace(platform="cpu", device_kind=KIND)]
    for of in ((cpu, predicted, steps), (devices, Prediction(), steps), (devices, predicted, steps[:-1])):
        assert seen.of_run(c, *of) == ""
    c.nvme_path = "x"
    assert seen.of_run(c, devices, predicted, steps) == ""
    c.nvme_path = ""
    with pytest.raises(FileNotFoundError):
        entries(file)
    assert "1.50 x" in seen.of_run(c, devices, predicted, steps)
    (entry,) = entries(file)
    assert (entry["value"], entry["gpus"], entry["settings"]) == (1.5, 2, seen.settings_key(c, 2))


def test_settings_that_change_time_have_names_of_their_own():
    """And those that do not have not: a run in another folder is the same step."""
    c = default_config()
    key = seen.settings_key(c, 1)
    c.output_dir, c.learning_rate, c.data = "elsewhere", 1.0, "x.txt"
    assert seen.settings_key(c, 1) == key != seen.settings_key(c, 2)
    c.offload_weights = True
    assert seen.settings_key(c, 1) != key


@pytest.mark.parametrize("changes", [{}, {"recipe": "mxfp8", "zero_level": 3}, {"attention": "xla"}])
def test_a_plan_finds_what_a_run_of_its_config_wrote(changes, monkeypatch):
    """The key is of the config as `train` takes it: a plan replaces "auto" and an unset overlap_update in its copy."""
    c = default_config()
    c.update(changes)
    keys = []

    def stop(gpu, path, settings):
        keys.append(settings)
        raise ConfigError("stop")

    monkeypatch.setattr(seen, "corrected", stop)
    monkeypatch.setattr(run_plan.aot, "available", lambda: False)
    with pytest.raises(ConfigError, match="stop"):
        run_plan.plan(c, "b200")
    assert keys == [seen.settings_key(c, 1)]


# What changes no step's time.
ELSEWHERE = """
    output_dir seed max_steps num_epochs eval_steps eval_batches save_steps save_total_limit resume_from_checkpoint
    sample_prompt sample_tokens sample_temperature data eval_data text_field datasets validation_datasets data_cache
    on_long on_bad_row train_on chat_template system_prompt tokenizer model_path from_scratch rates_file learning_rate
    lr_scheduler_type warmup_steps warmup_ratio cooldown_steps final_lr_fraction weight_decay z_loss
    model.initializer_range lora_alpha lora_plus_ratio lora_adapter lora_base_adapter gpus
    distill_path
""".split()


@pytest.mark.parametrize("name", [*ELSEWHERE, "adamw_beta1", "beta"])
def test_a_setting_that_changes_no_time_is_in_no_name(name):
    c = default_config()
    key = seen.settings_key(c, 1)
    owner = c.model if name.startswith("model.") else c
    with owner.unlocked(), owner.ignore_type():
        owner[name.removeprefix("model.")] = "another"
    assert seen.settings_key(c, 1) == key


def test_fit_reads_the_file_and_names_it(file, monkeypatch):
    """Its estimates are 1.5 x as long, so they compare with predictions; a bad file ends it in a line."""
    c = default_config()
    c.rates_file = file
    seen.record(file, GPUS["rtx3090"].name, 1.0, 1.5, "a", 1)
    facts = []

    def of(space, **_):
        facts.append(space.gpu)
        return search.Found([], 1, 1, None, (), [], {})

    monkeypatch.setattr(fit, "search", of)
    monkeypatch.setattr(fit.remedies, "with_limits_lifted", lambda _: [])
    monkeypatch.setattr(fit.aot, "available", lambda: False)
    said: list[str] = []
    fit.fastest(c, "3090", say=said.append)
    assert any(file in line and "1.50 x" in line for line in said)
    once, longer = (candidate.estimated(c, gpu).seconds for gpu in (GPUS["rtx3090"], *facts))
    assert longer == pytest.approx(1.5 * once)
    with open(file, "w") as written:
        written.write("{")
    with pytest.raises(ConfigError, match="rates_file"):
        fit.fastest(c, "rtx3090")


def test_a_gpu_is_hashable_with_what_was_seen(file):
    """Estimates of products are kept by GPU, so two that differ must not be the same."""
    seen.record(file, KIND, 1.0, 1.5, "a", 1)
    found = seen.corrected(GPU, file)
    assert hash(found) != hash(GPU) and found != GPU and found == dataclasses.replace(found)
